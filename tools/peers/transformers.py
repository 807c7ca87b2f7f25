"""transformers: greedy, prompt lookup, and assisted generation with a draft model; eager PyTorch in fp32."""

import time
from typing import Any

from tools.peers.protocol import Text, Way, serve

REQUIREMENTS = ("torch==2.13.0",), ("transformers==5.23.0",)  # torch is installed separately, see the Makefile
GREEDY = "transformers, greedy"
# With assistant_confidence_threshold 0 the number of draft tokens is fixed; the default, 0.4, stops at unlikely tokens.
ASSISTED = [
    {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0, "num_assistant_tokens_schedule": "constant"},
    {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0, "num_assistant_tokens_schedule": "heuristic"},
    {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4, "num_assistant_tokens_schedule": "constant"},
]
LOOKUP = [
    {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 3},
    {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2},
    {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2},
]


def ways() -> list[Way]:
    return [
        Way(GREEDY, "fp32"),
        Way("transformers, prompt lookup", "fp32", GREEDY, settings=LOOKUP),
        Way("transformers, assisted", "fp32", GREEDY, draft=True, settings=ASSISTED),
    ]


class Steps:
    """A streamer that records the time and number of tokens of every generation step."""

    def __init__(self) -> None:
        self.started, self.steps = time.perf_counter(), list[tuple[float, int]]()

    def put(self, tokens: Any) -> None:
        self.steps.append((time.perf_counter() - self.started, tokens.numel()))

    def end(self) -> None:
        pass


class Loaded:
    def __init__(self, model: str, threads: int, draft: str | None = None) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch, kind = torch, transformers.AutoModelForCausalLM
        self.model = kind.from_pretrained(model, dtype=torch.float32).eval()
        self.draft = kind.from_pretrained(draft, dtype=torch.float32).eval() if draft else None
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        if self.draft is not None:
            for name, value in setting.items():  # assisted generation reads them there
                setattr(self.draft.generation_config, name, value)
            setting = {"assistant_model": self.draft}
        return generate(self.torch, self.model, ids, count, **setting)


def generate(torch: Any, model: Any, ids: list[int], count: int, **setting: Any) -> Text:
    """Generates greedily with any model that has transformers' ``generate``."""
    prompt, streamer = torch.tensor([ids]), Steps()
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=False,
            streamer=streamer,
            **setting,
        )
    seconds = time.perf_counter() - streamer.started
    _, first, *rest = streamer.steps  # the first entry is the prompt
    return Text(output[0, len(ids) :].tolist(), seconds, *first, len(rest))


if __name__ == "__main__":
    serve(Loaded)
