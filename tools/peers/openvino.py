"""OpenVINO GenAI: plain, with prompt lookup, and with a draft model; models converted by optimum-intel."""

import time
from pathlib import Path
from typing import Any

from tools.peers.protocol import Text, Way, beside, convert_with, serve

REQUIREMENTS = (
    ("torch==2.13.0",),  # installed separately, see the Makefile
    ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
)
LOOKUP = [
    {"max_ngram_size": 3, "num_assistant_tokens": 3},
    {"max_ngram_size": 3, "num_assistant_tokens": 5},
    {"max_ngram_size": 2, "num_assistant_tokens": 10},
]
DRAFT: list[dict[str, Any]] = [
    {"num_assistant_tokens": 2},
    {"num_assistant_tokens": 4},
    {"assistant_confidence_threshold": 0.4},
]


def ways() -> list[Way]:
    all_ways = []
    for weights in ("fp32", "fp16", "int8", "int4"):
        plain = f"openvino, {weights}"
        # By default it computes in bf16 where the processor can.
        options = {"precision": "f32"} if weights == "fp32" else {}
        lookup = {**options, "lookup": True}
        all_ways += [
            Way(plain, weights, options=options),
            Way(f"{plain}, prompt lookup", weights, plain, options=lookup, settings=LOOKUP),
            Way(f"{plain}, draft model", weights, plain, draft=True, options=options, settings=DRAFT),
        ]
    return all_ways


def convert(checkpoint: Path, out: Path, weights: str) -> None:
    exporter = [beside("optimum-cli"), "export", "openvino", "--model", str(checkpoint)]
    task = ["--task", "text-generation-with-past", "--weight-format", weights]
    task += ["--group-size", "64"] if weights == "int4" else []  # rows need not be multiples of 128, its default
    convert_with([*exporter, *task, str(out)])


class Loaded:
    def __init__(
        self, model: str, threads: int, lookup: bool = False, draft: str | None = None, precision: str = ""
    ) -> None:
        import openvino
        import openvino_genai

        self.genai, self.tensor = openvino_genai, openvino.Tensor
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        if precision:
            properties["INFERENCE_PRECISION_HINT"] = precision
        if lookup:
            properties["prompt_lookup"] = True
        if draft:
            properties["draft_model"] = openvino_genai.draft_model(draft, "CPU", INFERENCE_NUM_THREADS=threads)
        self.model = openvino_genai.LLMPipeline(model, "CPU", **properties)
        self.versions = {"openvino-genai": openvino_genai.__version__}

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        import numpy as np

        config = self.genai.GenerationConfig(max_new_tokens=count, do_sample=False, **setting)
        config.eos_token_id = self.model.get_tokenizer().get_eos_token_id()
        first, going_on = list[tuple[float, int]](), self.genai.StreamingStatus.RUNNING

        class Clock(self.genai.StreamerBase):  # type: ignore[name-defined]
            """Notes when the first step's tokens came."""

            def write(self, tokens: int | list[int]) -> Any:
                if not first:
                    first.append((time.perf_counter() - started, 1 if isinstance(tokens, int) else len(tokens)))
                return going_on

            def end(self) -> None:
                pass

        ids_tensor = self.tensor(np.array([ids], np.int64))
        inputs = self.genai.TokenizedInputs(ids_tensor, self.tensor(np.ones((1, len(ids)), np.int64)))
        started = time.perf_counter()
        result = self.model.generate(inputs, config, Clock())
        seconds = time.perf_counter() - started
        return Text(list(result.tokens[0]), seconds, *first[0], None)


if __name__ == "__main__":
    serve(Loaded, convert)
