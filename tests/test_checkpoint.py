"""Every layout on disk gives the same tensors under the same names, lazily; configurations in every spelling mean the
same."""

import json
import math
import re
import struct
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from exporter.checkpoints import hub
from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.hub import locate, target_of
from exporter.checkpoints.json_config import llama_fields
from exporter.checkpoints.llama import LlamaConfig as OurConfig
from exporter.checkpoints.llama import (
    inverse_frequencies,
    llama_config,
    llama_shape,
    rotary_tables,
    transformers_config,
)
from runtime.errors import GumihoError
from tests import peak
from tests.conftest import examples
from tests.pairs import RandomPair, drafter_config

State = dict[str, Tensor]
# The hub's client is built on httpx or httpx2, by version: the one its own errors derive from.
httpx = sys.modules[next(c for c in HfHubHTTPError.__mro__ if c.__name__ == "HTTPError").__module__.split(".")[0]]
SMALL = RandomPair(
    {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1},
    heads=2,
)


def bin_file(folder: Path, state: State) -> None:
    torch.save(state, folder / "pytorch_model.bin")


def legacy_bin_file(folder: Path, state: State) -> None:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def safetensors_file(folder: Path, state: State) -> None:
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors")


def halves(state: State) -> list[State]:
    names = sorted(state)
    return [{n: state[n].contiguous() for n in names[i::2]} for i in range(2)]


def indexed(folder: Path, state: State, kind: str, save: Callable[[State, Path], None]) -> None:
    weight_map = {}
    for i, part in enumerate(halves(state)):
        file = f"{kind.split('.')[0]}-{i + 1:05}-of-00002.{kind.split('.')[1]}"
        save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def sharded_safetensors(folder: Path, state: State) -> None:
    indexed(folder, state, "model.safetensors", save_file)
    (folder / "unrelated.safetensors").write_bytes(b"the index does not name this file")


def sharded_bin(folder: Path, state: State) -> None:
    indexed(folder, state, "pytorch_model.bin", torch.save)


def loose_safetensors(folder: Path, state: State) -> None:
    for i, part in enumerate(halves(state)):
        save_file(part, folder / f"part{i}.safetensors")


CONTAINERS = [bin_file, legacy_bin_file, safetensors_file, sharded_safetensors, sharded_bin, loose_safetensors]
DRAFTER_NAMES: dict[str, Callable[[str], str]] = {
    "official": lambda n: n,
    "mlp.mlp": lambda n: re.sub(r"^mlp\.", "mlp.mlp.", n),
    "model": lambda n: f"model.{n}",
    "model.model": lambda n: f"model.model.{n}",
    "model, heads bare": lambda n: n if n.startswith("mlp.") else f"model.{n}",
    "model, mlp.mlp": lambda n: "model." + re.sub(r"^mlp\.", "mlp.mlp.", n),
}


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """These files are small, and are read as large ones are; those of other tests are read whole."""
    monkeypatch.setattr("exporter.checkpoints.checkpoint._SMALL", 0)


@pytest.fixture(scope="module")
def target_state() -> State:
    return {name: t.detach().clone() for name, t in SMALL.make_target().state_dict().items()}


@pytest.fixture(scope="module")
def drafter_state() -> State:
    return SMALL.make_drafter(SMALL.make_target())


def folder_of(
    folder: Path, state: State, container: Callable[[Path, State], None], config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    container(folder, state)
    (folder / "config.json").write_text(json.dumps(config or drafter_config(SMALL.config(), SMALL.layers)))
    return folder


def same(found: Checkpoint, expected: State) -> None:
    assert found.names() == set(expected)
    for name, tensor in expected.items():
        assert found.shape(name) == tuple(tensor.shape)
        read = found.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor), name


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "spelling"),
    [
        # Names mean the same in every container: each spelling in one, and each container with one.
        pytest.param(c, s, marks=() if c is safetensors_file or s == "model, mlp.mlp" else pytest.mark.exhaustive)
        for s in DRAFTER_NAMES
        for c in CONTAINERS
    ],
)
def test_drafter_layouts_give_the_same_tensors(
    tmp_path: Path, drafter_state: State, container: Callable[[Path, State], None], spelling: str
) -> None:
    state = {DRAFTER_NAMES[spelling](name): t for name, t in drafter_state.items()}
    same(Checkpoint(str(folder_of(tmp_path, state, container)), "drafter"), drafter_state)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("prefixed", [True, False])
def test_target_layouts_give_the_same_tensors(
    tmp_path: Path, target_state: State, container: Callable[[Path, State], None], prefixed: bool
) -> None:
    plain = {name.removeprefix("model."): t for name, t in target_state.items()}
    assert "lm_head.weight" in plain
    same(Checkpoint(str(folder_of(tmp_path, target_state if prefixed else plain, container)), "target"), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("container", CONTAINERS)
def test_stored_dtypes_come_back_bit_for_bit(
    tmp_path: Path, drafter_state: State, container: Callable[[Path, State], None], dtype: torch.dtype
) -> None:
    state = {name: t.to(dtype) for name, t in drafter_state.items()}
    same(Checkpoint(str(folder_of(tmp_path, state, container)), "drafter"), state)


@pytest.mark.parametrize("container", [bin_file, safetensors_file])
@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
def test_what_a_drafter_buffers_is_ignored_and_what_it_copies_has_its_bare_name(
    tmp_path: Path, drafter_state: State, container: Callable[[Path, State], None], prefix: str
) -> None:
    copied = {"lm_head.weight": torch.ones(61, 16), "token_map": torch.arange(61)}
    extra = {f"{prefix}{name}": tensor for name, tensor in copied.items()} | {
        f"{prefix}rotary_emb.inv_freq": torch.ones(4),
        f"{prefix}layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    same(Checkpoint(str(folder_of(tmp_path, drafter_state | extra, container)), "drafter"), drafter_state | copied)


def test_a_targets_rotary_buffers_are_ignored(tmp_path: Path, target_state: State) -> None:
    extra = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.rotary_emb.inv_freq": torch.ones(4)}
    found = Checkpoint(str(folder_of(tmp_path, target_state | extra, safetensors_file)), "target")
    assert found.names() == {name.removeprefix("model.") for name in target_state}


def test_entries_that_are_no_tensors_are_ignored(tmp_path: Path, drafter_state: State) -> None:
    folder_of(tmp_path, drafter_state | {"step": 3}, bin_file)  # type: ignore[dict-item]
    same(Checkpoint(str(tmp_path), "drafter"), drafter_state)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_slice_is_the_rows_asked_for(
    tmp_path: Path, drafter_state: State, container: Callable[[Path, State], None]
) -> None:
    found = Checkpoint(str(folder_of(tmp_path, drafter_state, container)), "drafter")
    expected = drafter_state["embed_tokens.weight"]
    assert torch.equal(found.read("embed_tokens.weight", 7, 19), expected[7:19])
    assert torch.equal(found.read("embed_tokens.weight", 60, 99), expected[60:])


def test_one_name_in_two_spellings_is_refused(tmp_path: Path, drafter_state: State) -> None:
    state = drafter_state | {"model.fc.weight": drafter_state["fc.weight"]}
    with pytest.raises(GumihoError, match=r"'fc\.weight' twice"):
        Checkpoint(str(folder_of(tmp_path, state, bin_file)), "drafter")


def test_a_safetensors_file_is_preferred_to_a_bin(tmp_path: Path, drafter_state: State) -> None:
    folder_of(tmp_path, {name: torch.zeros_like(t) for name, t in drafter_state.items()}, bin_file)
    same(Checkpoint(str(folder_of(tmp_path, drafter_state, safetensors_file)), "drafter"), drafter_state)


# --- laziness ---------------------------------------------------------------------------------------------------------

_CHILD = """
from exporter.checkpoints.checkpoint import Checkpoint
import torch
torch.zeros(8) + 1
before = peak()
found = Checkpoint(sys.argv[1], "target")
shapes = [found.shape(name) for name in sorted(found.names())]
small, rows = found.read("norm.weight"), found.read("embed_tokens.weight", 10**6, 10**6 + 4)
print(peak() - before, small.tolist(), rows.shape[0], len(shapes))
"""


def sparse_safetensors(file: Path, big_rows: int) -> None:
    """Six gigabytes on paper: a header, one small tensor with values, and holes."""
    width, header, end = 1024, {}, 0
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        header[name] = {"dtype": "F16", "shape": [big_rows, width], "data_offsets": [end, end + big_rows * width * 2]}
        end += big_rows * width * 2
    header["model.norm.weight"] = {"dtype": "F32", "shape": [3], "data_offsets": [end, end + 12]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.seek(8 + len(text) + end)
        out.write(struct.pack("<3f", 1.0, 2.5, -3.0))


def test_a_big_file_is_opened_and_read_without_holding_it(tmp_path: Path) -> None:
    sparse_safetensors(tmp_path / "model.safetensors", 1 << 20)
    (tmp_path / "config.json").write_text("{}")
    assert (tmp_path / "model.safetensors").stat().st_size > 6 << 30
    grown, *rest = peak.printed(_CHILD, tmp_path).split(maxsplit=1)
    assert rest == ["[1.0, 2.5, -3.0] 4 4\n"]
    assert int(grown) < 32 * 1024, f"{grown} KiB"


# --- configurations ---------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": (
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "linear": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ),
    "llama3": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ),
}


def configured(folder: Path, config: dict[str, Any], kind: str = "target") -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"norm.weight": torch.ones(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(str(folder), kind)


def by_hand(kind: str, d: int = 16, theta: float = 5e5) -> Tensor:
    """Inverse frequencies from the formulas, one at a time."""
    out = []
    for i in range(d // 2):
        f = theta ** (-2 * i / d)
        wavelength = 2 * math.pi / f
        if kind == "linear":
            f /= 4.0
        elif kind == "llama3":
            low, high = 64 / 1.0, 64 / 4.0
            if wavelength > low:
                f /= 8.0
            elif wavelength >= high:
                smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
                f = (1 - smooth) * f / 8.0 + smooth * f
        out.append(f)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize(("kind", "index"), [(kind, i) for kind in ROPES for i in range(3)])
def test_rotary_tables_in_every_spelling(tmp_path: Path, kind: str, index: int) -> None:
    config = llama_config(configured(tmp_path, BASE | ROPES[kind][index]))
    cos, sin = rotary_tables(config, 100)
    assert cos.shape == sin.shape == (100, 8)
    assert cos.dtype == sin.dtype == torch.float32
    angle = torch.arange(100, dtype=torch.float64)[:, None] * by_hand(kind)[None]
    torch.testing.assert_close(cos.double(), angle.cos(), rtol=0, atol=2e-5)
    torch.testing.assert_close(sin.double(), angle.sin(), rtol=0, atol=2e-5)
    # And as transformers applies them: its tables repeat each half.
    own = LlamaConfig(**{k: v for k, v in BASE.items() if k != "model_type"}, **ROPES[kind][2])
    theirs = LlamaRotaryEmbedding(own)(torch.zeros(1, 100, 64), torch.arange(100)[None])
    for ours, other in zip((cos, sin), theirs, strict=True):
        torch.testing.assert_close(torch.cat((ours, ours), -1), other[0], rtol=0, atol=1e-6)


def test_the_three_kinds_differ() -> None:
    plain, linear, llama3 = (by_hand(kind) for kind in ROPES)
    assert not torch.allclose(plain, linear)
    assert not torch.allclose(plain, llama3)
    assert not torch.allclose(linear, llama3)


@st.composite
def raw_configs(draw: st.DrawFn) -> dict[str, Any]:
    """config.json of any size and rotary embedding that ``llama_fields`` accepts, with fields left out at random."""
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 4))
    raw: dict[str, Any] = {
        "hidden_size": 2 * heads * draw(st.integers(1, 128)),
        "intermediate_size": draw(st.integers(1, 1 << 24)),
        "num_hidden_layers": draw(st.integers(1, 1 << 16)),
        "num_attention_heads": heads,
        "vocab_size": draw(st.integers(1, 1 << 24)),
    }
    theta = st.one_of(st.integers(1, 10**15), st.floats(1, 1e15))
    factor = st.one_of(st.integers(1, 10**9), st.floats(1, 1e9))
    rope: dict[str, Any] = {"rope_type": draw(st.sampled_from(["default", "linear", "llama3"]))}
    if rope["rope_type"] != "default":
        rope["factor"] = draw(factor)
    if rope["rope_type"] == "llama3":
        low = draw(st.one_of(st.integers(1, 8), st.floats(1e-3, 16)))
        rope |= {"low_freq_factor": low, "high_freq_factor": low * draw(st.floats(1.01, 64))}
        rope |= draw(st.fixed_dictionaries({}, optional={"original_max_position_embeddings": st.integers(1, 1 << 31)}))
    optional: dict[str, st.SearchStrategy[Any]] = {
        "num_key_value_heads": st.sampled_from([kv_heads, None]),
        "head_dim": st.sampled_from([2, 4, 64, 96, 128, 250, None]),
        "max_position_embeddings": st.integers(1, 1 << 31),
        "rms_norm_eps": st.floats(1e-12, 0.1),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "rope_theta": theta,
        "rope_parameters": st.just(rope),
        "rope_scaling": st.just(rope),
    }
    return raw | draw(st.fixed_dictionaries({}, optional=optional))


@examples(200)
@given(raw_configs())
def test_a_configuration_is_transformers_own(raw: dict[str, Any]) -> None:
    """Its fields, defaults included, and the rotary frequencies and tables, bit for bit."""
    ours = OurConfig(**llama_fields(raw, "it"))
    read = json.loads(json.dumps(raw))  # transformers writes its defaults into nested objects
    for theirs in (LlamaConfig(**read), transformers_config(ours)):
        rope = dict(theirs.rope_parameters)
        if rope["rope_type"] != "llama3":
            rope.pop("original_max_position_embeddings", None)
        assert rope == ours.rope_parameters
        same = {name: getattr(theirs, name) for name in vars(ours) if name != "sliding_window"}
        assert same | {"rope_parameters": rope, "sliding_window": None} == vars(ours)
        rotary = LlamaRotaryEmbedding(theirs)
        assert rotary.attention_scaling == 1
        assert torch.equal(inverse_frequencies(ours), rotary.inv_freq)
        cos, sin = rotary(torch.zeros(1, 1, 1), torch.arange(100)[None])
        for mine, other in zip(rotary_tables(ours, 100), (cos, sin), strict=True):
            assert torch.equal(torch.cat((mine, mine), -1), other[0])


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
def test_other_rotary_kinds_are_refused_by_name(tmp_path: Path, kind: str, spelling: str) -> None:
    extra = {"factor": 2.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        extra |= {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}  # type: ignore[dict-item]
    if spelling == "rope_parameters":
        rope: dict[str, Any] = {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **extra}}
    else:
        rope = {"rope_theta": 1e4, "rope_scaling": {spelling: kind, **extra}}
    with pytest.raises(
        GumihoError, match=rf"rotary scaling '{kind}', expected plain, linear or llama3: name another checkpoint$"
    ):
        llama_config(configured(tmp_path, BASE | rope))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear"}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "made-up", "factor": 8.0}},
        {"rope_theta": 1e4, "rope_scaling": "linear"},
        {"rope_theta": "a lot"},
    ],
    ids=["linear without factor", "llama3 without limits", "unknown kind", "text", "theta is text"],
)
def test_a_damaged_rotary_configuration_is_one_sentence(tmp_path: Path, rope: dict[str, Any]) -> None:
    with pytest.raises(GumihoError) as caught:
        rotary_tables(llama_config(configured(tmp_path, BASE | rope)), 4)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("quantized", "named"),
    [({"quant_method": "gptq", "bits": 4}, "gptq"), ({"quant_method": "awq"}, "awq"), ("odd", "its config.json")],
)
def test_what_is_quantized_already_is_refused(tmp_path: Path, quantized: object, named: str) -> None:
    with pytest.raises(GumihoError, match=rf"quantized already \({named}.*give the checkpoint it was made from"):
        llama_config(configured(tmp_path, BASE | {"quantization_config": quantized}))


def test_vllms_nested_configuration_means_the_same(tmp_path: Path) -> None:
    flat = BASE | ROPES["llama3"][0] | {"head_dim": 32}
    nested = {"architectures": ["GumihoModel"], "model_type": "gumiho", "truncated_vocab_size": 61, "model": flat}
    configs = [
        llama_config(configured(tmp_path / name, config, "drafter"))
        for name, config in (("flat", flat), ("nested", nested))
    ]
    assert llama_shape(configs[0]) == llama_shape(configs[1])
    for mine, theirs in zip(*(rotary_tables(c, 9) for c in configs), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, (4, 2, 16, False, False)),
        ({"num_key_value_heads": None}, (4, 4, 16, False, False)),
        ({"num_key_value_heads": ...}, (4, 4, 16, False, False)),
        ({"head_dim": 40}, (4, 2, 40, False, False)),
        ({"head_dim": None}, (4, 2, 16, False, False)),
        ({"attention_bias": True, "mlp_bias": True}, (4, 2, 16, True, True)),
    ],
    ids=["grouped", "null kv heads", "no kv heads", "explicit head_dim", "null head_dim", "biases"],
)
def test_shapes(tmp_path: Path, extra: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = {k: v for k, v in (BASE | extra).items() if v is not ...}
    shape = llama_shape(llama_config(configured(tmp_path, config)))
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.qkv_bias, shape.mlp_bias) == expected
    assert shape.o_bias == shape.qkv_bias
    assert (shape.vocabulary, shape.hidden, shape.intermediate, shape.layers, shape.eps) == (61, 64, 96, 1, 1e-5)


# --- sources ----------------------------------------------------------------------------------------------------------

RELEASED = [
    ("amd/Gumiho-vicuna-7b", "lmsys/vicuna-7b-v1.3"),
    ("amd/Gumiho-vicuna-13b", "lmsys/vicuna-13b-v1.3"),
    ("amd/Gumiho-llama2-7b", "meta-llama/Llama-2-7b-chat-hf"),
    ("amd/Gumiho-llama2-13b", "meta-llama/Llama-2-13b-chat-hf"),
    ("amd/Gumiho-llama2-70b", "meta-llama/Llama-2-70b-chat-hf"),
    ("amd/Gumiho-llama3-8b", "meta-llama/Meta-Llama-3-8B-Instruct"),
    ("amd/Gumiho-llama3-70b", "meta-llama/Meta-Llama-3-70B-Instruct"),
]


@pytest.mark.parametrize(("drafter", "target"), RELEASED)
def test_released_drafters_know_their_target(drafter: str, target: str) -> None:
    assert target_of(drafter) == target
    assert target_of(f"/models/{drafter.split('/')[1]}/") == target


def test_another_drafter_has_to_be_told() -> None:
    assert len(hub.TARGETS) == len(RELEASED)
    with pytest.raises(GumihoError, match=r"'someone/else' is not one of the released drafters.*--target"):
        target_of("someone/else")


def test_a_folder_is_itself_and_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pair").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(str(tmp_path / "pair")) == tmp_path / "pair"
    assert locate("~/pair") == tmp_path / "pair"


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "~/nowhere", "nowhere", "a/b/c"])
def test_what_is_neither_folder_nor_id(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(GumihoError, match=rf"^'{re.escape(source)}' is neither a folder nor a hub id"):
        locate(source)


def test_a_file_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(GumihoError, match="neither a folder nor a hub id"):
        locate(str(tmp_path / "model.bin"))


_REQUEST = httpx.Request("GET", "https://huggingface.co/api/models/owner/name")
HUB_FAILURES = {
    "offline": (LocalEntryNotFoundError("cannot find the files on disk"), "cannot be reached: name a local folder"),
    "gated": (
        GatedRepoError("403", response=httpx.Response(403, request=_REQUEST)),
        "accept the licence of 'owner/name'",
    ),
    "missing": (
        RepositoryNotFoundError("404", response=httpx.Response(404, request=_REQUEST)),
        "the hub has no model 'owner/name'",
    ),
    "server": (HfHubHTTPError("503 Server Error", response=httpx.Response(503, request=_REQUEST)), "503 Server Error"),
    "disk": (OSError(28, "No space left on device"), "No space left on device"),
    "connection": (httpx.ConnectError("Connection refused"), "Connection refused"),
    "timeout": (httpx.ReadTimeout("The read operation timed out"), "timed out"),
}


def one_sentence(caught: pytest.ExceptionInfo[GumihoError], *parts: str) -> None:
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize("failure", HUB_FAILURES)
@pytest.mark.parametrize("call", ["snapshot_download", "list_repo_files"])
def test_hub_failures_are_one_sentence(
    failure: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, says = HUB_FAILURES[failure]

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    if call == "list_repo_files":
        # The small files came; the hub fails after them.
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(GumihoError) as caught:
        Checkpoint("owner/name", "target")
    if call == "snapshot_download":
        one_sentence(caught, "'owner/name'", says)
    else:
        one_sentence(caught, "'owner/name'")


@pytest.mark.parametrize("source", ["own er/name", "owner/na--me", "owner/.name."])
def test_an_impossible_id_is_one_sentence(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(GumihoError) as caught:
        locate(source)
    one_sentence(caught, source)


@pytest.mark.parametrize(
    ("weights", "unwanted"), [("model.safetensors", "pytorch_model.bin"), ("pytorch_model.bin", None)]
)
def test_only_one_kind_of_weights_is_fetched(
    weights: str, unwanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = ["config.json", "tokenizer.json", "chat_template.jinja", "README.md", "pytorch_model.bin", weights]

    def download(source: str, allow_patterns: list[str], **_: Any) -> str:
        assert source == "owner/name"
        for name in hub:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: hub)
    assert locate("owner/name") == tmp_path
    assert {p.name for p in tmp_path.iterdir()} == set(hub) - {unwanted, "README.md"}


@pytest.mark.parametrize("container", [safetensors_file, bin_file, sharded_safetensors, sharded_bin])
def test_a_cached_hub_model_works_offline(
    tmp_path: Path, drafter_state: State, container: Callable[[Path, State], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real hub cache on disk, and no network: what is there already must not be asked for again."""
    repo, commit = tmp_path / "hub" / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    folder_of(repo / "snapshots" / commit, drafter_state, container)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    same(Checkpoint("owner/name", "drafter"), drafter_state)


def test_nothing_cached_and_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(GumihoError) as caught:
        locate("owner/name")
    one_sentence(caught, "'owner/name' is not in the local hub cache", "name a local folder")
