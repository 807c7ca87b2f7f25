"""A bundle without a drafter: plain decoding and prompt lookup, with everything else as with a drafter or refused by
name."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from exporter import cli
from runtime import Generation, Grammar, GumihoError, InputError, Model, load
from runtime.backends.onnxruntime import Cpu
from runtime.backends.onnxruntime_engine import Engine
from runtime.bundle.manifest import (
    BOUND_WEIGHTS,
    NOISE,
    PASS_SIZES,
    RTX,
    SHARED_PASSES,
    TARGET_ONLY,
    WANTED_ROWS,
    Manifest,
)
from runtime.bundle.manifest_reader import parse_manifest
from runtime.bundle.reader import Bundle
from runtime.cli.checks.doctor import main as doctor
from runtime.cli.checks.lossless import differences
from runtime.cli.checks.selftest import main as selftest
from runtime.cli.generate import main as generate
from runtime.decoding.kv_cache import KVCache
from runtime.decoding.planner import Planner
from runtime.decoding.prices import Costs, sizes
from runtime.decoding.settings import Settings
from runtime.device_check import pieces as device_pieces
from runtime.device_check import tokens as device_tokens
from runtime.device_check.main import main as device_check
from runtime.engines.devices import Device, Host
from runtime.engines.golden_file import read
from runtime.engines.golden_replay import replay
from runtime.engines.pass_times import measure
from runtime.engines.store import find_engines
from tests import gguf_files
from tests.accelerator import Lazy
from tests.conftest import ALL, DEMO, EVERY_BACKEND, MakeBundle
from tests.end_to_end import llama
from tests.end_to_end.test_forms import opened
from tests.pairs import RandomPair
from tests.seal import edit, edit_golden

TARGET = DEMO / "target"
LAYERS = 2  # of the target's, since graphs of all backends are traced
PROMPT = "def first(self):\n    return self._first\n\ndef second(self):\n    return self._second\n\ndef third("
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
# A head size that is a multiple of 16, so that the CPU rounds activations to int8.
WIDE = RandomPair({"vocab_size": 40, "hidden_size": 96, "intermediate_size": 64}, seed=5)


def exported(out: Path, *options: str) -> Path:
    assert cli.main(["--out", str(out), *options]) == 0
    return out


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the demo target."""
    folder = tmp_path_factory.mktemp("short") / "target"
    LlamaForCausalLM.from_pretrained(TARGET, num_hidden_layers=LAYERS).save_pretrained(folder)
    for file in TARGET.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every backend, in fp32, of 8 rows."""
    return exported(tmp_path_factory.mktemp("lone") / "out", "--target", str(target), *ALL)


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("quantized")
    WIDE.make_target().save_pretrained(folder / "target")

    @cache
    def make(weights: str) -> Path:
        return exported(folder / weights, "--target", str(folder / "target"), "--weights", weights, "--capacity", "100")

    return make


def with_lookups(model: Model) -> Model:
    """Its planner is told that rows cost nothing."""
    decoder, prices = model.decoder, Costs(dict.fromkeys(range(1, 9), 1e6), 0.0, 0.0)
    padded = decoder.form.chunk if decoder.form.static else 0
    decoder.planners = [Unclocked(prices, decoder.manifest.depth, padded, drafts=decoder.manifest.has_drafter)] * 2
    return model


class Unclocked(Planner):
    """Told that every pass takes 1 ms, whatever the machine does."""

    def decoded(self, target: int, rows: int = 1) -> None:
        super().decoded(10**6, rows)


@pytest.fixture
def model(bundle: Path) -> Iterator[Model]:
    with load(bundle, "cpu", threads=1) as model:
        yield with_lookups(model)


def ended(generation: Generation) -> Generation:
    list(generation.cycles())
    return generation


def prompts(model: Model, lengths: Sequence[int]) -> Iterator[list[int]]:
    draw = np.random.default_rng(0)
    for length in lengths:
        yield draw.integers(2, model.vocabulary_size, length).tolist()
    yield model.encode(PROMPT)


# --- the tokens -------------------------------------------------------------------------------------------------------


def test_greedy_text_is_that_of_transformers(model: Model, target: Path) -> None:
    for prompt in prompts(model, (1, 129)):
        expected = llama.generate(target, [prompt], 40)[0]
        for speculate in (True, False):
            llama.assert_same(target, prompt, ended(model.generate(prompt, 40, speculate)).ids, expected)


@torch.inference_mode()
def test_seeded_text_is_drawn_from_the_logits_of_transformers(model: Model, target: Path) -> None:
    judge = llama.load(target)
    for prompt in prompts(model, (5,)):
        selector = model.selector(prompt, Settings(40, **SAMPLED))  # type: ignore[arg-type]
        while not selector.ended():
            row = judge(torch.tensor([[*prompt, *selector.ids]])).logits[0, -1].numpy()
            selector.add(selector.choose(int(row.argmax()), lambda row=row: row))
        for speculate in (True, False):
            assert ended(model.generate(prompt, 40, speculate, **SAMPLED)).ids == selector.ids  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "lazy"),
    [
        ("cpu", False),
        ("tensorrt-decomposed", False),
        ("migraphx", True),
        *(pytest.param(form, form == "tensorrt", marks=pytest.mark.exhaustive) for form in ("cuda", "tensorrt")),
    ],
)
def test_every_form_looks_up_and_gives_the_same_tokens(bundle: Path, form: str, lazy: bool) -> None:
    with load(bundle, "cpu", threads=1) as cpu, opened(bundle, form, lazy) as model:
        assert ended(model.generate(PROMPT, 30)).stats.lookups == 0  # without prices it decodes plainly
        with_lookups(model)
        for asked in ({}, SAMPLED):
            for prompt in prompts(cpu, (1, 9)):
                expected = ended(cpu.generate(prompt, 30, speculate=False, **asked)).ids  # type: ignore[arg-type]
                for speculate in (True, False):
                    assert ended(model.generate(prompt, 30, speculate, **asked)).ids == expected  # type: ignore[arg-type]
        found = model.generate(PROMPT, 80, trace=True)
        cycles = list(found.cycles())
        assert found.stats.lookups == sum(cycle.lookup for cycle in cycles) > 0
        assert found.stats.looked_up == sum(len(cycle.path) - 1 for cycle in cycles if cycle.lookup) > 0
        assert max(cycle.rows for cycle in cycles) == 8
        assert not found.stats.accepted
        assert ended(model.generate(PROMPT, 80, lookup=False)).stats.lookups == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["w8a8", pytest.param("int4", marks=pytest.mark.exhaustive)])
def test_a_quantized_target(quantized: Callable[[str], Path], weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = quantized(weights)
    with load(bundle, threads=1) as model:
        with_lookups(model)
        assert model.bundle.manifest.weights.keys() == {"target"}
        looked_up = 0
        for prompt in ([3], [5, 6, 7] * 8, [9] * 20):
            for asked in ({}, SAMPLED):
                speculative = ended(model.generate(prompt, 60, **asked))  # type: ignore[arg-type]
                assert speculative.ids == ended(model.generate(prompt, 60, speculate=False, **asked)).ids  # type: ignore[arg-type]
                assert differences(model, speculative) == []
                looked_up += speculative.stats.looked_up
        assert looked_up > 0
    assert selftest([str(bundle), "--prompts", "2", "--max-new-tokens", "12", "--draws", "300"]) == 0
    lines = capsys.readouterr().out.splitlines()[-8:]  # an export may have printed before them
    assert [line[:2] for line in lines] == ["ok"] * 8
    assert "32 of 32 in passes of several rows are bitwise equal" in lines[6]


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_sessions_are_resumed_saved_and_restored(model: Model, bundle: Path, tmp_path: Path) -> None:
    session, plain = model.session(), model.generate
    first = ended(session.generate(PROMPT, 20))
    follow = [*session.ids, *model.encode("second(self):\n")]
    second = ended(session.generate(follow, 20))
    assert second.stats.cached_tokens == len(first.prompt) + len(first.ids) - 1
    assert second.ids == ended(plain(follow, 20, speculate=False)).ids
    ended(session.generate(follow, 20))
    session.save(tmp_path / "saved")
    with load(bundle, "cpu", threads=1) as other:
        restored = with_lookups(other).session(tmp_path / "saved")
        assert restored.ids == session.ids
        third = ended(restored.generate(restored.ids, 20))
        assert third.stats.cached_tokens == len(restored.ids) - len(third.ids) - 1
        assert third.ids == ended(plain(session.ids, 20, speculate=False)).ids
        restored.rewind(10)
        assert ended(restored.generate(follow, 20)).ids == second.ids


@pytest.mark.parametrize("make", [Host, Lazy])
def test_an_empty_cache(make: type[Host | Lazy]) -> None:
    device: Device = make()
    cache = KVCache(device, dtype="float16")
    assert (cache.rows(0).shape, cache.rows(0).dtype) == ((0, 0, 0), np.float16)
    cache.fill(cache.rows(0))
    assert int(cache.length[0]) == 0
    with pytest.raises(GumihoError, match="do not fit"):
        cache.fill(np.zeros((2, 1, 4), np.float16))


# --- settings and commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"rows": 4}, "rows is 4"), ({"tree": "fta"}, "tree is 'fta'"), ({"accept": "typical"}, "accept is")],
)
def test_settings_about_trees_are_refused(model: Model, asked: dict[str, Any], named: str) -> None:
    for start in (model.generate, model.session().generate):
        with pytest.raises(
            InputError, match=rf"{named}.*the bundle has no drafter: leave it out, or export with --ckpt"
        ):
            start(PROMPT, 5, **asked)


def test_a_grammar_and_log_probabilities(model: Model) -> None:
    turn = ended(model.generate("x = ", 12, grammar=Grammar.regex("[0-9]{4}(, [0-9]{4})*"), logprobs=2))
    assert turn.text[:4].isdigit()
    assert len(turn.logprobs) == len(turn.ids)


def test_the_planner_never_drafts() -> None:
    planner = Planner(Costs(dict.fromkeys(range(1, 9), 1e6), 0.0, 0.0), 7, drafts=False)
    for _ in range(2000):
        assert not planner.drafting
        planner.decoded(10**6)
    assert Planner(Costs({1: 1e6, 8: 1e6}, 0.0, 0.0), 7).drafting


def test_passes_are_measured(model: Model, tmp_path: Path) -> None:
    costs = measure(model.decoder)
    assert set(costs.target) == set(sizes(8))
    assert costs.draft == 0.0
    costs.save(tmp_path)
    assert Costs.load(tmp_path, 8)


def test_commands(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(bundle), "--backend", "cpu", "-p", PROMPT, "--max-tokens", "20"]
    trace = tmp_path / "trace.jsonl"
    assert generate([*argv, "--compare", "--check-lossless", "--stats", "--trace", str(trace)]) == 0
    found = capsys.readouterr()
    assert "identical tokens" in found.err
    assert "lossless: plain decoding chooses each of the 20 tokens" in found.err
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {token["source"] for record in records if record["type"] == "cycle" for token in record["tokens"]} <= {
        "target",
        "lookup",
    }
    assert generate([*argv, "--rows", "4"]) == 1
    assert "error: rows is 4" in capsys.readouterr().err
    assert doctor([str(bundle), "--backend", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "no drafter: decodes plainly and by prompt lookup" in said
    assert "verifies up to 8 rows; capacity 200 positions" in said
    assert "tau" not in said
    assert "draft " not in said


@pytest.mark.exhaustive
def test_device_check(quantized: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tokens, "_TOKENS", 10)
    monkeypatch.setattr(device_pieces, "_SELFTEST", (1, 8, 250))
    assert device_check([str(quantized("int8")), "--out", str(tmp_path / "out"), "--minutes", "0.5"]) == 0
    report = (tmp_path / "out" / "device_check.md").read_text()
    assert "Nothing failed." in report
    assert "golden run, largest error | texts" in report
    assert "draft 0" not in report


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_what_the_manifest_says(bundle: Path, target: Path, demo_bundle: Path) -> None:
    manifest = Bundle(bundle).manifest
    assert (manifest.rows, manifest.depth, manifest.tree) == (8, 7, None)
    assert manifest.requires == (TARGET_ONLY, WANTED_ROWS, SHARED_PASSES, PASS_SIZES, BOUND_WEIGHTS, RTX)
    assert not manifest.has_drafter
    assert manifest.sources == {"target": str(target)}
    for form in manifest.forms.values():
        for graphs in form.variants().values():
            assert sorted(graphs) == (sorted(form.targets.values()) or ["shared", "target"])
    assert not (bundle / "weights/draft.bin").exists()
    with_drafter = Bundle(demo_bundle).manifest
    assert with_drafter.has_drafter
    assert with_drafter.requires == (WANTED_ROWS, SHARED_PASSES, NOISE)


def test_caches_are_the_targets(bundle: Path) -> None:
    read = Bundle(bundle)
    graph = read.manifest.form("cpu").graphs["target"]
    assert read.caches("cpu") == sum(4 * int(np.prod([int(n) for n in cache.shape])) for cache in graph.caches)


def parsed(bundle: Path) -> Manifest:
    return parse_manifest((bundle / "gumiho.json").read_text(), bundle / "gumiho.json")


def drop(raw: dict[str, Any], *names: str) -> None:
    for name in names:
        for form in raw["forms"].values():
            form["graphs"].pop(name, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda raw: raw.update(tree=None),
            r"requires is \['wanted-rows', 'shared-passes', 'draft-noise'\], expected 'target-only' if tree is null",
        ),
        (lambda raw: raw.update(tree=None, requires=["target-only"]), "has a graph 'draft', expected only target"),
        (lambda raw: raw.update(requires=["target-only"]), "expected 'target-only' if tree is null and only then"),
        (lambda raw: drop(raw, "draft", "extend"), "has no graph 'draft'"),
        (lambda raw: raw.update(tree=7), "tree is 7, expected an object"),
        (lambda raw: raw["tree"].update(rows=None), "tree.rows is None, expected a whole number"),
        (lambda raw: raw.pop("tree"), "tree is missing"),
    ],
)
def test_graphs_and_tree_that_contradict_each_other(
    demo_bundle: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    shutil.copyfile(demo_bundle / "gumiho.json", tmp_path / "gumiho.json")
    edit(tmp_path, change)
    with pytest.raises(GumihoError, match=said):
        parsed(tmp_path)


def with_tree(raw: dict[str, Any]) -> None:
    tree = {
        "rows": 8,
        "serial_steps": 2,
        "heads": 3,
        "top_k": 14,
        "head_top_k": 35,
        "beam": 2,
        "reference": False,
        "vocabulary": 9,
    }
    raw.update(tree=tree, requires=[])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_tree, "has no graph 'draft'"),
        (
            lambda raw: raw.update(requires=["target-only", "ladder"]),
            "needs 'ladder', which this version does not know",
        ),
        (lambda raw: raw.update(requires=["ladder"], tree="of a later version"), "needs 'ladder'"),
        (lambda raw: raw.update(requires="target-only"), "requires is 'target-only', expected a list"),
        (
            lambda raw: raw["forms"]["tensorrt"]["spares"]["basic"].pop("target"),
            r"forms.tensorrt \(basic\) has no graph 'target'",
        ),
    ],
)
def test_a_target_whose_manifest_was_changed(copy: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    edit(copy, change)
    with pytest.raises(GumihoError, match=said):
        parsed(copy)


# --- the golden run ---------------------------------------------------------------------------------------------------


def test_the_golden_run_is_the_targets(bundle: Path) -> None:
    run = read(Bundle(bundle))
    assert {name.split(".")[0] for name in run} == {"prompt", "verify"}
    assert (run["verify.mask"] == np.tri(8, dtype=np.bool_)).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: run.pop("verify.choice"), "verify.choice is missing"),
        (lambda run: run.update({"prompt.tokens": run["prompt.tokens"] + 10**6}), "prompt.tokens holds numbers"),
        (
            lambda run: run.update({"verify.top_logits": run["verify.top_logits"] * np.nan}),
            "verify.top_logits holds NaN",
        ),
    ],
)
def test_a_damaged_golden_run_is_refused(copy: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    edit_golden(copy, change)
    with pytest.raises(GumihoError, match=said):
        read(Bundle(copy))


class Wrong:
    """An engine whose logits change after one of its calls."""

    def __init__(self, engine: Engine, call: int) -> None:
        self.engine, self.left = engine, call

    def bind(self, buffers: Any) -> Callable[[], None]:
        run = self.engine.bind(buffers)

        def changed() -> None:
            run()
            if not self.left:
                buffers["logits"][0] = 0
            self.left -= 1

        return changed


@pytest.mark.parametrize("call", [0, 1], ids=["prompt", "verify"])
def test_an_engine_that_is_wrong_is_noticed(bundle: Path, call: int) -> None:
    opened_bundle, made = Bundle(bundle), Cpu("")
    engines, device = made.open(opened_bundle, find_engines(opened_bundle, made))
    form = opened_bundle.manifest.form("cpu")
    assert list(replay(opened_bundle, form, engines, device)) == ["target"]
    with pytest.raises(
        GumihoError, match="the compiled target engine is discarded, since it differs from the golden run"
    ):
        replay(opened_bundle, form, {"target": Wrong(engines["target"], call)}, device)  # type: ignore[dict-item]


# --- the export -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        ("--draft-weights", "none"),
        ("--draft-vocab", "9"),
        ("--draft-text", "x"),
        ("--heads", "0"),
        ("--serial-steps", "2"),
        ("--top-k", "4"),
        ("--head-top-k", "4"),
        ("--beam", "1"),
        ("--draft-tree", "chain"),
        ("--draft-tree", "reference"),
        ("--backend", "vllm"),
    ],
    ids=lambda option: option[0],
)
def test_options_for_a_drafter_are_refused(
    option: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--target", str(TARGET), "--out", str(tmp_path / "out"), *option]) == 1
    said = capsys.readouterr().err
    assert option[0] in said
    assert "is for a drafter, and there is none: name one with --ckpt, or leave the option out" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows", ["1", "5000"])
def test_rows_out_of_range(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--target", str(TARGET), "--out", str(tmp_path / "out"), "--rows", rows]) == 1
    assert f"--rows is {rows}: give 2 to 4096" in capsys.readouterr().err


def test_one_source_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert "name a drafter with --ckpt, or a model without a drafter with --target" in capsys.readouterr().err


def test_a_dry_run_says_it_and_names_the_folder_after_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = gguf_files.write(RandomPair().make_target(), tmp_path / "Small.Q8_0.gguf")
    for source, name in ((TARGET, "target-cpu"), (file, "Small.Q8_0-cpu")):
        assert cli.main(["--target", str(source), "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert f"Would write the bundle '{name}' for cpu." in said
        assert "Drafter: none. The bundle decodes plainly and by prompt lookup." in said
        assert "weights/draft.bin" not in said


def test_a_gguf_file_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp32, as transformers has the model that the file was made of."""
    pair = RandomPair()
    pair.make_target().save_pretrained(tmp_path / "target")
    file = gguf_files.write(pair.make_target(), tmp_path / "target.gguf")
    with load(exported(tmp_path / "out", "--target", str(file), "--validate", "--capacity", "64"), threads=1) as model:
        said = capsys.readouterr().out
        assert "validation: choices that differ 0.0%: ok" in said
        assert "draft" not in said.replace("drafter", "")
        expected = llama.generate(tmp_path / "target", [[5, 6, 7]], 30)[0]
        llama.assert_same(
            tmp_path / "target", [5, 6, 7], ended(with_lookups(model).generate([5, 6, 7], 30)).ids, expected
        )


def test_few_positions(target: Path, tmp_path: Path) -> None:
    """A pass verifies no more rows than there are positions."""
    with load(exported(tmp_path / "out", "--target", str(target), "--capacity", "4"), threads=1) as model:
        assert model.bundle.manifest.rows == 4
        assert set(measure(model.decoder).target) == {1, 2, 3, 4}
        assert (
            ended(with_lookups(model).generate([7, 7], 9)).ids == ended(model.generate([7, 7], 9, speculate=False)).ids
        )


def test_a_bundle_with_a_drafter_still_loads(make_bundle: MakeBundle) -> None:
    with load(make_bundle(DEMO, *EVERY_BACKEND), "cpu", threads=1) as model:
        assert ended(model.generate(PROMPT, 20)).stats.accepted
