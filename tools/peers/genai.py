"""onnxruntime-genai: plain, with n-grams (its prompt lookup), and with a draft model; models made by its builder."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tools.peers.protocol import Text, Way, convert_with, serve

REQUIREMENTS = (
    ("torch==2.13.0",),  # installed separately, see the Makefile
    ("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1", "transformers==5.23.0", "onnx==1.23.2", "onnx-ir==1.1.0"),
)
LOOKUP = [
    {"ngram_size": 3, "max_draft_tokens": 3},
    {"ngram_size": 3, "max_draft_tokens": 8},
    {"ngram_size": 3, "min_adaptive_k": 2},
]
DRAFT = [{"max_draft_tokens": 2}, {"max_draft_tokens": 4}, {"min_adaptive_k": 2}]


def ways() -> list[Way]:
    all_ways = []
    for weights in ("fp32", "int4"):
        plain = f"genai, {weights}"
        all_ways += [
            Way(plain, weights),
            Way(f"{plain}, n-grams", weights, plain, settings=LOOKUP),
            Way(f"{plain}, draft model", weights, plain, draft=True, settings=DRAFT),
        ]
    return all_ways


def convert(checkpoint: Path, out: Path, weights: str) -> None:
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(out)]
    convert_with([*builder, "-p", weights, "-e", "cpu", "-c", str(out / "cache")])


class Loaded:
    def __init__(self, model: str, threads: int, draft: str | None = None) -> None:
        import onnxruntime_genai

        self.api = onnxruntime_genai
        session = {"session_options": {"intra_op_num_threads": threads}}
        models: dict[str, Any] = {"decoder": session}
        if draft:
            decoder = json.loads((Path(draft) / "genai_config.json").read_text())["model"]["decoder"]
            file = os.path.relpath(Path(draft) / decoder["filename"], model)
            models["draft"] = {
                **decoder,
                "filename": file,
                "session_options": {**decoder["session_options"], **session["session_options"]},
            }
        config = onnxruntime_genai.Config(model)
        config.overlay(json.dumps({"model": models}))
        self.model = onnxruntime_genai.Model(config)
        self.versions = {"onnxruntime-genai": onnxruntime_genai.__version__}

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        started = time.perf_counter()
        params = self.api.GeneratorParams(self.model)
        params.set_search_options(max_length=len(ids) + count, do_sample=False)
        if setting:
            params.set_speculative_options(**setting)
        generator = self.api.Generator(self.model, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        first_seconds, first = time.perf_counter() - started, generator.get_speculative_stats()
        while not generator.is_done():
            generator.generate_next_token()
        seconds, last = time.perf_counter() - started, generator.get_speculative_stats()
        tokens = generator.get_sequence(0)[len(ids) :].tolist()
        # A step may queue more tokens than the requested one. Without speculation there are no statistics.
        first_tokens = 1 + int(first["tokens_buffered"])
        passes = len(tokens) - 1
        if last["rounds"]:
            passes = int(sum(last[name] - first[name] for name in ("target_forward_passes", "standard_fallback_steps")))
        return Text(tokens, seconds, first_seconds, first_tokens, passes)


if __name__ == "__main__":
    serve(Loaded, convert)
