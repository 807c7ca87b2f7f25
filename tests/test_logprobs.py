"""Log-probabilities of emitted tokens against transformers' own Llama, and their selection against a full sort."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import LlamaForCausalLM

from runtime import Model, load
from runtime.cli.generate import main
from runtime.decoding.logprobs import TokenLogprobs
from tests.conftest import DEMO

PROMPT = "def read_lines(path):\n"
LOGITS = arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([-40.0, -1.5, 0.0, 0.25, 3.0, 30.0]))


@given(LOGITS, st.integers(0, 50), st.floats(0, 1))
def test_the_likeliest_tokens_come_first(row: np.ndarray, count: int, at: float) -> None:
    token = int(at * (len(row) - 1))
    entry = TokenLogprobs.of(row, token, count)
    expected = torch.log_softmax(torch.from_numpy(row).double(), -1).tolist()
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert entry.token == token
    assert entry.logprob == pytest.approx(expected[token], abs=1e-12)
    assert [i for i, _ in entry.top] == ranked
    assert [logprob for _, logprob in entry.top] == pytest.approx([expected[i] for i in ranked], abs=1e-12)


@pytest.fixture(scope="module")
def model(demo_bundle: Path) -> Iterator[Model]:
    with load(demo_bundle, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.3, "seed": 4, "top_k": 20, "repetition_penalty": 1.2}], ids=["greedy", "drawn"]
)
def test_they_are_the_target_s_own(model: Model, speculate: bool, settings: dict[str, float]) -> None:
    """Whatever sampling changes the logits to, the log-probabilities are those of the unchanged target."""
    generation = model.generate(PROMPT, 40, speculate, logprobs=3, **settings)  # type: ignore[arg-type]
    by_cycle = [entry for cycle in generation.cycles() for entry in cycle.logprobs]
    assert by_cycle == generation.logprobs
    assert [entry.token for entry in generation.logprobs] == generation.ids
    llama = LlamaForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = llama(torch.tensor([generation.prompt + generation.ids])).logits[0, len(generation.prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)
    for row, entry in zip(expected, generation.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        assert [logprob for _, logprob in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_asking_changes_no_text(model: Model) -> None:
    texts = {"".join(model.generate(PROMPT, 40, logprobs=count)) for count in (None, 0, 5)}
    assert len(texts) == 1
    generation = model.generate(PROMPT, 4)
    assert "".join(generation)
    assert generation.logprobs == []


def test_as_json(demo_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(demo_bundle), "-p", PROMPT, "--max-tokens", "5", "--stats", "json", "--logprobs", "2"]
    assert main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [entry["token"] for entry in printed["logprobs"]] == printed["ids"]
    assert all(
        len(entry["top"]) == 2 and entry["top"][0] == [entry["token"], entry["logprob"]]
        for entry in printed["logprobs"]
    )
