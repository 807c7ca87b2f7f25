"""The export command: a bundle is whole or absent, its numbers are right, and what it says of itself is true."""

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM

import exporter.staging
import exporter.weights.packer
import exporter.writing.bundle
import exporter.writing.validate
import runtime.backends.onnxruntime
import runtime.bundle.hashes
import runtime.engines.golden_replay
import runtime.engines.store
from exporter.backends import specs as forms
from exporter.checkpoints.end_tokens import end_of_turn
from exporter.cli import main
from exporter.options import config_of
from exporter.progress import Progress
from exporter.recipe.precision import recommendation
from exporter.recipe.resolve import recipe_of
from exporter.recipe.sources import open_pair
from exporter.recipe.trees import tree_config
from exporter.weights.notes import NOTES
from graphs.dialects.standard import Standard
from runtime.bundle.reader import Bundle
from runtime.decoding import noise as draws
from runtime.errors import GumihoError, UnavailableError
from tests import gguf_files
from tests.conftest import numbers
from tests.pairs import RandomPair, drafter_config, write_drafter
from tests.seal import update
from tests.test_tokenizer import PLAIN, written

ROOT = Path(__file__).parents[1]
# Head sizes 16 and 8 take different dialects on ONNX Runtime.
SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TINY = SMALL | {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1}
# The cheapest tree that has every part: two serial steps and a head, and rows for all candidates, so that each part
# shows.
TREE = ["--rows", "9", "--heads", "1", "--top-k", "2", "--head-top-k", "2", "--beam", "2", "--capacity", "64"]


def options(pair: Path, out: Path, *more: str) -> list[str]:
    return ["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), "--out", str(out), *TREE, *numbers(more)]


def resumable(folder: Path) -> bool:
    """Whether weights and notes of an unfinished export are there, and nothing else of a bundle's is whole."""
    return (folder / ".out.partial" / NOTES / "same").is_file() and not (folder / "out").exists()


def snapshot(folder: Path) -> dict[str, str]:
    """Everything in a folder, hidden or not, with its content."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose target has a tokenizer and two ends of text."""
    folder = tmp_path_factory.mktemp("pair")
    RandomPair(SMALL, heads=2).write(folder)
    target = folder / "target"
    words = {f"w{i}": i for i in range(211)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"})
    )
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5], "temperature": 0.6}))
    return folder


@pytest.fixture(scope="module")
def bundle(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported and validated bundle, not to be changed."""
    out = tmp_path_factory.mktemp("bundle") / "out"
    assert main(options(pair, out)) == 0
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    RandomPair(TINY, heads=1).write(folder)
    return folder


@pytest.fixture(scope="module")
def traced() -> dict[Any, Any]:
    return {}


@pytest.fixture
def quick(traced: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces a graph for the first time only: all exports of the tiny pair have the same graphs."""
    trace = exporter.writing.bundle.trace

    def once(module: Any, *rest: Any) -> Any:
        key = type(module).__name__, module.ops, getattr(module, "tree", None), module.capacity
        if key not in traced:
            traced[key] = trace(module, *rest)
        return traced[key]

    monkeypatch.setattr(exporter.writing.bundle, "trace", once)


@pytest.fixture
def uncompiled(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports end with the bundle, as where the backend does not run: the engines of all are the same."""

    def missing(name: str, device: str) -> Any:
        raise UnavailableError("it is not here")

    monkeypatch.setattr("runtime.backends.backend", missing)


# --- what a bundle holds ----------------------------------------------------------------------------------------------


def test_the_manifest_names_every_file_with_its_size_and_hash(bundle: Path) -> None:
    manifest = json.loads((bundle / "gumiho.json").read_text())
    on_disk = {str(p.relative_to(bundle)) for p in bundle.rglob("*") if p.is_file()}
    engines = {name for name in on_disk if name.startswith("engines/")}
    assert on_disk - engines == manifest["files"].keys() | {"gumiho.json"}
    assert {"weights/target.bin", "weights/draft.bin", "golden.npz", "tokenizer.json"} <= manifest["files"].keys()
    for name, file in manifest["files"].items():
        data = (bundle / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"]), name
    Bundle(bundle).verify()


def test_the_manifest_says_what_was_asked_for(bundle: Path, pair: Path) -> None:
    manifest = json.loads((bundle / "gumiho.json").read_text())
    assert manifest["sources"] == {"target": str(pair / "target"), "drafter": str(pair / "drafter")}
    assert (manifest["vocabulary"], manifest["hidden"], manifest["capacity"], manifest["rows"]) == (211, 32, 64, 9)
    assert (manifest["depth"], manifest["eos_token_ids"]) == (3, [1, 5])
    assert set(manifest["forms"]["cpu"]["graphs"]) == {"target", "shared", "draft", "extend"}


def test_the_targets_tokenizer_and_settings_come_along(bundle: Path, pair: Path) -> None:
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (bundle / name).read_bytes() == (pair / "target" / name).read_bytes()
    own, theirs = (Tokenizer.from_file(str(f / "tokenizer.json")) for f in (bundle, pair / "target"))
    assert own.get_vocab() == theirs.get_vocab()


def test_engines_were_compiled(bundle: Path) -> None:
    folders = list((bundle / "engines").glob("cpu-*"))
    assert len(folders) == 1
    assert {p.name for p in folders[0].iterdir()} >= {"target.onnx", "draft.onnx", "extend.onnx", "engine.json"}


def test_nothing_lies_beside_a_bundle(bundle: Path) -> None:
    assert [p.name for p in bundle.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["target", "draft", "extend"])
def test_graphs_are_small_and_point_into_the_weights(bundle: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = bundle / f"graphs/cpu/{name}.onnx"
    assert file.stat().st_size < 1_000_000
    model = onnx.load(str(file), load_external_data=False)
    monkeypatch.chdir(bundle)  # weights are named relative to it
    onnx.checker.check_model(model)
    outside = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert outside
    for tensor in outside:
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert re.fullmatch(r"weights/(target|draft)\.bin", place["location"]), tensor.name
        offset, length = int(place["offset"]), int(place["length"])
        assert offset % 4096 == 0
        assert offset + length <= (bundle / place["location"]).stat().st_size
        assert length == 4 * int(np.prod(tensor.dims))
    inside = sum(t.ByteSize() for t in model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL)
    assert inside < 64 * 1024


def axes(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_symbolic_axes_are_named(bundle: Path) -> None:
    graphs = {
        n: onnx.load(str(bundle / f"graphs/cpu/{n}.onnx"), load_external_data=False).graph
        for n in ("target", "draft", "extend")
    }
    tensors = {n: {v.name: axes(v) for v in (*g.input, *g.output)} for n, g in graphs.items()}
    cache = [1, 1, 64, 16]
    assert {
        n: tensors["target"][n]
        for n in ("tokens", "depth", "mask", "wanted", "past_length", "choice", "logits", "hidden")
    } == {
        "tokens": ["rows"],
        "depth": ["rows"],
        "mask": ["rows", "rows"],
        "wanted": ["wanted"],
        "past_length": [1],
        "choice": ["wanted"],
        "logits": ["wanted", 211],
        "hidden": ["rows", 32],
    }
    assert all(
        tensors["target"][f"{when}_{part}.{i}"] == cache
        for when in ("past", "present")
        for part in ("key", "value")
        for i in (0, 1)
    )
    for graph in ("draft", "extend"):
        assert {n: tensors[graph][n] for n in ("tokens", "path", "hidden", "count", "past_length", "past_key.1")} == {
            "tokens": ["accepted"],
            "path": ["accepted"],
            "hidden": ["rows", 32],
            "count": [1],
            "past_length": [1],
            "past_key.1": cache,
        }
    tree = {n: a for n, a in tensors["draft"].items() if n.startswith("tree_")}
    assert tree == {
        "tree_tokens": [9],
        "tree_depth": [9],
        "tree_parent": [9],
        "tree_mask": [9, 9],
        "tree_score": [9],
    }
    assert not any(n.startswith("tree_") for n in tensors["extend"])
    assert {a for p in tensors.values() for shape in p.values() for a in shape if isinstance(a, str)} == {
        "rows",
        "accepted",
        "wanted",
    }


def test_the_manifest_repeats_the_graphs_contract(bundle: Path) -> None:
    for name, graph in json.loads((bundle / "gumiho.json").read_text())["forms"]["cpu"]["graphs"].items():
        model = onnx.load(str(bundle / graph["file"]), load_external_data=False)
        for mine, theirs in ((graph["inputs"], model.graph.input), (graph["outputs"], model.graph.output)):
            assert [(p["name"], p["shape"], np.dtype(p["dtype"])) for p in mine] == [
                (v.name, axes(v), onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)) for v in theirs
            ], name


def test_the_target_and_the_drafter_share_their_weights(bundle: Path) -> None:
    """Embedding and lm_head are the drafter's copies of the target's: they lie in the target's file only."""
    places: dict[str, dict[str, Any]] = {}
    for name in ("target", "draft", "extend"):
        model = onnx.load(str(bundle / f"graphs/cpu/{name}.onnx"), load_external_data=False)
        places[name] = {
            t.name: tuple(e.value for e in t.external_data) for t in model.graph.initializer if t.external_data
        }
    for shared in ("embed_tokens.weight", "lm_head.weight"):
        assert places["draft"][shared] == places["target"][shared]
    assert all(places["draft"][name] == place for name, place in places["extend"].items())


# --- the golden run ---------------------------------------------------------------------------------------------------


def test_the_golden_run_is_what_transformers_computes(bundle: Path, pair: Path) -> None:
    """Of the prompt, and of every row of the tree behind it, which stands for the text that its path spells."""
    run = dict(np.load(bundle / "golden.npz"))
    llama = LlamaForCausalLM.from_pretrained(pair / "target").eval()
    prompt, tokens, mask, depth = (run[n] for n in ("prompt.tokens", "verify.tokens", "verify.mask", "verify.depth"))
    assert len(tokens) == 9
    assert (depth == mask.sum(1) - 1).all()
    assert depth.max() == 3 == len(run["next.path"]) - 1
    assert (np.diff(run["next.path"]) > 0).all()
    texts = [("prompt", i, prompt[: i + 1]) for i in range(len(prompt))]
    texts += [("verify", i, np.concatenate((prompt, tokens[mask[i]]))) for i in range(len(tokens))]
    for name, row, text in texts:
        with torch.inference_mode():
            hidden = llama.model(torch.tensor(text)[None]).last_hidden_state[0, -1]
            logits = llama.lm_head(hidden)
        assert np.allclose(run[f"{name}.hidden"][row], hidden, atol=1e-4), (name, row)
        assert np.allclose(run[f"{name}.top_logits"][row], logits[run[f"{name}.top_ids"][row]], atol=1e-3), (name, row)
        assert run[f"{name}.choice"][row] == logits.argmax() == run[f"{name}.top_ids"][row][0]


def test_the_golden_run_is_the_drafters(bundle: Path, pair: Path) -> None:
    """Its trees' scores, from the drafter fed with the checkpoint's tensors and all accepted tokens at once."""
    run, made = dict(np.load(bundle / "golden.npz")), wanted(pair, bundle)
    module = made.pair.modules(made.tree, made.capacity, made.positions)["draft"]
    state = {name: source.whole().float() for name, source in made.sources()["weights/draft.bin"].items()}
    module.load_state_dict(state, assign=True)
    n, path = len(run["prompt.tokens"]), run["next.path"]
    tokens = torch.tensor(
        np.concatenate((run["prompt.tokens"][1:], run["verify.tokens"][:1], run["verify.choice"][path]))
    )
    hidden = torch.tensor(np.concatenate((run["prompt.hidden"], run["verify.hidden"][path])))
    drawn = [draws.noise(0, level, np.arange(module.drafted)) for level in range(made.tree.depth)]
    noise = torch.tensor(np.stack(drawn), dtype=torch.float32)
    for name, count in (("tree", n), ("next", len(tokens))):
        caches = [torch.zeros(1, 1, made.capacity, 16) for _ in range(4)]
        with torch.inference_mode():
            *tree, score = module(
                tokens[:count],
                hidden[:count],
                torch.arange(count),
                torch.tensor([count]),
                torch.tensor([0]),
                caches,
                noise if name == "next" else None,
            )[:5]
        assert np.allclose(run[f"{name}.score"], score, atol=1e-3), name
        for part, value in zip(("tokens", "depth", "parent", "mask"), tree, strict=True):
            assert (run[f"{name}.{part}"] == value.numpy()).all(), (name, part)


# --- --validate -------------------------------------------------------------------------------------------------------


def reported(text: str) -> dict[str, float]:
    """Errors by output, all of them within their limits."""
    lines = re.findall(
        r"cpu: (?:golden run|validation): ([a-z ]+) ([0-9.e+-]+)(%?)( of at most [0-9.e+-]+)?: ok$", text, re.M
    )
    return {output: float(error) for output, error, *_ in lines}


def wanted(pair: Path, out: Path) -> Any:
    return recipe_of(config_of(options(pair, out)))


def test_validate_prints_small_errors(
    tiny: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(tiny, tmp_path / "out", "--validate")) == 0
    errors = reported(capsys.readouterr().out)
    assert set(errors) == {"target", "draft", "target logits", "target hidden", "choices that differ", "draft scores"}
    assert all(error < 1e-3 for error in errors.values()), errors


@pytest.mark.parametrize("error", [1.0, math.nan])
def test_errors_above_their_limits_fail_the_command_and_leave_the_bundle(
    tiny: Path,
    tmp_path: Path,
    quick: None,
    error: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"target logits": 1e-6, "target hidden": error, "choices that differ": 0.5, "draft scores": error}
    monkeypatch.setattr(exporter.writing.validate, "validate", lambda *_: found)
    assert main(options(tiny, tmp_path / "out", "--validate")) == 1
    printed = capsys.readouterr()
    assert len(re.findall(r"^  cpu: validation: .*: TOO LARGE$", printed.out, re.M)) == 2
    assert re.findall(r"^error: (.*)$", printed.err, re.M)[0].count("(target hidden on cpu, draft scores on cpu)") == 1
    Bundle(tmp_path / "out").verify()


def test_validate_finds_small_errors(bundle: Path, pair: Path) -> None:
    errors = exporter.writing.validate.validate(wanted(pair, bundle), bundle, "cpu")
    assert all(error < 1e-3 for error in errors.values()), errors


def spoil(bundle: Path, parameter: str, change: Callable[[np.ndarray], Any]) -> None:
    """Changes one packed parameter of the draft or target graph in place."""
    graph, _, name = parameter.partition(":")
    model = onnx.load(str(bundle / f"graphs/cpu/{graph}.onnx"), load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name == name)
    place = {entry.key: entry.value for entry in tensor.external_data}
    values = np.memmap(bundle / place["location"], np.float32, "r+", int(place["offset"]), tuple(tensor.dims))
    change(values)
    values.flush()
    update(bundle, place["location"])


def negate(values: np.ndarray) -> None:
    values *= -1


@pytest.mark.parametrize(
    ("parameter", "shows"),
    [
        ("target:layers.1.mlp.down_proj.weight", {"target logits", "target hidden"}),
        ("target:layers.0.self_attn.q_proj.weight", {"target logits", "target hidden"}),
        ("target:norm.weight", {"target logits", "target hidden"}),
        ("target:lm_head.weight", {"target logits", "choices that differ", "draft scores"}),
        ("draft:fc.weight", {"draft scores"}),
        ("draft:fc.bias", {"draft scores"}),
        ("draft:layers.1.self_attn.v_proj.weight", {"draft scores"}),
    ],
)
def test_validate_reports_a_spoiled_weight(
    bundle: Path, pair: Path, tmp_path: Path, parameter: str, shows: set[str]
) -> None:
    shutil.copytree(bundle, tmp_path / "out")
    spoil(tmp_path / "out", parameter, negate)
    errors = exporter.writing.validate.validate(wanted(pair, bundle), tmp_path / "out", "cpu")
    assert all(errors[name] > 0.02 for name in shows), errors
    if parameter.startswith("draft:"):
        assert all(errors[name] < 1e-3 for name in errors if name != "draft scores"), errors


def test_validate_reports_spoiled_heads(bundle: Path, pair: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "out")
    spoil(tmp_path / "out", "draft:heads.first.weight", lambda w: w.__setitem__(slice(None), w[::-1].copy()))
    errors = exporter.writing.validate.validate(wanted(pair, bundle), tmp_path / "out", "cpu")
    assert errors["draft scores"] > 1e-2


def target_as_bin(folder: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, folder / "pytorch_model.bin")


def target_in_loose_parts(folder: Path, state: dict[str, torch.Tensor]) -> None:
    for i in range(2):
        save_file({n: state[n] for n in sorted(state)[i::2]}, folder / f"part{i}.safetensors")


def target_unprefixed(folder: Path, state: dict[str, torch.Tensor]) -> None:
    save_file({n.removeprefix("model."): t for n, t in state.items()}, folder / "model.safetensors", {"format": "pt"})


def target_without_metadata(folder: Path, state: dict[str, torch.Tensor]) -> None:
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize("layout", [target_as_bin, target_in_loose_parts, target_unprefixed, target_without_metadata])
def test_validate_reads_every_layout_that_export_reads(
    bundle: Path, pair: Path, tmp_path: Path, layout: Callable[[Path, dict[str, torch.Tensor]], None]
) -> None:
    shutil.copytree(pair, tmp_path / "pair")
    target = tmp_path / "pair" / "target"
    state = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    layout(target, state)
    errors = exporter.writing.validate.validate(wanted(tmp_path / "pair", bundle), bundle, "cpu")
    assert all(error < 1e-3 for error in errors.values()), errors


# --- whole or absent --------------------------------------------------------------------------------------------------


class Boom(Exception):
    """Something nobody thought of."""


FAILURES: dict[str, tuple[BaseException, int | None]] = {
    "interrupt": (KeyboardInterrupt(), 130),
    "disk full": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1),
    "ours": (GumihoError("it cannot be done: do something else"), 1),
    "unforeseen": (Boom(), None),
}
# Where the failure strikes: an attribute, and before which of its calls. A negative number: after that call has worked.
POINTS: dict[str, tuple[Any, str, int]] = {
    "packing the target": (exporter.writing.bundle.Packer, "pack", -1),
    "packing the drafter": (exporter.writing.bundle.Packer, "pack", 2),
    "tracing the target": (exporter.writing.bundle, "trace", 1),
    "tracing the last graph": (exporter.writing.bundle, "trace", -3),
    "recording": (exporter.writing.bundle.golden, "record", 1),
    "saving the golden run": (np, "savez", -1),
    "copying the tokenizer's files": (shutil, "copyfile", 1),
    "hashing": (runtime.bundle.hashes, "file_hash", 2),
    "syncing": (os, "fsync", 3),
    "compiling": (runtime.engines.store, "compile_engines", 1),
    "compiling, at the end": (runtime.engines.store, "compile_engines", -1),
    "inside the compiler": (runtime.backends.onnxruntime.Cpu, "compile", -1),
    "replaying": (runtime.engines.golden_replay, "replay", 1),
    "validating": (exporter.writing.validate, "validate", 1),
}


def strike(patch: pytest.MonkeyPatch, point: tuple[Any, str, int], error: BaseException) -> list[int]:
    """Makes a real function fail at one of its calls. Returns a list that is empty until it has."""
    owner, name, call = point
    real, calls, struck = getattr(owner, name), [], list[int]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        result = real(*args, **kwargs) if len(calls) != call else None
        if len(calls) == abs(call):
            struck.append(1)
            raise error
        return result

    patch.setattr(owner, name, failing)
    return struck


def fails(argv: list[str], failure: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, status = FAILURES[failure]
    capsys.readouterr()
    if status is None:
        with pytest.raises(Boom):
            main(argv)
        return
    assert main(argv) == status
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")


@pytest.mark.parametrize("point", POINTS)
def test_a_failure_leaves_nothing_behind_and_the_next_run_succeeds(
    tiny: Path, tmp_path: Path, quick: None, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = options(tiny, tmp_path / "out", "--validate")
    # An interruption everywhere, and the other failures in turn: each one at several points.
    others = [failure for failure in FAILURES if failure != "interrupt"]
    for failure in ("interrupt", others[list(POINTS).index(point) % len(others)]):
        with pytest.MonkeyPatch.context() as patch:
            struck = strike(patch, POINTS[point], FAILURES[failure][0])
            fails(argv, failure, capsys)
        assert struck
        # what fails there is told as a failure of the engines
        compiling = point in ("inside the compiler", "replaying")
        if failure == "interrupt" or (failure == "disk full" and not compiling):
            assert resumable(tmp_path), failure
        else:
            assert snapshot(tmp_path) == {}, failure
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if list(POINTS).index(point) % 3:
        return  # the folder is as it was: a few full runs are enough
    assert main([a for a in argv if a != "--validate"]) == 0
    Bundle(tmp_path / "out").verify()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_interruption_that_a_library_makes_an_error_of_is_one(
    tiny: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*_: object) -> Any:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr(exporter.writing.bundle.Packer, "pack", read)
    fails(options(tiny, tmp_path / "out"), "interrupt", capsys)
    assert resumable(tmp_path)


def failing_rename(patch: pytest.MonkeyPatch, call: int, error: BaseException) -> list[int]:
    """Fails at one of the renames beside the bundle; those inside it, of its engines, are let through."""
    real, calls, struck = Path.rename, [], list[int]()

    def rename(self: Path, target: Any) -> Path:
        if self.parent.name == "beside":
            calls.append(1)
            if len(calls) == call:
                struck.append(1)
                raise error
        return real(self, target)

    patch.setattr(Path, "rename", rename)
    return struck


@pytest.mark.parametrize("failure", ["interrupt", "disk full"])
@pytest.mark.parametrize("call", [1, 2])
def test_the_old_bundle_survives_a_failure_in_the_last_step(
    bundle: Path,
    tiny: Path,
    tmp_path: Path,
    uncompiled: None,
    failure: str,
    call: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where names cannot be exchanged in one step."""
    out = tmp_path / "beside" / "out"
    shutil.copytree(bundle, out)
    before = snapshot(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter.staging, "_exchanged", lambda *_: False)
        struck = failing_rename(patch, call, FAILURES[failure][0])
        fails(options(tiny, out, "--overwrite"), failure, capsys)
    assert struck
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("point", "failure"),
    [
        ("packing the drafter", "disk full"),
        ("recording", "interrupt"),
        ("replaying", "ours"),
        ("syncing", "unforeseen"),
    ],
)
def test_the_old_bundle_survives_a_failed_overwrite(
    bundle: Path, tiny: Path, tmp_path: Path, quick: None, point: str, failure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bundle, tmp_path / "out")
    before = snapshot(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        struck = strike(patch, POINTS[point], FAILURES[failure][0])
        fails(options(tiny, tmp_path / "out", "--overwrite"), failure, capsys)
    assert struck
    assert resumable_beside(tmp_path, before) if failure in ("interrupt", "disk full") else snapshot(tmp_path) == before


def resumable_beside(folder: Path, before: dict[str, str]) -> bool:
    """Whether all that was there still is, and nothing but an unfinished export besides."""
    now = {
        name: content
        for name, content in snapshot(folder).items()
        if not name.startswith((".out.partial", "beside/.out.partial"))
    }
    return now == before


def test_an_interrupted_export_goes_on_where_it_stopped(
    tiny: Path, tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packed tensors are read back and hashed, not packed again; what no longer fits its hash is, and so is all behind
    it."""
    whole = options(tiny, tmp_path / "whole")
    assert main(whole) == 0
    written: list[str] = []
    write = exporter.weights.packer.Packer._write

    def spy(self: Any, file: str, source: Any, *rest: Any) -> Any:
        written.append(file)
        return write(self, file, source, *rest)

    monkeypatch.setattr(exporter.weights.packer.Packer, "_write", spy)
    argv = options(tiny, tmp_path / "out")
    for damage, expected in (("", "nothing"), ("draft", "some"), ("target", "most"), ("checkpoint", "all")):
        with pytest.MonkeyPatch.context() as patch:
            strike(patch, POINTS["recording"], FAILURES["interrupt"][0])
            assert main(argv) == 130
        assert "the same command continues from '" in capsys.readouterr().err
        total, partial = len(written), tmp_path / ".out.partial"
        written.clear()
        if damage in ("draft", "target"):
            file = partial / "weights" / f"{damage}.bin"
            with file.open("r+b") as opened:
                opened.seek(file.stat().st_size // 2)
                opened.write(b"\xff\x01\x02\x03")
        elif damage == "checkpoint":
            os.utime(tiny / "target" / "model.safetensors")
        assert main(argv) == 0
        again = len(written)
        assert {
            "nothing": again == 0,
            "some": 0 < again < total / 2,
            "most": 0 < again <= total,
            "all": again > total / 2,
        }[expected], (damage, again, total)
        assert snapshot(tmp_path / "out/weights") == snapshot(tmp_path / "whole/weights")
        assert not (tmp_path / "out" / NOTES).exists()
        written.clear()
        shutil.rmtree(tmp_path / "out")


def test_only_the_same_is_gone_on_with(pair: Path, tmp_path: Path) -> None:
    made = [
        recipe_of(config_of(options(pair, tmp_path / "out", *more))).fingerprint()
        for more in (
            (),
            ("--draft-weights", "int4"),
            ("--draft-weights", "int8"),
            ("--draft-vocab", "9"),
            ("--heads", "0"),
            ("--capacity", "9"),
        )
    ]
    assert len(set(made)) == len(made)
    assert made[0] == recipe_of(config_of(options(pair, tmp_path / "elsewhere"))).fingerprint()


def test_two_exports_make_the_same_bytes(tiny: Path, tmp_path: Path, uncompiled: None) -> None:
    for name in ("a", "b"):
        assert main(options(tiny, tmp_path / name)) == 0
    a, b = (json.loads((tmp_path / n / "gumiho.json").read_text())["files"] for n in ("a", "b"))
    assert {n: d for n, d in a.items() if n != "golden.npz"} == {n: d for n, d in b.items() if n != "golden.npz"}


def start(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "exporter.cli", *argv],
            cwd=ROOT,
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def killed(argv: list[str], folder: Path, number: signal.Signals, file: str) -> tuple[int, str]:
    """A real export, killed midway: as soon as a file appears in the unfinished bundle. Returns exit status and what it
    printed."""
    log = folder.with_name(f"{folder.name}.log")
    process, deadline = start(argv, log), time.monotonic() + 400
    try:
        while process.poll() is None and not (folder / ".out.partial" / file).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        return process.wait(200), log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("number", "file"),
    [
        pytest.param(signal.SIGTERM, "weights/target.bin", id="SIGTERM at weights", marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGINT, "graphs/cpu/target.onnx", id="SIGINT at graphs", marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, "graphs/cpu/target.onnx", id="SIGKILL at graphs", marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_export_leaves_nothing_that_hinders_the_next(
    tiny: Path, tmp_path: Path, quick: None, number: signal.Signals, file: str
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    status, log = killed(options(tiny, folder / "out"), folder, number, file)
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
        assert not (folder / "out").exists()
        assert (folder / ".out.partial").exists()
    else:
        assert status == 130, log
        assert log.splitlines()[-1].startswith("error: interrupted, and the same command continues from '")
        assert "Traceback" not in log
        assert resumable(folder)
    assert main(options(tiny, folder / "out")) == 0
    Bundle(folder / "out").verify()
    assert [p.name for p in folder.iterdir()] == ["out"]


def test_an_export_that_kills_itself_leaves_nothing_that_hinders_the_next(
    tiny: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy of this process, which has imported what an export needs."""
    folder = tmp_path / "in"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(exporter.writing.bundle.golden, "record", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if (child := os.fork()) == 0:
            try:
                main(options(tiny, folder / "out"))
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (folder / ".out.partial" / "graphs/cpu/target.onnx").exists()
    assert not (folder / "out").exists()
    assert main(options(tiny, folder / "out")) == 0
    Bundle(folder / "out").verify()
    assert [p.name for p in folder.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_a_library_swallows_still_counts(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def export() -> None:
        with exporter.staging.staged(tmp_path / "out", overwrite=False) as folder:
            (folder / "file").write_text("half of it")
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), number)
                time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        export()
    assert list(tmp_path.iterdir()) == []
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


# --- --overwrite, --out -----------------------------------------------------------------------------------------------


def without_notes(error: str) -> str:
    """What a command said on standard error, but for notes on earlier spellings of options, which tests of trees
    use."""
    return re.sub(r"^note: .* goes with the next release\n", "", error, flags=re.M)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    """Exit status 1 and one line."""
    capsys.readouterr()
    assert main(argv) == 1
    err = without_notes(capsys.readouterr().err)
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err, err


def test_an_existing_bundle_is_replaced_only_when_asked(
    bundle: Path, tiny: Path, tmp_path: Path, uncompiled: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(bundle, out)
    (out / "engines" / "another-one").mkdir()
    before = snapshot(tmp_path)
    refused(options(tiny, out), capsys, f"'{out}' exists", "--overwrite")
    assert snapshot(tmp_path) == before
    assert main(options(tiny, out, "--overwrite")) == 0
    assert not (out / "engines" / "another-one").exists()
    assert json.loads((out / "gumiho.json").read_text())["sources"]["target"] == str(tiny / "target")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_what_is_no_bundle_is_never_replaced(
    tiny: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home" / "work").mkdir(parents=True)
    (tmp_path / "home" / "work" / "thesis.tex").write_text("dear to somebody")
    (tmp_path / "file").write_text("too")
    before = snapshot(tmp_path)
    for name in ("home", "file"):
        refused(options(tiny, tmp_path / name, *more), capsys, f"'{tmp_path / name}'", "--out")
    assert snapshot(tmp_path) == before


def test_an_empty_folder_may_be_filled(tiny: Path, tmp_path: Path, quick: None) -> None:
    (tmp_path / "out").mkdir()
    assert main(options(tiny, tmp_path / "out", "--overwrite")) == 0
    Bundle(tmp_path / "out").verify()


def test_folders_above_are_made(tiny: Path, tmp_path: Path, uncompiled: None) -> None:
    assert main(options(tiny, tmp_path / "a" / "b" / "out")) == 0
    Bundle(tmp_path / "a" / "b" / "out").verify()


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_a_folder_without_a_name_of_its_own(
    tiny: Path, tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    before = snapshot(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter.writing.bundle, "write", lambda *_: pytest.fail("it began to write"))
        refused(options(tiny, Path(out), "--overwrite"), capsys, "--out")
    assert snapshot(tmp_path) == before


def test_a_relative_out_lies_in_the_current_folder(
    tiny: Path, tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(options(tiny, Path("out"))) == 0
    Bundle(tmp_path / "out").verify()


def test_a_bundle_that_cannot_be_written_to_its_place(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    refused(options(tiny, tmp_path / "file" / "out"), capsys, f"'{tmp_path / 'file' / 'out'}'")
    assert list(snapshot(tmp_path)) == ["file"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("file", "'{out}' exists: name another folder with --out, or replace it with --overwrite"),
        ("file/out", "writing '{out}' failed (Not a directory): name another folder with --out"),
        (
            "new/out",
            "writing '{out}' failed (Permission denied): make its place writable, or name another folder with --out",
        ),
    ],
)
def test_a_dry_run_says_that_a_bundle_cannot_be_written(
    tiny: Path,
    tmp_path: Path,
    name: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(exporter.staging.os, "access", lambda folder, _: folder != tmp_path)
    refused(
        options(tiny, tmp_path / name, "--dry-run"), capsys, f"error: {says.replace('{out}', str(tmp_path / name))}\n"
    )
    assert list(snapshot(tmp_path)) == ["file"]


# --- --dry-run and disk space -----------------------------------------------------------------------------------------


def total(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def test_a_dry_run_writes_nothing_and_prints_the_sizes(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "new" / "out"
    before = snapshot(pair)
    assert main(options(pair, out, "--dry-run")) == 0
    text = capsys.readouterr().out
    assert snapshot(tmp_path) == {}
    assert snapshot(pair) == before
    sizes = wanted(pair, out).sizes()
    assert set(sizes) == {"weights/target.bin", "weights/draft.bin"}
    for file, size in sizes.items():
        assert f"  {file}  {size / 1e6:.1f} MB\n" in text
    for part in (str(out), str(pair / "target"), str(pair / "drafter"), "9 rows", "64 positions", "Disk: ", "Memory: "):
        assert part in text


def test_the_estimate_is_what_gets_written(pair: Path, bundle: Path) -> None:
    estimate = wanted(pair, bundle)
    written = {name: (bundle / name).stat().st_size for name in estimate.sizes()}
    assert all(size <= estimate.sizes()[name] for name, size in written.items())
    expected = sum(estimate.sizes().values()) - estimate.shared()
    assert sum(written.values()) <= expected <= 1.25 * sum(written.values())


def test_the_target_is_estimated_by_its_elements(pair: Path, bundle: Path) -> None:
    """Counted from the stored tensors, each rounded up to a page, and two rotary tables."""
    state = load_file(pair / "target" / "model.safetensors")
    tables = 2 * 4 * 64 * 8 * 4  # the rows of four streams that each read 64 positions, half of 16 wide
    assert wanted(pair, bundle).sizes()["weights/target.bin"] == tables + sum(
        -(-t.numel() * 4 // 4096) * 4096 for t in state.values()
    )


@pytest.mark.parametrize("own_embedding", [False, True], ids=["shared", "own embedding"])
def test_what_is_said_to_be_shared_is_not_written(tmp_path: Path, quick: None, own_embedding: bool) -> None:
    """A drafter whose embedding is no exact copy of the target's stores its own."""
    made = RandomPair(TINY | {"vocab_size": 601}, heads=1)
    target = made.make_target()
    target.save_pretrained(tmp_path / "target")
    state = made.make_drafter(target)
    if own_embedding:
        state["embed_tokens.weight"][0, 0] += 1e-3
    write_drafter(tmp_path / "drafter", state, drafter_config(target.config, 2))
    estimate = wanted(tmp_path, tmp_path / "out")
    pack = exporter.writing.bundle.Packer(tmp_path / "out", torch.float32, lambda _: None)
    for file, sources in estimate.sources().items():
        pack.pack(file, sources)
    written, upper = total(tmp_path / "out"), sum(estimate.sizes().values())
    assert written <= upper - estimate.shared() <= 1.25 * written


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**15, used=0, free=free))


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_too_little_disk_is_refused_before_anything_is_written(
    pair: Path, tmp_path: Path, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk(monkeypatch, 1000)
    monkeypatch.setattr(exporter.writing.bundle, "write", lambda *_: pytest.fail("it began to write"))
    refused(options(pair, tmp_path / "new" / "out", *more), capsys, "needs", "free", "--out")
    assert snapshot(tmp_path) == {}


def test_a_disk_that_is_too_small_for_the_whole_bundle_is_refused(
    pair: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Graphs, golden run and engines take their place as well as weights."""
    disk(monkeypatch, total(bundle) - 1)
    refused(options(pair, tmp_path / "out", "--dry-run"), capsys, "needs")


def test_a_disk_with_room_to_spare_is_accepted(
    pair: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, 2 * total(bundle) + (64 << 20))
    assert main(options(pair, tmp_path / "out", "--dry-run")) == 0


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["--nope"],
        ["--backend", "tpu"],
        ["--rows", "x"],
        ["--rows", "2.5"],
        ["--draft-tree", "bush"],
        ["--draft-tree", "official"],
        ["extra"],
    ],
    ids=" ".join,
)
def test_unknown_options_exit_with_2(
    tiny: Path, tmp_path: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options(tiny, tmp_path / "out", *argv))
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err
    assert snapshot(tmp_path) == {}


def test_the_checkpoint_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "--ckpt" in capsys.readouterr().err


BAD: list[tuple[list[str], tuple[str, ...]]] = [
    (["--capacity", "3"], ("--capacity is 3", "4 to 256")),
    (["--capacity", "0"], ("--capacity is 0",)),
    (["--capacity", "-1"], ("--capacity is -1",)),
    (["--capacity", "257"], ("--capacity is 257", "4 to 256")),
    (["--capacity", "8"], ("--capacity is 8", "9 rows", "give 9 or more, or fewer --rows")),
    (["--rows", "1"], ("--rows is 1", "2 or more")),
    (["--rows", "-5"], ("--rows is -5",)),
    (["--serial-steps", "0"], ("--serial-steps is 0", "1 or more")),
    (["--heads", "-1"], ("--heads is -1", "0 or more")),
    (["--heads", "2"], ("--heads is 2", "has 1")),
    (["--heads", "1", "--serial-steps", "1"], ("--heads is 1 with --serial-steps 1",)),
    (["--top-k", "0"], ("--top-k is 0",)),
    (["--head-top-k", "0"], ("--head-top-k is 0",)),
    (["--beam", "0"], ("--beam is 0",)),
    (["--draft-tree", "chain"], ("--draft-tree chain", "--top-k")),
    (["--target", "/nowhere"], ("'/nowhere'",)),
    (["--ckpt", "/nowhere"], ("'/nowhere'",)),
    (["--ckpt", "a/b/c"], ("'a/b/c'",)),
]


@pytest.mark.parametrize(("argv", "parts"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_a_bad_value_exits_with_1_and_one_line(
    tiny: Path, tmp_path: Path, argv: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(options(tiny, tmp_path / "out", *argv), capsys, *parts)
    assert snapshot(tmp_path) == {}


def test_an_unreleased_drafter_needs_its_target(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["--ckpt", str(tiny / "drafter"), "--out", str(tmp_path / "out")], capsys, "--target")


def test_a_pair_that_does_not_fit_is_one_line(
    tiny: Path, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--ckpt", str(tiny / "drafter"), "--target", str(pair / "target"), "--out", str(tmp_path / "out")]
    refused(argv, capsys, "hidden_size", "is 16", "expected 32")
    assert snapshot(tmp_path) == {}


def test_a_damaged_generation_config_is_one_line(
    tiny: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny, tmp_path / "pair")
    file = tmp_path / "pair" / "target" / "generation_config.json"
    for text in ('{"eos_token_id": ', "[1]", '{"eos_token_id": "</s>"}'):
        file.write_text(text)
        refused(options(tmp_path / "pair", tmp_path / "out"), capsys, str(file))
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("generation", "expected"),
    [({"eos_token_id": [2, 7]}, (2, 7)), ({"eos_token_id": 3}, (3,)), ({}, (1,)), (None, (1,))],
    ids=["list", "one", "config.json's", "no file"],
)
def test_ends_of_text(tiny: Path, tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    shutil.copytree(tiny, tmp_path / "pair")
    file = tmp_path / "pair" / "target" / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps(generation))
    assert wanted(tmp_path / "pair", tmp_path / "out").pair.eos_token_ids == expected


def test_the_tokenizer_s_own_end_counts_too(tiny: Path, tmp_path: Path) -> None:
    """As in vLLM, whatever generation_config.json says."""
    shutil.copytree(tiny, tmp_path / "pair")
    target = written(tmp_path / "pair" / "target")  # whose eos_token is its token 0
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    found = wanted(tmp_path / "pair", tmp_path / "out").pair
    assert found.eos_token_ids == (2, 7, 0)
    assert found.spelled(found.eos_token_ids) == ["'<s>' (2)", "7", "'a' (0)"]


def test_what_ends_a_text_is_said_and_what_is_missing(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny, tmp_path / "pair")
    words = Tokenizer(WordLevel({"a": 0, "None": 1, "<s>": 2}, "a"))  # one that is spelled like no end
    target = written(tmp_path / "pair" / "target", PLAIN | {"eos_token": None}, words)
    said = {}
    for ends in ([2], []):
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert main([*options(tmp_path / "pair", tmp_path / "out"), "--dry-run"]) == 0
        said[len(ends)] = capsys.readouterr().out
    assert "Ends: a text ends at '<s>' (2)." in said[1]
    assert "Warning: no token ends a text" in said[0]
    assert "Warning" not in said[1]
    assert "Ends:" not in said[0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}<s>{% endfor %}", 2),
        ("<b>{% for m in messages %}{{ m.content }}a<s>{% endfor %}", 2),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_the_token_that_ends_an_answer(tmp_path: Path, template: str | None, expected: int | None) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "<b>": 1, "<s>": 2}, "a"))
    tokenizer.add_tokens([AddedToken("<b>", special=True), AddedToken("<s>")])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert end_of_turn(tmp_path, tokenizer, {"eos_token": "<s>"}) == expected


TURNS = "{% for m in messages %}{{ m.content }}a{% endfor %}"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"chat_template": TURNS},
            "Warning: the chat template ends an answer with 'a' (0), at which texts do not end: add it to eos_token_id "
            "in the target's generation_config.json, and export again.\n",
        ),
        (
            {"chat_template": [{"name": "default", "template": TURNS}]},
            "Warning: the chat template ends an answer with 'a' (0)",
        ),
        (
            {"chat_template": "{% for %}"},
            "Warning: the bundle completes texts but takes no conversations, because the chat template in "
            "{target}/tokenizer_config.json does not parse (line 1: Expected an expression, got 'end of statement "
            "block'): correct it, and export again.\n",
        ),
        ({"chat_template": "{{ raise_exception('no') }}"}, "Ends: a text ends at '<s>' (2).\n"),
    ],
)
def test_a_dry_run_says_what_a_chat_template_lacks(
    tiny: Path, tmp_path: Path, settings: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny, tmp_path / "pair")
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "<s>": 2}, "a"))
    words.add_tokens([AddedToken("a", special=True)])
    target = written(tmp_path / "pair" / "target", PLAIN | {"eos_token": "<s>"} | settings, words)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert main([*options(tmp_path / "pair", tmp_path / "out"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert says.replace("{target}", str(target)) in out
    assert ("Warning" in out) == says.startswith("Warning")


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        ([], "no tokenizer"),
        (["tekken.json"], "no tokenizer that is supported (tekken.json is not)"),
    ],
)
def test_a_dry_run_says_that_there_is_no_tokenizer(
    tiny: Path, tmp_path: Path, files: list[str], lacks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny, tmp_path / "pair")
    for name in files:
        (tmp_path / "pair" / "target" / name).write_text("{}")
    assert main([*options(tmp_path / "pair", tmp_path / "out"), "--dry-run"]) == 0
    assert (
        f"Warning: the target has {lacks}, so that the bundle takes no text, only token ids: put the model's "
        "tokenizer.json, as transformers "
        "saves it, into its folder, and export again.\n" in capsys.readouterr().out
    )


def test_the_end_that_a_gguf_file_lacks(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Any] = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", "<turn>", *(chr(0x4E00 + i) for i in range(57))],
        "scores": [0.0] * 61,
        "token_type": [2, 3, 3, 3, *[1] * 57],
    }
    fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    for template, says in (
        (
            TURNS.replace("a{", "<turn>{"),
            "Warning: the chat template ends an answer with '<turn>' (3), at which texts do not end: write its id to "
            "the key tokenizer.ggml.eot_token_id of the target's file, and export again.\n",
        ),
        (
            "{% for %}",
            f"takes no conversations, because the chat template in {tmp_path / 'x.gguf'}/chat_template.jinja does not "
            "parse",
        ),
    ):
        model = LlamaForCausalLM.from_pretrained(tiny / "target")
        gguf_files.write(model, tmp_path / "x.gguf", fields=fields | {"tokenizer.chat_template": template})
        assert main(["--target", str(tmp_path / "x.gguf"), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
        assert says in capsys.readouterr().out


def test_the_smallest_capacity_gives_a_bundle(tiny: Path, tmp_path: Path) -> None:
    """What --capacity admits must come out, with as many rows as it has positions."""
    argv = ["--capacity", "4", "--serial-steps", "2", "--heads", "1", "--top-k", "2", "--rows", "4"]
    assert main(options(tiny, tmp_path / "out", *argv)) == 0
    assert json.loads((tmp_path / "out" / "gumiho.json").read_text())["capacity"] == 4


def test_defaults_come_from_the_checkpoint(tiny: Path, pair: Path) -> None:
    tree = recipe_of(config_of(["--ckpt", str(pair / "drafter"), "--target", str(pair / "target")]))
    assert (tree.tree.rows, tree.tree.serial_steps, tree.tree.heads, tree.capacity) == (8, 2, 2, 256)
    official = ["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), "--rows", "64"]
    tree = recipe_of(config_of(official)).tree
    assert (tree.rows, tree.top_k, tree.head_top_k, tree.beam) == (64, 14, 35, 14)


@pytest.mark.parametrize(
    ("more", "rows", "head_top_k"),
    [
        (["--backend", "cuda"], 64, 32),
        (["--backend", "migraphx"], 64, 35),
        (["--backend", "cuda", "migraphx"], 64, 32),
        (["--backend", "cuda", "--head-top-k", "40"], 64, 40),
        (["--backend", "cuda", "--draft-tree", "reference"], 64, 35),
        (["--backend", "cuda", "--weights", "int4"], 16, 32),
        (["--backend", "migraphx", "--weights", "int4"], 16, 35),
        (["--backend", "tensorrt", "--weights", "int4"], 16, 35),
        (["--backend", "tensorrt", "--weights", "int4", "--rows", "32"], 32, 35),
        (["--backend", "tensorrt", "--weights", "fp8", "--draft-weights", "int4"], 64, 35),
        (["--backend", "cpu", "--weights", "int4"], 8, 35),
        (["--backend", "cpu", "cuda", "--weights", "int4"], 8, 32),
    ],
)
def test_defaults_follow_the_backend(pair: Path, more: list[str], rows: int, head_top_k: int) -> None:
    asked = config_of(["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), *more])
    tree = tree_config(asked, open_pair(asked))
    assert (tree.rows, tree.head_top_k) == (rows, head_top_k)


# --- several backends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--backend", "cpu", "migraphx", "--device", "ref"), "--device ref belongs to one backend"),
        (("--device", "gpu", "--dry-run"), "error: there is no device 'gpu' of backend cpu: leave --device out\n"),
        (("--backend", "cpu", "--dtype", "fp16"), "--dtype fp16 is not for cpu"),
        (("--backend", "migraphx", "cpu", "--dtype", "fp16"), "--dtype fp16 is not for cpu"),
    ],
)
def test_options_that_do_not_go_together(
    tiny: Path, tmp_path: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(tiny, tmp_path / "out", *more)) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_the_device_an_export_says_what_to_run_there(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The graphs are written and checked all the same."""
    argv = ["--target", str(tiny / "target"), "--out", str(tmp_path / "out"), "--capacity", "64"]  # one graph to trace
    assert main([*argv, "--backend", "migraphx"]) == 0
    out = capsys.readouterr().out
    if "not compiled here" not in out:
        pytest.skip("MIGraphX runs here")
    assert f"gumiho compile {tmp_path / 'out'} --backend migraphx" in out
    manifest = Bundle(tmp_path / "out").manifest
    assert (manifest.dtype, list(manifest.forms), manifest.forms["migraphx"].static) == ("float16", ["migraphx"], True)


def test_an_operator_that_the_backend_does_not_take_stops_the_export(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MIGraphX asked for with a dialect that is not its own."""
    spec = forms.BACKENDS["migraphx"]
    monkeypatch.setitem(forms.BACKENDS, "migraphx", replace(spec, dialect=Standard))  # type: ignore[arg-type]
    assert main(options(tiny, tmp_path / "out", "--backend", "migraphx")) == 1
    assert "not supported by MIGraphX 2.16" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ([], {"draft": "int4"}),
        (["--preset", "full"], {"draft": "int4"}),
        (["--preset", "fast"], {"target": "w8a8", "draft": "int4"}),
        (["--preset", "small"], {"target": "int4", "draft": "int4"}),
        (["--preset", "fast", "--weights", "int8"], {"target": "int8", "draft": "int4"}),
        (["--preset", "fast", "--weights", "none", "--draft-weights", "none"], {}),
        (["--backend", "cuda", "--preset", "fast"], {"target": "int4"}),
        (["--backend", "cuda", "--preset", "small"], {"target": "int4", "draft": "int4"}),
        (["--backend", "tensorrt", "--preset", "full"], {}),
        (["--backend", "cpu", "cuda", "--preset", "small"], {"target": "int4", "draft": "int4"}),
    ],
)
def test_presets(pair: Path, more: list[str], weights: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.recipe.precision.overflows", lambda: False)
    made = recipe_of(config_of(["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), *more]))
    assert dict(made.quantized) == weights


def test_a_fast_export_is_what_this_cpu_can_run(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.recipe.precision.overflows", lambda: True)
    made = recipe_of(config_of(["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), "--preset", "fast"]))
    assert made.quantized["target"] == "w8a8-unsigned"


def test_a_preset_that_means_two_things_is_refused(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = options(pair, tmp_path / "out", "--backend", "cpu", "cuda", "--preset", "fast", "--dry-run")
    refused(argv, capsys, " for cpu and int4 for cuda", "--weights")


@pytest.mark.parametrize(
    ("more", "vnni", "advised"),
    [
        ([], True, True),
        ([], False, True),
        ([], None, False),
        (["--preset", "full"], True, False),
        (["--weights", "int8"], True, False),
        (["--backend", "cuda"], True, False),
    ],
)
def test_an_export_for_the_cpu_without_a_preset_is_advised(
    pair: Path, more: list[str], vnni: bool | None, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.recipe.precision.vnni", lambda: vnni)
    asked = config_of(["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), *more])
    lines = recommendation(asked)
    assert any("--preset fast" in line for line in lines) == advised
    assert all(line.count("SmolLM2") == 1 for line in lines)  # speeds and perplexities are one model's


@pytest.mark.parametrize(
    ("more", "overflows", "told"),
    [
        (["--preset", "fast"], True, False),
        (["--weights", "w8a8"], True, True),
        (["--weights", "w8a8-unsigned"], True, False),
        (["--preset", "fast"], False, False),
        ([], True, False),
        (["--preset", "fast", "--weights", "int8"], True, False),
        (["--preset", "fast", "--backend", "cuda"], True, False),
    ],
)
def test_a_dry_run_says_what_this_cpu_lacks(
    pair: Path,
    tmp_path: Path,
    more: list[str],
    overflows: bool,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("exporter.recipe.precision.overflows", lambda: overflows)
    monkeypatch.setattr("exporter.recipe.precision.vnni", lambda: not overflows)
    assert main(options(pair, tmp_path / "out", "--dry-run", *more)) == 0
    out = capsys.readouterr().out
    assert ("VNNI, which this one lacks" in out) == told
    assert not (told and "--preset fast" in out)


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_without_a_terminal_is_one_line_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(Boom), Progress() as progress:
        progress.start("reading")
        progress.start("packing", 10)
        progress.advance(20)
        progress.tell("a step")
        progress.start("tracing", 3, "graphs")
        raise Boom  # the phase is not finished
    err = capsys.readouterr().err
    assert re.fullmatch(r"reading: [0-9.]+ s\npacking: [0-9.]+ s\n", err)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_goes_on_while_a_phase_says_nothing(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.texts, self.awaited = list[str](), threading.Event()

        def isatty(self) -> bool:
            return terminal

        def write(self, text: str) -> int:
            self.texts.append(text)
            if len(self.texts) > 6:  # on a terminal more than beginning a phase and telling a step write
                self.awaited.set()
            return len(text)

    for name in ("_SILENCE", "_REFRESH"):
        monkeypatch.setattr(f"exporter.progress.{name}", 0.001)
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as progress:
        progress.start("packing", 4 * 10**9)
        progress.advance(10**9)
        progress.tell("a step")
        stream.texts.clear()
        assert stream.awaited.wait(60)
    assert "progress" not in [thread.name for thread in threading.enumerate()]
    text = "".join(stream.texts)
    assert (
        "packing:  25% of 4.00GB, a step, " if terminal else "packing: 25% of 4000 MB, a step, 0 s so far\n"
    ) in text


def test_progress_on_a_terminal_is_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress() as progress:
        progress.start("packing", 4 * 10**9)
        progress.advance(10**9)
        progress._bar.refresh()  # type: ignore[union-attr]
        progress.start("compiling")
        progress.tell("the target")
    text = screen.getvalue()
    assert "packing:  25% of 4.00GB, " in text
    assert " left" in text
    assert "compiling, the target, 00:00" in text
    assert "\n" not in text
