"""The replay by plain decoding: silent where nothing differs, and telling near-ties from defects where something
does."""

from pathlib import Path

import numpy as np
import pytest

from runtime import Generation, Model, load
from runtime.cli.checks.lossless import differences
from runtime.cli.generate import main

PROMPT = "def main(argv=None):\n"
SETTINGS = (
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 4},
    {"repetition_penalty": 1.3, "min_new_tokens": 5, "stop": ["\n\n"]},
)


@pytest.fixture(scope="module")
def model(demo_bundle: Path) -> Model:
    return load(demo_bundle)


def made(model: Model, **settings: object) -> Generation:
    generation = model.generate(PROMPT, 40, **settings)  # type: ignore[arg-type]
    list(generation.cycles())
    return generation


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("speculate", [True, False])
def test_nothing_differs(model: Model, settings: dict[str, object], speculate: bool) -> None:
    assert differences(model, made(model, speculate=speculate, **settings)) == []


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("at", [0, 7, -1])
def test_another_token_is_found(model: Model, settings: dict[str, object], at: int) -> None:
    """Also the first and the last one; its margin is what a token's logit lacks, by naive arithmetic where decoding is
    greedy."""
    generation = made(model, **settings)
    at %= len(generation.ids)
    before, right = generation.ids[:at], generation.ids[at]
    generation.ids[at] = wrong = (right + 1) % model.bundle.manifest.vocabulary
    found, *_ = differences(model, generation)
    assert (found.index, found.position, found.token, found.choice) == (at, len(generation.prompt) + at, wrong, right)
    assert not found.near
    if not settings:
        with model.exclusive() as decoder:
            decoder.clear()
            row = decoder.prefill([*generation.prompt, *before], speculate=False)
            assert row is not None
            logits = decoder.target.row(row)
        lacks = (logits[right] - logits[wrong]) / np.abs(logits).max()
        assert found.margin == pytest.approx(float(lacks), rel=1e-3, abs=1e-6)


def test_near_ties_are_told_apart(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token as good as the choice but for rounding, and one that is a little worse than that."""
    generation = made(model)
    at, other = 5, 7
    right = generation.ids[at]
    read = model.decoder.target.row

    def spoiled(gap: float) -> list[tuple[bool, float]]:
        def row(index: int) -> np.ndarray:
            logits = read(index).copy()
            if (
                len(model.decoder.cached) == len(generation.prompt) + at
                or model.decoder.target.length == len(generation.prompt) + at
            ):
                logits[other] = logits[right] + gap * np.abs(logits).max()
            return logits

        monkeypatch.setattr(model.decoder.target, "row", row)
        return [(found.near, found.margin) for found in differences(model, generation)]

    ((near, margin),) = spoiled(3e-6)
    assert near
    assert margin < 1e-5
    ((near, margin),) = spoiled(1e-2)
    assert not near
    assert margin == pytest.approx(1e-2, rel=0.1)


def test_the_commands_status(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 where a walk that takes what was drafted, whatever the target says, gives other tokens; each is named with its
    margin."""
    options = [str(demo_bundle), "--prompt", PROMPT, "--max-new-tokens", "30", "--check-lossless"]
    assert main(options) == 0
    assert "lossless: plain decoding chooses each of the" in capsys.readouterr().err

    def greedy_for_speed(tokens, parents, take):  # type: ignore[no-untyped-def]
        model_path = [0]
        for row in range(1, len(tokens)):
            if parents[row] == model_path[-1] and len(model_path) < 3:
                taken.selector.add(tokens[row])
                model_path.append(row)
        take(model_path[-1])
        return model_path

    from runtime.decoding import decoder as module

    original = module.Decoder._accept

    def accept(self, proposal):  # type: ignore[no-untyped-def]
        global taken
        taken = self
        return greedy_for_speed(*proposal.tree(), self.next_token)

    monkeypatch.setattr(module.Decoder, "_accept", accept)
    assert main(options) == 1
    said = capsys.readouterr().err
    assert "plain decoding chooses" in said
    assert "of the largest logit" in said
    assert "too much for rounding" in said
    monkeypatch.setattr(module.Decoder, "_accept", original)
    monkeypatch.setattr("runtime.cli.checks.lossless.NEAR", {"float32": 1e9})
    monkeypatch.setattr(module.Decoder, "_accept", accept)
    assert main(options) == 3
