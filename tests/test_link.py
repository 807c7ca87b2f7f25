"""--link-weights: graphs read a checkpoint's own files, hard-linked into the bundle, and compute what packed weights
do."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

import exporter.writing.bundle
import exporter.writing.validate
import runtime.bundle.hashes
from exporter.cli import main
from exporter.options import config_of
from exporter.recipe.recipe import Recipe
from exporter.recipe.resolve import recipe_of
from exporter.weights.packer import Packer
from exporter.weights.source import Location
from runtime import GumihoError, load
from runtime.backends import backend
from runtime.bundle.hashes import sample_hash
from runtime.bundle.manifest import Manifest
from runtime.bundle.reader import Bundle
from runtime.cli.compile import main as compile_bundle
from runtime.engines.store import compile_engines, key
from tests.conftest import numbers
from tests.pairs import RandomPair, drafter_config, write_drafter

State = dict[str, Tensor]
SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TREE = ["--rows", "6", "--capacity", "64"]
PROMPT = [3, 14, 15, 92, 65, 35]


def options(pair: Path, out: Path, *more: str) -> list[str]:
    return ["--ckpt", str(pair / "drafter"), "--target", str(pair / "target"), "--out", str(out), *TREE, *numbers(more)]


def planned(pair: Path, *more: str) -> Recipe:
    return recipe_of(config_of(options(pair, pair / "out", *more)))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def state_of(pair: Path) -> State:
    """The target's tensors, as the library of safetensors reads them, by the names of the graphs' parameters."""
    found = {n: t for file in (pair / "target").glob("*.safetensors") for n, t in load_file(file).items()}
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def packed(wanted: Recipe, folder: Path) -> dict[str, dict[str, Location]]:
    packer = Packer(folder, wanted.dtype, lambda _: None)
    return {file: packer.pack(file, sources) for file, sources in wanted.sources().items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair in fp32, the drafter in .safetensors as well."""
    folder = tmp_path_factory.mktemp("pair")
    made = RandomPair(SMALL, heads=1)
    target = made.make_target()
    target.save_pretrained(folder / "target")
    write_drafter(folder / "drafter", made.make_drafter(target), drafter_config(target.config, 2), safetensors=True)
    return folder


@pytest.fixture(scope="module")
def linked(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that is linked, made over an earlier one; not to be changed."""
    out = tmp_path_factory.mktemp("linked") / "out"
    before = files(pair)
    assert main(options(pair, out, "--link-weights", "--backend", "cpu", "migraphx", "--dtype", "fp32")) == 0
    assert files(pair) == before
    return out


def links(bundle: Path) -> set[str]:
    return {name for name in Bundle(bundle).manifest.files if name.endswith(".safetensors")}


def test_nothing_of_the_target_is_copied(linked: Path, pair: Path) -> None:
    assert links(linked) == {"weights/target/model.safetensors", "weights/draft/model.safetensors"}
    for model, source in (("target", "target"), ("draft", "drafter")):
        ours, theirs = linked / f"weights/{model}/model.safetensors", pair / source / "model.safetensors"
        assert ours.samefile(theirs)
        assert ours.stat().st_nlink == 2
    tables = 2 * 4 * 64 * 8 * 4  # cos and sin, of as many positions as four streams read at once
    assert (linked / "weights/target.bin").stat().st_size == tables
    heads = 7 * 32 * 32 + 6 * 32  # numbers: one head of 2H -> H and five of H -> H, with their biases
    assert 4 * heads < (linked / "weights/draft.bin").stat().st_size < 4 * heads + 14 * 4096


def test_no_weights_are_read_again_for_their_hashes(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    real = runtime.bundle.hashes.file_hash

    def told(path: Path) -> str:
        hashed.append(path)
        return real(path)

    monkeypatch.setattr(runtime.bundle.hashes, "file_hash", told)
    assert main(options(pair, tmp_path / "out", "--link-weights", "--backend", "migraphx", "--dtype", "fp32")) == 0
    assert {path.name for path in hashed} >= {"target.onnx", "golden.npz"}
    assert not [path for path in hashed if "weights" in path.parts]


def test_graphs_point_at_the_targets_very_numbers(linked: Path, pair: Path) -> None:
    """onnx' own reader refuses files of several names, so numpy reads them."""
    model = onnx.load(str(linked / "graphs/cpu/target.onnx"), load_external_data=False)
    found = {}
    for tensor in model.graph.initializer:
        if place := {entry.key: entry.value for entry in tensor.external_data}:
            count = int(place["length"]) // 4
            found[tensor.name] = np.fromfile(linked / place["location"], np.float32, count, offset=int(place["offset"]))
    state = state_of(pair)
    assert found.keys() == {*state, "rotary.cos", "rotary.sin"}
    for name, tensor in state.items():
        assert np.array_equal(found[name], tensor.numpy().reshape(-1)), name


def test_a_linked_bundle_computes_what_the_checkpoints_say(linked: Path, pair: Path) -> None:
    errors = exporter.writing.validate.validate(planned(pair, "--link-weights"), linked, "cpu")
    assert all(error < 1e-3 for error in errors.values()), errors


def test_a_linked_bundle_gives_the_targets_tokens(linked: Path, pair: Path) -> None:
    llama = LlamaForCausalLM.from_pretrained(pair / "target").eval()
    expected = llama.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, pad_token_id=0)[
        0, len(PROMPT) :
    ]
    with load(linked, "cpu", threads=1) as model:
        generation = model.generate(PROMPT, 40)
        list(generation.cycles())
    assert generation.ids == expected.tolist()


def test_migraphx_reads_linked_weights(linked: Path) -> None:
    try:
        migraphx = backend("migraphx", "ref")
    except GumihoError as error:
        pytest.skip(str(error))
    _, errors = compile_engines(Bundle(linked), migraphx)
    assert max(errors.values()) < 1e-4


def test_the_closing_lines_say_what_is_linked_and_what_is_packed(
    linked: Path, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The estimate holds for what was written, and every tensor of the target's is linked."""
    argv = options(pair, tmp_path / "out", "--link-weights", "--dry-run")
    assert main(argv) == 0
    wanted = planned(pair, "--link-weights")
    written = sum((linked / f"weights/{model}.bin").stat().st_size for model in ("target", "draft"))
    most = sum(wanted.sizes().values()) - wanted.shared()
    assert written <= most <= 1.25 * written
    own = {"fc.weight", "fc.bias", "embed_tokens.weight"}  # and layers: of the drafter's, all but its heads
    drafter = load_file(pair / "drafter/model.safetensors")
    bytes_linked = sum(t.nbytes for t in state_of(pair).values()) + sum(
        t.nbytes for n, t in drafter.items() if n in own or n.startswith("layers.")
    )
    assert (
        f"Linked: {bytes_linked / 1e6:.1f} MB in the checkpoints' files; at most {most / 1e6:.1f} MB"
        in capsys.readouterr().out
    )
    assert wanted.linked() == bytes_linked


# --- layouts ----------------------------------------------------------------------------------------------------------


def in_shards(folder: Path, state: State) -> None:
    names = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(state)}
    for shard in set(names.values()):
        save_file({n: t for n, t in state.items() if names[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def in_the_hubs_cache(folder: Path, state: State) -> None:
    """A snapshot of the hub's is a folder of links to where files lie under their hashes."""
    in_shards(folder, state)
    (folder.parent / "blobs").mkdir()
    for i, file in enumerate(sorted(folder.glob("*.safetensors"))):
        file.rename(folder.parent / "blobs" / str(i))
        file.symlink_to(Path("..") / "blobs" / str(i))


def loose(folder: Path, state: State) -> None:
    for i in range(2):
        save_file({n: state[n] for n in sorted(state)[i::2]}, folder / f"part{i}.safetensors")


def in_bfloat16(folder: Path, state: State) -> None:
    """All but the norms, which some checkpoints keep in fp32."""
    save_file({n: t if "norm" in n else t.bfloat16() for n, t in state.items()}, folder / "model.safetensors")


def in_float16(folder: Path, state: State) -> None:
    save_file({n: t if "norm" in n else t.half() for n, t in state.items()}, folder / "model.safetensors")


def at_odd_addresses(folder: Path, state: State) -> None:
    """Headers of files that old writers made are not padded; what lies at odd addresses is packed."""
    save_file(state, folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length])).encode()
    header += b" " * (3 - len(header) % 4)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def tied(folder: Path, state: State) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    save_file({n: t for n, t in state.items() if n != "lm_head.weight"}, folder / "model.safetensors")


LAYOUTS: list[tuple[Callable[[Path, State], None], tuple[str, ...], set[str], bool]] = [
    (in_shards, (), {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}, True),
    (in_the_hubs_cache, (), {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}, True),
    (loose, (), {"part0.safetensors", "part1.safetensors"}, True),
    (tied, (), {"model.safetensors"}, True),
    (in_bfloat16, (), {"model.safetensors"}, False),
    (in_float16, ("--backend", "tensorrt"), {"model.safetensors"}, False),
    (in_float16, ("--backend", "tensorrt", "--weights", "int4"), {"model.safetensors"}, False),
]


def respelled(pair: Path, to: Path, layout: Callable[[Path, State], None]) -> Path:
    shutil.copytree(pair, to)
    state = load_file(to / "target/model.safetensors")
    (to / "target/model.safetensors").unlink()
    layout(to / "target", state)
    return to


@pytest.mark.parametrize(("layout", "more", "expected", "whole"), LAYOUTS, ids=lambda v: getattr(v, "__name__", None))
def test_every_layout_is_linked_tensor_by_tensor(
    pair: Path,
    tmp_path: Path,
    layout: Callable[[Path, State], None],
    more: tuple[str, ...],
    expected: set[str],
    whole: bool,
) -> None:
    made = respelled(pair, tmp_path / "pair", layout)
    wanted, state = planned(made, "--link-weights", *more), state_of(made)
    state.setdefault("lm_head.weight", state["embed_tokens.weight"])
    places = packed(wanted, tmp_path / "out")["weights/target.bin"]
    for name, tensor in state.items():
        if name not in places or name.replace("weight", "scale") in places:
            continue  # quantized
        place = places[name]
        assert (place.file.endswith(".safetensors")) == (tensor.dtype == wanted.dtype), name
        assert torch.equal(place.mapped(tmp_path / "out"), tensor.to(wanted.dtype)), name
    found = {p.name for p in (tmp_path / "out/weights/target").iterdir()}
    assert found == expected
    for name in found:
        link = tmp_path / "out/weights/target" / name
        assert link.samefile(made / "target" / name)
        assert not link.is_symlink()
    if whole:
        assert all(
            place.file.endswith(".safetensors") for name, place in places.items() if not name.startswith("rotary.")
        )
    if layout is tied:
        assert places["lm_head.weight"] == places["embed_tokens.weight"]


def test_what_lies_at_odd_addresses_is_packed(pair: Path, tmp_path: Path) -> None:
    made = respelled(pair, tmp_path / "pair", at_odd_addresses)
    state = state_of(made)
    with pytest.raises(GumihoError, match="nothing of it can be linked"):
        planned(made, "--link-weights")
    assert all(torch.equal(planned(made).pair.target.read(n), t) for n, t in state.items())


def test_a_drafters_copy_of_a_linked_embedding_is_found(pair: Path, tmp_path: Path) -> None:
    """The official drafters are pickled, and hold the target's embedding once more."""
    shutil.copytree(pair, tmp_path / "pair")
    drafter = tmp_path / "pair/drafter"
    torch.save(load_file(drafter / "model.safetensors"), drafter / "pytorch_model.bin")
    (drafter / "model.safetensors").unlink()
    places = packed(planned(tmp_path / "pair", "--link-weights"), tmp_path / "out")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert places["weights/draft.bin"][name] == places["weights/target.bin"][name]
    assert not (tmp_path / "out/weights/draft").exists()


# --- refusals ---------------------------------------------------------------------------------------------------------


def as_bin(folder: Path, state: State) -> None:
    torch.save(state, folder / "pytorch_model.bin")


def all_in_bfloat16(folder: Path, state: State) -> None:
    save_file({n: t.bfloat16() for n, t in state.items()}, folder / "model.safetensors")


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    capsys.readouterr()
    assert main(argv) == 1
    *phases, err = capsys.readouterr().err.splitlines()
    assert err.startswith("error: ")
    assert len(phases) <= 1  # the checkpoints were read
    for part in parts:
        assert part in err, err


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (as_bin, ("pickled", "leave --link-weights out")),
        (all_in_bfloat16, ("stored in bfloat16", "the bundle in float32", "--dtype", "leave --link-weights out")),
    ],
)
def test_where_nothing_can_be_linked_it_is_refused(
    pair: Path,
    tmp_path: Path,
    layout: Callable[[Path, State], None],
    parts: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = respelled(pair, tmp_path / "pair", layout)
    refused(options(made, tmp_path / "out", "--link-weights"), capsys, *parts)
    assert [p.name for p in tmp_path.iterdir()] == ["pair"]


@pytest.mark.parametrize(("backends", "part"), [("cpu cuda", "cuda"), ("vllm", "vllm")])
def test_backends_that_cannot_read_links(
    pair: Path, tmp_path: Path, backends: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = options(pair, tmp_path / "out", "--link-weights", "--backend", *backends.split())
    refused([a for a in argv if part != "vllm" or a not in TREE], capsys, "--link-weights", part)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM])
def test_a_file_system_that_refuses_links(
    pair: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    refused(
        options(pair, tmp_path / "out", "--link-weights"),
        capsys,
        str(pair / "target/model.safetensors"),
        os.strerror(number),
        "same disk",
        "--out",
        "leave --link-weights out",
    )
    assert list(tmp_path.iterdir()) == []


# --- interrupted, replaced, copied ------------------------------------------------------------------------------------


def test_an_interrupted_export_goes_on_with_its_links(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, written = files(pair), list[str]()
    write = Packer._write

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def spy(self: Any, file: str, *rest: Any) -> Any:
        written.append(file)
        return write(self, file, *rest)

    monkeypatch.setattr(Packer, "_write", spy)
    monkeypatch.setattr(exporter.writing.bundle, "trace", interrupt)
    argv = options(pair, tmp_path / "out", "--link-weights")
    for again in (False, True):
        written.clear()
        assert main(argv) == 130
        assert bool(written) is not again
    # The same command without links begins anew, and leaves the checkpoint alone.
    assert main([a for a in argv if a != "--link-weights"]) == 130
    assert not list((tmp_path / ".out.partial").rglob("*.safetensors"))
    assert files(pair) == before
    assert (pair / "target/model.safetensors").is_file()
    capsys.readouterr()


def test_a_linked_bundle_that_is_replaced_leaves_the_checkpoint(
    linked: Path, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(pair)
    shutil.copytree(linked, tmp_path / "out", copy_function=os.link)

    def stop(*_: Any) -> None:
        raise GumihoError("far enough")

    monkeypatch.setattr(exporter.writing.bundle, "trace", stop)
    assert main(options(pair, tmp_path / "out", "--link-weights", "--overwrite")) == 1
    assert files(pair) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    Bundle(tmp_path / "out").verify()
    shutil.rmtree(tmp_path / "out")
    assert files(pair) == before


def test_a_copy_of_a_linked_bundle_is_a_bundle_of_its_own(
    linked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(linked, copy, ignore=shutil.ignore_patterns("engines"))
    assert all((copy / name).stat().st_nlink == 1 for name in links(copy))
    assert compile_bundle([str(copy)]) == 0
    assert "golden run replayed" in capsys.readouterr().out
    with load(copy) as model:
        list(model.generate(PROMPT, 8).cycles())


def test_compiling_finds_a_damaged_copy(linked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(linked, copy, ignore=shutil.ignore_patterns("engines"))
    file = copy / "weights/target/model.safetensors"
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert compile_bundle([str(copy)]) == 1
    assert "model.safetensors is damaged" in capsys.readouterr().err
    file.write_bytes(data[:-1])
    assert compile_bundle([str(copy)]) == 1
    assert f"has {len(data) - 1} bytes, expected {len(data)}" in capsys.readouterr().err


def test_engines_are_not_taken_for_those_of_other_weights(linked: Path, pair: Path, tmp_path: Path) -> None:
    """A checkpoint of the same shapes is another one."""
    other = tmp_path / "model.safetensors"
    save_file({n: t + 1e-3 for n, t in load_file(pair / "target/model.safetensors").items()}, other, {"format": "pt"})
    file = linked / "weights/target/model.safetensors"
    assert file.stat().st_size == other.stat().st_size
    assert sample_hash(other) != sample_hash(file)
    assert sample_hash(file) in key(Bundle(linked), "cpu", backend("cpu").versions()).values()


def test_a_samples_hash_reads_a_piece_of_every_part(tmp_path: Path) -> None:
    """Sparse files: a byte at the head of any part shows, one behind it does not."""

    def made(name: str, *at: int) -> str:
        with (tmp_path / name).open("wb") as file:
            file.truncate((48 << 20) + 5)
            for position in at:
                file.seek(position)
                file.write(b"x")
        return sample_hash(tmp_path / name)

    zeros = made("zeros")
    seen = [made(str(at), at) for at in (0, 65535, 16 << 20, (32 << 20) + 99, (48 << 20) + 4)]
    assert len({zeros, *seen}) == 6
    assert made("unseen", 65536, (16 << 20) - 1) == zeros


# --- memory -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_into_memory_is_not_compiled_here(
    linked: Path, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(_: Recipe, folder: Path, progress: object) -> Manifest:
        shutil.copytree(linked, folder, ignore=shutil.ignore_patterns("engines"), dirs_exist_ok=True)
        return Bundle(linked).manifest

    monkeypatch.setattr(exporter.writing.bundle, "write", write)
    monkeypatch.setattr("runtime.backends.memory.host_free", lambda: 100_000)
    assert main(options(pair, tmp_path / "out", "--link-weights")) == 0
    out = capsys.readouterr().out
    assert "cpu: not compiled here, since compiling for cpu needs about" in out
    assert "of memory, and 0 MB are free, swap included: free some" in out
    assert f"gumiho compile {tmp_path / 'out'} --backend cpu" in out
    assert not (tmp_path / "out/engines").exists()
    Bundle(tmp_path / "out").verify()
