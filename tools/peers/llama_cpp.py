"""llama.cpp through llama-cpp-python, compiled here: plain and with prompt lookup, over GGUF files made from the
checkpoint."""

import json
import time
from pathlib import Path
from typing import Any

from tools.peers.protocol import Text, Way, serve

REQUIREMENTS = (("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0"),)
LOOKUP = [
    {"max_ngram_size": 3, "num_pred_tokens": 3},
    {"max_ngram_size": 2, "num_pred_tokens": 5},
    {"max_ngram_size": 2, "num_pred_tokens": 10},
]
SOURCE = "model-f32.gguf"


def ways() -> list[Way]:
    all_ways = []
    for weights in ("f32", "f16", "q8_0", "q4_0"):
        plain = f"llama.cpp, {weights}"
        all_ways += [
            Way(plain, weights),
            Way(f"{plain}, prompt lookup", weights, plain, options={"lookup": True}, settings=LOOKUP),
        ]
    return all_ways


def convert(checkpoint: Path, out: Path, weights: str) -> None:
    import llama_cpp

    source = out / SOURCE
    out.mkdir()
    write_gguf(checkpoint, source)
    if weights == "f32":
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{weights.upper()}")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out / f"model-{weights}.gguf").encode(), params):
        raise RuntimeError(f"llama_model_quantize to {weights} failed")
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
    def __init__(self, model: str, threads: int, lookup: bool = False) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        file = next(Path(model).glob("*.gguf"))
        self.lookup = LlamaPromptLookupDecoding() if lookup else None
        self.model = llama_cpp.Llama(
            str(file),
            n_ctx=0,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            logits_all=lookup,  # otherwise lookups fail after 512 positions
            draft_model=self.lookup,
            verbose=False,
        )
        self.versions = {"llama-cpp-python": llama_cpp.__version__}

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        for name, value in setting.items():
            setattr(self.lookup, name, value)
        self.model.reset()  # otherwise a prefix shared with the previous prompt is not read again
        passes, tokens = 0, list[int]()
        evaluate = self.model.eval

        def counted(tokens: Any) -> None:
            nonlocal passes
            passes += 1
            evaluate(tokens)

        self.model.eval = counted
        started = time.perf_counter()
        for token in self.model.generate(ids, temp=0.0):
            tokens.append(token)
            if len(tokens) == 1:
                first_seconds = time.perf_counter() - started
            if len(tokens) == count or token == self.model.token_eos():
                break
        seconds = time.perf_counter() - started
        self.model.eval = evaluate
        return Text(tokens, seconds, first_seconds, 1, passes - 1)


if __name__ == "__main__":
    serve(Loaded, convert)
