"""Passes that choose tokens for some of their rows only: of a prompt, for the last one."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter import cli
from exporter.recipe import recipe
from exporter.tracing import trace
from exporter.tracing.signature import Input
from graphs.drafter import Drafter
from graphs.target import Target
from runtime import Model, load
from runtime.bundle.manifest_reader import parse_manifest
from runtime.bundle.reader import Bundle
from runtime.errors import DamageError
from tests.conftest import DEMO, MakeBundle
from tests.end_to_end.test_quantized import WHOLE
from tests.pairs import SMALL
from tests.seal import edit, without_shared

PROMPT = np.random.default_rng(5).integers(2, 30, 180).tolist()


@pytest.mark.parametrize("options", [(), WHOLE], ids=["fp32", "w8a8"])
def test_of_a_prompt_only_the_last_row_has_logits(make_bundle: MakeBundle, options: tuple[str, ...]) -> None:
    with load(make_bundle(DEMO, *options), "cpu") as model:
        decoder, passes, chunk = model.decoder, model.decoder.target, model.decoder.form.chunk
        for start in range(0, len(PROMPT), chunk):
            decoder.feed(PROMPT[start : start + chunk])
        rows = len(PROMPT) - start
        logits, choice, hidden = passes.logits[:rows].copy(), passes.choice[:rows].copy(), passes.hidden[:rows].copy()
        decoder.clear()
        passes.logits[...], passes.choice[...] = 7, 7
        last = decoder.prefill(PROMPT, speculate=False)
        assert last == len(passes.choice) - 1  # for every prompt: no other row of logits takes memory
        assert rows < chunk < len(PROMPT)
        np.testing.assert_allclose(passes.logits[last], logits[-1], atol=0 if options else 1e-4)
        assert passes.choice[last] == choice[-1]
        np.testing.assert_array_equal(passes.hidden[last + 1 - rows : last + 1], hidden)
        assert (passes.logits[:last] == 7).all()
        assert (passes.choice[:last] == 7).all()


@pytest.fixture(scope="module")
def model(demo_bundle: Path) -> Iterator[Model]:
    with load(demo_bundle, "cpu") as model:
        yield model


@settings(max_examples=20)
@given(rows=st.lists(st.integers(0, 6), min_size=1, max_size=7))
def test_any_rows_in_any_order(model: Model, rows: list[int]) -> None:
    passes = model.decoder.target
    model.decoder.clear()
    passes.read(PROMPT[:7])
    n, width = len(rows), model.vocabulary_size
    choice, logits, hidden = np.zeros(n, np.int64), np.zeros((n, width), np.float32), np.zeros_like(passes.hidden[:7])
    buffers = {
        "tokens": passes.tokens[:7],
        "depth": passes.depth[:7],
        "mask": np.tri(7, dtype=np.bool_),
        "wanted": np.array(rows),
    }
    outputs = {"choice": choice, "logits": logits, "hidden": hidden}
    caches = passes.cache.bindings(passes.graphs["target"])
    model.decoder.engines["target"].bind({**buffers, **outputs, **caches})()
    np.testing.assert_allclose(logits, passes.logits[rows], atol=1e-4)
    np.testing.assert_array_equal(choice, passes.choice[rows])
    np.testing.assert_array_equal(hidden, passes.hidden[:7])


@pytest.mark.exhaustive
def test_bundles_that_know_no_wanted_rows_run_as_before(
    make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = trace.signature

    def without(
        module: Target | Drafter, dtype: torch.dtype, sizes: Mapping[str, int] | None = None
    ) -> tuple[list[Input], list[str]]:
        inputs, outputs = signature(module, dtype, sizes)
        return [entry for entry in inputs if entry[0] != "wanted"], outputs

    new = make_bundle(SMALL)
    monkeypatch.setattr(trace, "signature", without)
    specs = recipe.trace_spec
    monkeypatch.setattr(
        recipe,
        "trace_spec",
        lambda *given: replace(made := specs(*given), pinned={n: made.pinned[n] for n in made.pinned if n != "shared"}),
    )
    monkeypatch.setattr(trace, "_capture", trace._traced)
    pair = new.parent / "pair"
    assert (
        cli.main(["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), "--out", str(tmp_path / "old")])
        == 0
    )
    assert Bundle(tmp_path / "old").manifest.requires == ("draft-noise",)
    with load(tmp_path / "old", "cpu") as before, load(new, "cpu") as now:
        for settings in ({}, {"temperature": 1.0, "seed": 3}, {"speculate": False}):
            texts = [model.generate(PROMPT, 24, **settings) for model in (before, now)]
            for text in texts:
                list(text.cycles())
            assert texts[0].ids == texts[1].ids


def unnamed(raw: dict[str, Any]) -> None:
    raw["requires"].remove("wanted-rows")


def without_input(raw: dict[str, Any]) -> None:
    target = raw["forms"]["cpu"]["graphs"]["target"]
    target["inputs"] = [tensor for tensor in target["inputs"] if tensor["name"] != "wanted"]
    for tensor in target["outputs"][:2]:
        tensor["shape"][0] = "rows"


def all_logits(raw: dict[str, Any]) -> None:
    raw["forms"]["cpu"]["graphs"]["target"]["outputs"][1]["shape"][0] = "rows"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unnamed, "expected 'wanted-rows' if a target has the input 'wanted' and only then"),
        (lambda raw: raw["forms"].update(cuda=raw["forms"].pop("cpu")), "inputs are .*, expected"),
        (without_input, "expected 'wanted-rows' if a target has the input 'wanted' and only then"),
        (all_logits, r"logits float32 \['rows', 2048\], expected logits float32 \['wanted', 2048\]"),
    ],
)
def test_contradicting_manifests_are_refused(demo_bundle: Path, tmp_path: Path, change: Any, said: str) -> None:
    record = tmp_path / "gumiho.json"
    shutil.copyfile(demo_bundle / record.name, record)
    assert parse_manifest(record.read_text(), record).requires == ("wanted-rows", "shared-passes", "draft-noise")
    edit(tmp_path, without_shared)
    edit(tmp_path, change)
    with pytest.raises(DamageError, match=said):
        parse_manifest(record.read_text(), record)
