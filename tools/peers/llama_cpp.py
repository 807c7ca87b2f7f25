"""llama.cpp's server, compiled here: plain, with n-grams, and with a draft model, over GGUF files made from the
checkpoint."""

import ctypes
import http.client
import json
import os
import shlex
import shutil
import socket
import subprocess
import tarfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tools.peers.protocol import Text, Way, beside, convert_with, peak, serve

REQUIREMENTS = (("cmake==4.4.4", "ninja==1.13.0", "gguf==0.19.0", "safetensors==0.8.0"),)
SOURCES = "llama-cpp-python==0.3.36"  # a source package that contains llama.cpp
NGRAMS: list[dict[str, Any]] = [
    {"spec_type": "ngram-simple", "spec_ngram_simple_size_n": 3, "spec_ngram_simple_size_m": 3},
    {"spec_type": "ngram-simple", "spec_ngram_simple_size_n": 3, "spec_ngram_simple_size_m": 8},
    {"spec_type": "ngram-map-k", "spec_ngram_map_k_size_n": 3, "spec_ngram_map_k_size_m": 5},
    {"spec_type": "ngram-map-k4v", "spec_ngram_map_k4v_size_n": 3, "spec_ngram_map_k4v_size_m": 5},
    {
        "spec_type": "ngram-mod",
        "spec_ngram_mod_n_match": 4,
        "spec_ngram_mod_n_min": 1,
        "spec_ngram_mod_n_max": 8,
    },
    {"spec_type": "ngram-cache"},
]
DRAFT: list[dict[str, Any]] = [
    {"spec_type": "draft-simple", "spec_draft_n_max": 2},
    {"spec_type": "draft-simple", "spec_draft_n_max": 4},
    {"spec_type": "draft-simple", "spec_draft_n_max": 8, "spec_draft_p_min": 0.6},
]
SOURCE = "model-f32.gguf"
BUILT = "llama-server", "llama-quantize"


def build(python: Path) -> None:
    """Compiles the server and the quantizer beside the Python of an environment, with CMAKE_ARGS of this process's.
    Raises subprocess.CalledProcessError."""
    step = partial(subprocess.run, capture_output=True, text=True, check=True)
    folder, tools = python.parent.parent / "llama.cpp", python.parent
    shutil.rmtree(folder, ignore_errors=True)  # of another version, or of a build that failed
    download = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", folder]
    step([*download, SOURCES])
    (package,) = folder.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("*/vendor/llama.cpp")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"]
    made = folder / "build"
    configured = [tools / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-S", source, "-B", made]
    step([*configured, *options, *shlex.split(os.environ.get("CMAKE_ARGS", ""))])
    step([tools / "cmake", "--build", made, "--target", *BUILT])
    for name in BUILT:
        shutil.copy(made / "bin" / name, tools)


def ways() -> list[Way]:
    all_ways, drafting = [], {"drafting": True}
    for weights in ("f32", "f16", "q8_0", "q4_0"):
        plain = f"llama.cpp, {weights}"
        all_ways += [
            Way(plain, weights),
            Way(f"{plain}, n-grams", weights, plain, options=drafting, settings=NGRAMS),
            Way(f"{plain}, draft model", weights, plain, draft=True, options=drafting, settings=DRAFT),
        ]
    return all_ways


def convert(checkpoint: Path, out: Path, weights: str) -> None:
    source = out / SOURCE
    out.mkdir()
    write_gguf(checkpoint, source)
    if weights != "f32":
        convert_with([beside("llama-quantize"), str(source), str(out / f"model-{weights}.gguf"), weights])
        source.unlink()


def write_gguf(checkpoint: Path, out: Path) -> None:
    """Writes a Llama checkpoint and its vocabulary as GGUF in fp32, with the names of llama.cpp's architecture "llama".

    In llama.cpp rotary pairs are adjacent, in transformers half a head apart, so rows of queries and keys are permuted.
    """
    import gguf
    import numpy as np
    from safetensors import safe_open

    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rotary embeddings of type {rope['rope_type']} are not written to GGUF here")

    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta") or rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    # Prompts are token ids, so pieces only need to exist and to differ.
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    pieces = {index: piece for piece, index in model["vocab"].items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([pieces.get(i, f"<unused {i}>") for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dict
                data = tensors.get_tensor(name).astype(np.float32)
                for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
                    if part in name:
                        data = data.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(data.shape)
                writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Loaded:
    """llama-server in a process of its own. It drafts as its options say, so another setting starts it anew."""

    def __init__(self, model: str, threads: int, draft: str = "", drafting: bool = False) -> None:
        import gguf

        count = str(threads)
        self.command = [beside("llama-server"), "--model", self._file(model), "--ctx-size", "0"]
        self.command += ["--threads", count, "--threads-batch", count, "--flash-attn", "on", "--parallel", "1"]
        self.command += ["--spec-draft-model", self._file(draft)] if draft else []
        self.end = int(gguf.GGUFReader(self._file(model)).get_field("tokenizer.ggml.eos_token_id").contents())
        self.versions = {"llama.cpp": SOURCES}
        self.server: subprocess.Popen[bytes] | None = None
        self.setting: dict[str, Any] = {}
        if not drafting:
            self._start({})

    @staticmethod
    def _file(folder: str) -> str:
        return str(next(Path(folder).glob("*.gguf")))

    def _start(self, setting: dict[str, Any]) -> None:
        if self.server:
            self.server.kill()
            self.server.wait()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = [text for name, value in setting.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        self.server = subprocess.Popen(
            [*self.command, *options, "--port", str(self.port)],
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, 9),  # PR_SET_PDEATHSIG: it ends with this process
        )
        self.setting = setting
        while self.server.poll() is None:
            try:
                if self._ask("GET", "/health").status == 200:
                    return
            except ConnectionError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"llama-server {' '.join(options)} ended with status {self.server.returncode}")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def peak(self) -> float:
        return peak(str(self.server.pid)) if self.server and self.server.poll() is None else 0.0

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        if not self.server or setting != self.setting:
            self._start(setting)
        body = {"prompt": ids, "n_predict": count, "temperature": 0, "cache_prompt": False}
        tokens, first, last = list[int](), 0.0, dict[str, Any]()
        started = time.perf_counter()
        with self._ask("POST", "/completion", {**body, "stream": True, "return_tokens": True}) as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                last = json.loads(line[6:])
                if new := last.get("tokens"):
                    first = first or time.perf_counter() - started
                    tokens += new
        seconds = time.perf_counter() - started
        if "timings" not in last:
            raise RuntimeError(f"llama-server answered {last}")
        if last["stop_type"] == "eos":
            tokens.append(self.end)
        accepted = last["timings"].get("draft_n_accepted", 0)
        return Text(tokens, seconds, first or seconds, 1, last["timings"]["predicted_n"] - 1 - accepted)


if __name__ == "__main__":
    serve(Loaded, convert)
