"""The vLLM layout: its loader's rules, written down again here, take every tensor once, and the printed lines are
true."""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from exporter import cli
from exporter.checkpoints import vllm
from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.llama import rotary_tables
from exporter.checkpoints.pair import Pair
from exporter.staging import staged
from runtime.errors import GumihoError
from tests.limits import full_disk
from tests.pairs import RandomPair, drafter_config, write_drafter
from tests.test_checkpoint import CONTAINERS, DRAFTER_NAMES, bin_file, safetensors_file

State = dict[str, Tensor]
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
}
Change = Callable[[State, dict[str, Any]], Any]


def unchanged(state: State, config: dict[str, Any]) -> None:
    pass


def made(
    folder: Path, pair: RandomPair, change: Change = unchanged, container: Callable[[Path, State], None] = bin_file
) -> tuple[Pair, State]:
    """A pair on disk whose drafter's tensors and JSON may have been changed, and its tensors by their official
    names."""
    target = pair.make_target()
    target.save_pretrained(folder / "target")
    state, config = pair.make_drafter(target), drafter_config(target.config, pair.layers)
    official = dict(state)
    change(state, config)
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text(json.dumps(config))
    container(folder / "drafter", state)
    return opened(folder), official


def opened(folder: Path, drafter: Path | None = None) -> Pair:
    return Pair(Checkpoint(str(folder / "target"), "target"), Checkpoint(str(drafter or folder / "drafter"), "drafter"))


def written(pair: Pair, folder: Path, dtype: torch.dtype | None = None) -> Path:
    folder.mkdir(parents=True)
    size = vllm.write(pair, folder, dtype)
    assert size == sum(p.stat().st_size for p in folder.iterdir())
    assert size <= vllm.size(pair, dtype) <= size + (1 << 20)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, State]:
    return made(tmp_path_factory.mktemp("small"), RandomPair(SMALL, heads=2))


# --- vLLM's rules, again ----------------------------------------------------------------------------------------------


def mirrored(file: Path) -> SimpleNamespace:
    """A configuration as vLLM sees it: the nested one, filled up with transformers' defaults, below the outer one."""
    outer = json.loads(file.read_text())
    assert outer["model_type"] == "gumiho"
    inner = LlamaConfig(
        **{k: v for k, v in outer["model"].items() if k not in ("model_type", "architectures")}
    ).to_dict()
    assert outer["model"]["model_type"] == "llama"
    return SimpleNamespace(**{**{k: v for k, v in inner.items() if k not in ("model_type", "architectures")}, **outer})


MERGED = {
    ".q_proj": ".qkv_proj",
    ".k_proj": ".qkv_proj",
    ".v_proj": ".qkv_proj",
    ".gate_proj": ".gate_up_proj",
    ".up_proj": ".gate_up_proj",
}


class Loaded:
    """A drafter's parameters, filled from a folder as vLLM's model fills them. Fails where vLLM would, and where it
    would not."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.config = c = mirrored(folder / "config.json")
        self.own_embedding = self.own_lm_head = False
        assert c.architectures == ["GumihoLlamaForCausalLM"]
        h, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        biased = c.attention_bias or getattr(c, "bias", False)
        # Each parameter, and what it is put together from: the checkpoint's name for a part -> its shape.
        self.expected: dict[str, dict[str, tuple[int, ...]]] = {}

        def linear(module: str, parts: dict[str, tuple[int, int]], bias: bool) -> None:
            self.expected[f"{module}.weight"] = {f"{part}.weight": shape for part, shape in parts.items()}
            if bias:
                self.expected[f"{module}.bias"] = {f"{part}.bias": shape[:1] for part, shape in parts.items()}

        linear("model.embed_tokens", {"model.embed_tokens": (c.vocab_size, h)}, False)
        linear("model.fc", {"model.fc": (h, 2 * h)}, c.gumiho_fc_bias)
        for i in range(c.num_hidden_layers):
            p = f"model.layers.{i}"
            attention, mlp, ffn = f"{p}.self_attn", f"{p}.mlp", c.intermediate_size
            parts = {f"{attention}.q_proj": (q, h), f"{attention}.k_proj": (kv, h), f"{attention}.v_proj": (kv, h)}
            linear(f"{attention}.qkv_proj", parts, biased)
            linear(f"{attention}.o_proj", {f"{attention}.o_proj": (h, q)}, biased)
            linear(f"{mlp}.gate_up_proj", {f"{mlp}.gate_proj": (ffn, h), f"{mlp}.up_proj": (ffn, h)}, c.mlp_bias)
            linear(f"{mlp}.down_proj", {f"{mlp}.down_proj": (h, ffn)}, c.mlp_bias)
            for norm in ("post_attention_layernorm", *["input_layernorm"] * (i > 0)):
                self.expected[f"{p}.{norm}.weight"] = {f"{p}.{norm}.weight": (h,)}
        for head in range(max(0, tokens - 2)):
            for block in range(6):
                linear(f"mlp.{head}.{block}.linear", {f"mlp.{head}.{block}.linear": (h, h if block else 2 * h)}, True)
        linear("lm_head", {"lm_head": (c.vocab_size, h)}, False)
        self.heads = max(0, tokens - 2)
        self.state: State = {}
        self.skipped: list[str] = []
        for name, tensor in load_file(folder / "model.safetensors").items():
            self._take(name, tensor)

    def _take(self, name: str, tensor: Tensor) -> None:
        inner = name.removeprefix("model.").removeprefix("model.")
        if name == "token_map" or (name.startswith("mlp.") and int(name.split(".")[1]) >= self.heads):
            self.skipped.append(name)
            return
        outside = name.startswith(("mlp.", "lm_head.", "model.lm_head."))
        path = name.removeprefix("model.") if outside else f"model.{inner}"
        self.own_lm_head |= path.startswith("lm_head.")
        # under a bare name it is not noticed
        self.own_embedding |= name.startswith("model.") and "embed_tokens" in name
        module = path
        for part, whole in MERGED.items():
            module = module if outside else module.replace(part, whole)
        if module.endswith(".bias") and module not in self.expected and not outside:
            self.skipped.append(name)
            return
        assert self.expected[module][path] == tuple(tensor.shape), name
        assert path not in self.state, f"{name} twice"
        self.state[path] = tensor

    def strict(self) -> State:
        """The parts by their official names: all that were expected, save what the target lends, and none skipped."""
        assert self.skipped == []
        wanted = {part for parts in self.expected.values() for part in parts}
        own = {"lm_head.weight": self.own_lm_head, "model.embed_tokens.weight": self.own_embedding}
        assert set(self.state) == {part for part in wanted if own.get(part, True)}
        return {name.removeprefix("model."): tensor for name, tensor in self.state.items()}


def served(pair: Pair, folder: Path) -> Loaded:
    """Loaded with as many tokens as the printed lines ask for."""
    return Loaded(folder, spoken(pair, folder)["num_speculative_tokens"])


def spoken(pair: Pair, out: Path) -> dict[str, Any]:
    """The speculative configuration, which both printed lines must agree on."""
    python, shell, *notes = vllm.lines(pair, out)
    call = ast.parse(python, mode="eval").body
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.func) == "LLM"
    keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    assert keywords.keys() == {"model", "speculative_config"}
    words = shlex.split(shell)
    assert words[:2] == ["vllm", "serve"]
    assert words[2] == keywords["model"]
    assert words[3] == "--speculative-config"
    assert json.loads(words[4]) == keywords["speculative_config"]
    assert len(words) == 5
    assert all(note.startswith("note: ") for note in notes)
    assert not any("\n" in line for line in (python, shell, *notes))
    return {"target": keywords["model"], **keywords["speculative_config"]}


def equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def round_trip(pair: Pair, state: State, folder: Path) -> Loaded:
    """Written, taken by vLLM's rules, and read back by our own: the same tensors each time."""
    written(pair, folder)
    loaded = served(pair, folder)
    equal(loaded.strict(), state)
    back = opened(Path(pair.target.source).parent, folder)
    equal({name: back.drafter.read(name) for name in back.drafter.names()}, state)
    for what in ("heads", "blocks", "fc_bias", "shape"):
        assert getattr(back.reader, what) == getattr(pair.reader, what), what
    for mine, theirs in zip(rotary_tables(back.draft_config, 200), rotary_tables(pair.draft_config, 200), strict=True):
        assert torch.equal(mine, theirs)
    return loaded


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_makes_the_round_trip(tmp_path: Path, container: Callable[[Path, State], None]) -> None:
    round_trip(*made(tmp_path, RandomPair(SMALL, heads=2), container=container), tmp_path / "out")


@pytest.mark.parametrize("spelling", DRAFTER_NAMES)
def test_every_spelling_makes_the_round_trip(tmp_path: Path, spelling: str) -> None:
    def respell(state: State, config: dict[str, Any]) -> None:
        tensors = {DRAFTER_NAMES[spelling](name): tensor for name, tensor in state.items()}
        state.clear()
        state.update(tensors)

    round_trip(*made(tmp_path, RandomPair(SMALL, heads=1), respell, safetensors_file), tmp_path / "out")


@pytest.mark.parametrize("said", [True, False, None], ids=["JSON says yes", "JSON says no", "JSON says nothing"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_bias_is_where_the_tensors_have_it(tmp_path: Path, bias: bool, said: bool | None) -> None:
    def say(state: State, config: dict[str, Any]) -> None:
        config.pop("bias")
        config.update({} if said is None else {"bias": said, "gumiho_fc_bias": said})

    loaded = round_trip(*made(tmp_path, RandomPair(SMALL, heads=1, fc_bias=bias), say), tmp_path / "out")
    assert ("model.fc.bias" in loaded.expected) == bias
    assert "model.layers.0.self_attn.qkv_proj.bias" not in loaded.expected


@pytest.mark.parametrize(
    ("layers", "heads"),
    [
        (1, 0),
        (2, 0),
        (2, 5),
        (1, 2),
        (3, 1),
        *(pytest.param(2, heads, marks=pytest.mark.exhaustive) for heads in (1, 7)),
    ],
)
def test_other_numbers_of_layers_and_heads(tmp_path: Path, layers: int, heads: int) -> None:
    def lie(state: State, config: dict[str, Any]) -> None:
        config["num_hidden_layers"] = 2

    pair, state = made(tmp_path, RandomPair(SMALL, layers=layers, heads=heads), lie)
    loaded = round_trip(pair, state, tmp_path / "out")
    assert (loaded.config.num_hidden_layers, loaded.heads) == (layers, heads)
    assert spoken(pair, tmp_path / "out")["num_speculative_tokens"] == 2 + heads


def test_fewer_tokens_leave_heads_unused_and_more_would_leave_heads_unfilled(
    small: tuple[Pair, State], tmp_path: Path
) -> None:
    """Which is why the printed number matters, and shows that the loader here notices."""
    written(small[0], tmp_path / "out")
    assert {name.split(".")[1] for name in Loaded(tmp_path / "out", 3).skipped} == {"1"}
    with pytest.raises(AssertionError):
        Loaded(tmp_path / "out", 5).strict()


def test_the_loader_here_notices_a_bias_that_is_not_declared(small: tuple[Pair, State], tmp_path: Path) -> None:
    file = written(small[0], tmp_path / "out") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"gumiho_fc_bias": False}))
    assert served(small[0], tmp_path / "out").skipped == ["model.fc.bias"]


def test_heads_that_vllm_does_not_know_are_refused(tmp_path: Path) -> None:
    def shorten(state: State, config: dict[str, Any]) -> None:
        for name in [n for n in state if re.match(r"mlp\.\d+\.5\.", n)]:
            del state[name]

    pair, _ = made(tmp_path, RandomPair(SMALL, heads=2), shorten)
    (tmp_path / "out").mkdir()
    for call in (lambda: vllm.size(pair), lambda: vllm.write(pair, tmp_path / "out")):
        with pytest.raises(GumihoError, match=r"heads of 4 residual blocks, but vLLM supports only 5: .*--backend$"):
            call()
    assert not list((tmp_path / "out").iterdir())


def test_biases_in_layers_and_a_head_size_of_its_own(tmp_path: Path) -> None:
    shapes = {"q_proj": 24, "k_proj": 12, "v_proj": 12, "o_proj": 16, "gate_proj": 24, "up_proj": 24, "down_proj": 16}

    def add_biases(state: State, config: dict[str, Any]) -> None:
        config.update(attention_bias=True, mlp_bias=True)
        for name in [n for n in state if n.endswith("_proj.weight")]:
            state[name.replace(".weight", ".bias")] = torch.randn(shapes[name.split(".")[-2]])

    biased = SMALL | {"head_dim": 12, "attention_bias": True, "mlp_bias": True}
    pair, _ = made(tmp_path, RandomPair(biased, heads=1), add_biases)
    loaded = round_trip(pair, torch.load(tmp_path / "drafter" / "pytorch_model.bin"), tmp_path / "out")
    assert "model.layers.1.self_attn.qkv_proj.bias" in loaded.expected


def test_an_embedding_of_its_own_counts_as_its_own(tmp_path: Path) -> None:
    pair, state = made(tmp_path, RandomPair(SMALL, heads=1), lambda state, _: state["embed_tokens.weight"].mul_(2))
    assert not pair.embedding_shared
    assert round_trip(pair, state, tmp_path / "out").own_embedding


def test_an_embedding_that_is_missing_stays_the_targets(tmp_path: Path) -> None:
    pair, state = made(tmp_path, RandomPair(SMALL, heads=1), lambda state, _: state.pop("embed_tokens.weight"))
    loaded = round_trip(pair, {n: t for n, t in state.items() if n != "embed_tokens.weight"}, tmp_path / "out")
    assert not loaded.own_embedding


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_an_lm_head_and_a_token_map_are_kept(tmp_path: Path, prefix: str, kind: torch.dtype) -> None:
    own = {"lm_head.weight": torch.randn(61, 16).half(), "token_map": torch.arange(61, dtype=kind)}
    pair, state = made(
        tmp_path, RandomPair(SMALL, heads=1), lambda state, _: state.update({f"{prefix}{n}": t for n, t in own.items()})
    )
    loaded = served(pair, written(pair, tmp_path / "out"))
    assert loaded.own_lm_head
    assert loaded.skipped == ["token_map"]
    equal({n: load_file(tmp_path / "out" / "model.safetensors")[n] for n in own}, own)
    equal(loaded.state, {vllm._vllm_name(n): t for n, t in (state | own).items() if n != "token_map"})
    assert not any("lm_head" in note for note in vllm.lines(pair, tmp_path / "out")[2:])
    # not in ours
    assert torch.equal(pair.draft_sources(1, 8)["lm_head.weight"].whole(), pair.target.read("lm_head.weight"))


def test_a_trimmed_lm_head_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    own = {"lm_head.weight": torch.randn(20, 16), "token_map": torch.arange(20)}
    pair, state = made(tmp_path, RandomPair(SMALL, heads=1), lambda state, _: state.update(own))
    loaded = served(pair, written(pair, tmp_path / "out"))
    assert not loaded.own_lm_head
    assert loaded.skipped == ["token_map"]
    assert set(loaded.state) == {vllm._vllm_name(n) for n in state}
    assert any("[20, 16]" in note and "[61, 16]" in note for note in vllm.lines(pair, tmp_path / "out")[2:])


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ("lm_head.weight", torch.zeros(61, 16, dtype=torch.float64), "float64"),
        ("token_map", torch.zeros(61), "float32"),
    ],
)
def test_what_vllm_could_not_load_is_one_sentence(tmp_path: Path, name: str, tensor: Tensor, found: str) -> None:
    if name == "token_map":
        tensor = tensor.bool()
        found = "bool"
    pair, _ = made(tmp_path, RandomPair(SMALL, heads=1), lambda state, _: state.update({name: tensor}))
    with pytest.raises(GumihoError, match=rf"tensor '{name}' is (torch\.)?{found}, expected ") as caught:
        vllm.size(pair)
    assert "\n" not in str(caught.value)


# --- dtypes and the file ----------------------------------------------------------------------------------------------


def mix(state: State, config: dict[str, Any]) -> None:
    """Three dtypes, and sizes that leave the next tensor badly aligned unless the order is chosen."""
    for i, name in enumerate(sorted(state)):
        state[name] = state[name].to((torch.float32, torch.float16, torch.bfloat16)[i % 3])
    state["token_map"] = torch.arange(61, dtype=torch.int32)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, State]:
    odd = {"vocab_size": 67, "hidden_size": 15, "intermediate_size": 25, "num_attention_heads": 3, "head_dim": 4}
    pair, _ = made(tmp_path_factory.mktemp("mixed"), RandomPair(SMALL | odd, heads=1), mix)
    return pair, torch.load(pair.drafter.folder / "pytorch_model.bin")


def test_dtypes_stay_as_they_are_stored(mixed: tuple[Pair, State], tmp_path: Path) -> None:
    pair, state = mixed
    written(pair, tmp_path / "out")
    equal(load_file(tmp_path / "out" / "model.safetensors"), {vllm._vllm_name(n): t for n, t in state.items()})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_another_dtype_when_asked_for(mixed: tuple[Pair, State], tmp_path: Path, dtype: torch.dtype) -> None:
    pair, state = mixed
    written(pair, tmp_path / "out", dtype)
    expected = {vllm._vllm_name(n): t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}
    equal(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_a_number_that_does_not_fit_is_not_made_infinite(tmp_path: Path) -> None:
    pair, state = made(tmp_path, RandomPair(SMALL, heads=1), lambda state, _: state["fc.weight"][3].fill_(7e4))
    (tmp_path / "out").mkdir()
    with pytest.raises(GumihoError, match=r"'fc\.weight' holds a value too large for fp16"):
        vllm.write(pair, tmp_path / "out", torch.float16)
    round_trip(pair, state, tmp_path / "kept")


def test_the_file_has_no_holes_and_every_tensor_is_aligned(mixed: tuple[Pair, State], tmp_path: Path) -> None:
    pair, state = mixed
    data = (written(pair, tmp_path / "out") / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__")["format"] == "pt"
    assert header.keys() == {vllm._vllm_name(n) for n in state}
    end = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert start == end, name
        assert start % {"F32": 4, "F16": 2, "BF16": 2, "I32": 4}[entry["dtype"]] == 0, name
        end = stop
    assert end == len(data) - 8 - length


def test_two_exports_make_the_same_bytes(small: tuple[Pair, State], tmp_path: Path) -> None:
    a, b = (written(small[0], tmp_path / name) for name in ("a", "b"))
    assert {p.name: p.read_bytes() for p in a.iterdir()} == {p.name: p.read_bytes() for p in b.iterdir()}


@pytest.mark.parametrize("container", [bin_file, safetensors_file])
def test_no_more_than_a_slice_is_read_at_once(
    tmp_path: Path, container: Callable[[Path, State], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, state = made(tmp_path, RandomPair(SMALL, heads=1), container=container)
    reads, read = [], Checkpoint.read

    def counted(self: Checkpoint, *args: Any) -> Tensor:
        tensor = read(self, *args)
        reads.append(tensor.numel())
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(vllm, "_SLICE_ELEMENTS", 100)
        patch.setattr(Checkpoint, "read", counted)
        written(pair, tmp_path / "out")
    assert max(reads) <= 100
    assert sum(reads) == sum(t.numel() for t in state.values())
    equal(served(pair, tmp_path / "out").strict(), state)


# --- config.json ------------------------------------------------------------------------------------------------------

BARE_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = BARE_LLAMA3 | {"original_max_position_embeddings": 64}
ROPES: list[dict[str, Any]] = [
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **BARE_LLAMA3}},
]


@pytest.mark.parametrize("rope", ROPES, ids=["plain", "linear", "llama3", "new spelling", "length from the drafter's"])
def test_the_rotary_embedding_is_the_drafters_in_its_old_spelling(tmp_path: Path, rope: dict[str, Any]) -> None:
    def turn(state: State, config: dict[str, Any]) -> None:
        del config["rope_theta"], config["rope_scaling"]
        config.update(rope)

    loaded = round_trip(*made(tmp_path, RandomPair(SMALL, heads=1), turn), tmp_path / "out")
    inner = json.loads((tmp_path / "out" / "config.json").read_text())["model"]
    assert inner["rope_theta"] == loaded.config.rope_parameters["rope_theta"] == 5e5
    assert "rope_parameters" not in inner
    assert "type" not in (inner["rope_scaling"] or {})


def test_drafting_ends_where_the_target_ends(small: tuple[Pair, State], tmp_path: Path) -> None:
    """The drafter's JSON says 2048, its training length; vLLM would draft no further, or need more than the target
    has."""
    assert mirrored(written(small[0], tmp_path / "out") / "config.json").max_position_embeddings == 128


def test_nothing_that_would_mislead_vllm_is_carried_over(tmp_path: Path) -> None:
    def mislead(state: State, config: dict[str, Any]) -> None:
        config.update(bias=True, add_para_norm=True, logit_scale=0.5, qkv_bias=True, is_causal=False, n_predict=3)
        config.update(tie_word_embeddings=True, quantization_config={"quant_method": "fp8"}, torch_dtype="float32")

    pair, state = made(tmp_path, RandomPair(SMALL, heads=1), mislead)
    config = vars(round_trip(pair, state, tmp_path / "out").config)
    for name in ("bias", "add_para_norm", "logit_scale", "qkv_bias", "is_causal", "n_predict", "quantization_config"):
        assert name not in config, name
    assert config["tie_word_embeddings"] is False
    assert config["truncated_vocab_size"] == config["vocab_size"] == 61


# --- the printed lines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "v1.3", "two words", "it's", 'a"b', "$HOME", "ünï", "back\\slash", "{}", "🦊"])
def test_the_lines_name_the_folders_whatever_they_are_called(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absolute: a relative name with a dot would be a Python class for vLLM, and the user may be elsewhere by then."""
    (tmp_path / name).mkdir()
    made(tmp_path / name, RandomPair(SMALL, heads=2))
    monkeypatch.chdir(tmp_path)
    pair = Pair(Checkpoint(f"./{name}/target", "target"), Checkpoint(f"./{name}/drafter", "drafter"))
    assert spoken(pair, Path(name)) == {
        "target": str(tmp_path / name / "target"),
        "method": "eagle",
        "model": str(tmp_path / name),
        "num_speculative_tokens": 4,
    }


def test_a_target_from_the_hub_keeps_its_name(
    small: tuple[Pair, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small[0].target, "source", "meta-llama/Meta-Llama-3-8B-Instruct")
    assert spoken(small[0], tmp_path)["target"] == "meta-llama/Meta-Llama-3-8B-Instruct"


# --- whole or absent --------------------------------------------------------------------------------------------------


class Boom(Exception):
    """Something nobody thought of."""


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()  # until it arrives


def boom() -> None:
    raise Boom


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def export(pair: Pair, out: Path, overwrite: bool = False) -> None:
    with staged(out, overwrite, vllm.is_export) as folder:
        vllm.write(pair, folder)


@pytest.fixture(params=[False, True], ids=["nothing there", "an older export there"])
def out(request: pytest.FixtureRequest, small: tuple[Pair, State], tmp_path: Path) -> Path:
    if request.param:
        export(small[0], tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("call", "strike"),
    [
        (1, interrupt),
        (20, terminate),
        (60, boom),
        *(
            pytest.param(call, strike, marks=pytest.mark.exhaustive)
            for call, strike in (
                (1, terminate),
                (1, boom),
                (20, interrupt),
                (20, boom),
                (60, interrupt),
                (60, terminate),
            )
        ),
    ],
)
def test_a_failure_leaves_what_was_there(
    small: tuple[Pair, State], out: Path, strike: Callable[[], None], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, calls, read = snapshot(out.parent), [], Checkpoint.read

    def failing(self: Checkpoint, *args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == call:
            strike()
        return read(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "read", failing)
        with pytest.raises((KeyboardInterrupt, Boom)):
            export(small[0], out, overwrite=True)
    assert len(calls) == call
    assert snapshot(out.parent) == before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    "room", [pytest.param(100, marks=pytest.mark.exhaustive), 2000, pytest.param(30000, marks=pytest.mark.exhaustive)]
)
def test_a_full_disk_leaves_what_was_there(small: tuple[Pair, State], out: Path, room: int) -> None:
    before = snapshot(out.parent)
    with pytest.raises(GumihoError, match=rf"^writing '{re.escape(str(out))}' failed"), full_disk(room):
        export(small[0], out, overwrite=True)
    assert snapshot(out.parent) == before


# --- what may be replaced ---------------------------------------------------------------------------------------------


def test_an_export_is_replaced_when_asked(small: tuple[Pair, State], mixed: tuple[Pair, State], tmp_path: Path) -> None:
    export(small[0], tmp_path / "out")
    before = snapshot(tmp_path)
    with pytest.raises(GumihoError, match="--overwrite"):
        export(mixed[0], tmp_path / "out")
    assert snapshot(tmp_path) == before
    export(mixed[0], tmp_path / "out", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "token_map" in set(file.keys())


def test_an_export_may_take_the_place_of_the_drafter_it_is_made_from(small: tuple[Pair, State], tmp_path: Path) -> None:
    export(small[0], tmp_path / "out")
    before = snapshot(tmp_path)
    export(opened(small[0].target.folder.parent, tmp_path / "out"), tmp_path / "out", overwrite=True)
    assert snapshot(tmp_path) == before


def spoil_readme(folder: Path) -> None:
    (folder / "README.md").write_text("dear to somebody")


def spoil_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"dear to somebody")


def spoil_mark(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def spoil_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("dear to somebody")


def spoil_bundle(folder: Path) -> None:
    (folder / "gumiho.json").write_text("{}")


@pytest.mark.parametrize("spoil", [spoil_readme, spoil_weights, spoil_mark, spoil_folder, spoil_bundle])
def test_anything_else_is_never_replaced(
    small: tuple[Pair, State], tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    export(small[0], tmp_path / "out")
    spoil(tmp_path / "out")
    assert not vllm.is_export(tmp_path / "out")
    before = snapshot(tmp_path)
    with pytest.raises(GumihoError, match=rf"'{re.escape(str(tmp_path / 'out'))}'.*--out"):
        export(small[0], tmp_path / "out", overwrite=True)
    assert snapshot(tmp_path) == before


def test_released_drafters_are_no_exports(small: tuple[Pair, State], tmp_path: Path) -> None:
    state = RandomPair(SMALL, heads=1).make_drafter(RandomPair(SMALL).make_target())
    folder = write_drafter(tmp_path / "drafter", state, drafter_config(RandomPair(SMALL).config(), 2), safetensors=True)
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors"}
    for other in (folder, small[0].drafter.folder, tmp_path / "nowhere"):
        assert not vllm.is_export(other)


# --- gumiho-export --backend vllm -------------------------------------------------------------------------------------


def command(folder: Path, out: Path, *options: str) -> int:
    argv = [
        "--ckpt",
        str(folder / "drafter"),
        "--target",
        str(folder / "target"),
        "--out",
        str(out),
        "--backend",
        "vllm",
    ]
    return cli.main([*argv, *options])


def test_the_command_writes_and_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RandomPair(heads=2).write(tmp_path / "pair")
    assert command(tmp_path / "pair", tmp_path / "out", "--dry-run") == 0
    assert not (tmp_path / "out").exists()
    assert command(tmp_path / "pair", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "LLM(model=" in out
    assert "vllm serve" in out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert command(tmp_path / "pair", tmp_path / "out") == 1
    assert "--overwrite" in capsys.readouterr().err
    assert command(tmp_path / "pair", tmp_path / "out", "--overwrite") == 0
    (tmp_path / "out/README.md").write_text("somebody's")
    assert command(tmp_path / "pair", tmp_path / "out", "--overwrite") == 1
    assert "was not written by this command" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    "options", [("--rows", "8"), ("--capacity", "64"), ("--validate",), ("--device", "ref"), ("--heads", "1")]
)
def test_options_of_bundles_are_refused(
    tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, tmp_path / "out", *options) == 1
    assert f"{options[0]} means nothing to --backend vllm" in capsys.readouterr().err


def test_vllm_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path, tmp_path / "out", "--backend", "vllm", "cpu") == 1
    assert "in a run of their own" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--weights", "int4"), ("--other-weights", "none"), ("--calibrate", "text.txt")])
def test_options_of_quantizing_are_refused(
    tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, tmp_path / "out", *options) == 1
    error = capsys.readouterr().err
    assert options[0] in error
    assert "mean nothing to --backend vllm" in error
