"""Pairs that do not fit are refused in one sentence; tensors end up in the graph parameters they belong to."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.llama import rotary_tables
from exporter.checkpoints.pair import Pair
from exporter.weights.source import Source
from runtime.errors import GumihoError
from tests.pairs import RandomPair, drafter_config, write_drafter

State = dict[str, Tensor]
V, H, FFN = 61, 16, 24
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
HEADS = 3


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    RandomPair(SMALL, heads=HEADS).write(folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A pair to spoil."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return tmp_path


def open_pair(folder: Path) -> Pair:
    return Pair(Checkpoint(str(folder / "target"), "target"), Checkpoint(str(folder / "drafter"), "drafter"))


def reconfigure(folder: Path, **changes: Any) -> None:
    """Changes config.json; ``...`` removes a key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def rewrite(folder: Path, change: Callable[[State], object]) -> None:
    """Changes the tensors, in whichever file they are."""
    file = folder / "model.safetensors"
    if file.is_file():
        state = load_file(file)
        change(state)
        save_file(state, file)
    else:
        state = torch.load(folder / "pytorch_model.bin")
        change(state)
        torch.save(state, folder / "pytorch_model.bin")


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(GumihoError) as caught:
        open_pair(folder)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


def values(source: Source) -> Tensor:
    return torch.cat([s.reshape(-1) for s in source.slices()]).reshape(source.shape)


# --- pairs that do not fit --------------------------------------------------------------------------------------------


def test_the_pair_fits_as_it_is(folder: Path) -> None:
    pair = open_pair(folder)
    assert (pair.heads, pair.reader.blocks, pair.reader.fc_bias) == (HEADS, 5, True)
    assert (pair.draft_shape.layers, pair.draft_shape.vocabulary, pair.draft_shape.hidden) == (2, V, H)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"hidden_size": 32}, ("hidden_size", "is 16", "expected 32")),
        ({"vocab_size": 67}, ("vocab_size", "is 61", "expected 67")),
    ],
)
def test_another_targets_drafter(folder: Path, tmp_path: Path, other: dict[str, Any], says: tuple[str, ...]) -> None:
    shutil.rmtree(folder / "target")
    RandomPair(SMALL | other).make_target().save_pretrained(folder / "target")
    refused(folder, f"'{folder / 'drafter'}'", f"'{folder / 'target'}'", "does not belong", *says)


def tokenizer(folder: Path, words: list[str]) -> None:
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (["a", "c", "b"], "gives 'c' the id 1, expected 2"),
        (["a", "b", "d"], "gives 'd' the id 2, expected None"),
        (["a", "b"], "gives 'c' the id None, expected 2"),
    ],
    ids=["swapped", "replaced", "shorter"],
)
def test_another_tokenizer(folder: Path, theirs: list[str], says: str) -> None:
    tokenizer(folder / "target", ["a", "b", "c"])
    tokenizer(folder / "drafter", theirs)
    with pytest.raises(GumihoError, match="does not belong") as caught:
        open_pair(folder)
    text = str(caught.value)
    if len(theirs) == 3:
        # More than one token may differ; one of them is named with what it is and what it should be.
        assert any(f"gives '{w}' the id {i}, expected" in text for i, w in enumerate(theirs))
    else:
        assert says in text


def test_the_same_tokenizer_fits_and_one_alone_does(folder: Path) -> None:
    tokenizer(folder / "target", ["a", "b", "c"])
    open_pair(folder)
    tokenizer(folder / "drafter", ["a", "b", "c"])
    open_pair(folder)


def test_a_token_that_the_target_lacks(folder: Path) -> None:
    """But for padding, which no text holds: published targets have it without a row."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(V)}, "w0"))
    words.add_tokens(["<pad>"])
    words.save(str(folder / "target" / "tokenizer.json"))
    open_pair(folder)
    words.add_tokens(["<x>"])
    words.save(str(folder / "target" / "tokenizer.json"))
    refused(
        folder,
        f"the tokenizer in {folder / 'target'} gives '<x>' the id 62, but target '{folder / 'target'}' has a "
        "vocabulary of 61: remove the token from the tokenizer's files, or give the checkpoint that knows it",
    )


def test_a_damaged_tokenizer(folder: Path) -> None:
    for side in ("target", "drafter"):
        tokenizer(folder / side, ["a"])
    (folder / "drafter" / "tokenizer.json").write_text('{"model": ')
    refused(folder, str(folder / "drafter" / "tokenizer.json"), "damaged")


TENSORS = [
    ("target", "model.layers.1.self_attn.k_proj.weight", "layers.1.self_attn.k_proj.weight", [8, H]),
    ("target", "model.embed_tokens.weight", "embed_tokens.weight", [V, H]),
    ("target", "model.norm.weight", "norm.weight", [H]),
    ("target", "lm_head.weight", "lm_head.weight", [V, H]),
    ("drafter", "fc.weight", "fc.weight", [H, 2 * H]),
    ("drafter", "layers.1.input_layernorm.weight", "layers.1.input_layernorm.weight", [H]),
    ("drafter", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight", [H, H]),
    ("drafter", "mlp.1.3.linear.bias", "mlp.1.3.linear.bias", [H]),
    ("drafter", "mlp.2.0.linear.weight", "mlp.2.0.linear.weight", [H, 2 * H]),
]


@pytest.mark.parametrize(("side", "stored", "name", "shape"), TENSORS)
def test_a_missing_tensor(folder: Path, side: str, stored: str, name: str, shape: list[int]) -> None:
    rewrite(folder / side, lambda state: state.pop(stored))
    refused(folder, f"{side} '{folder / side}' lacks the tensor '{name}'", str(shape))


@pytest.mark.parametrize(("side", "stored", "name", "shape"), TENSORS)
def test_a_wrong_shape(folder: Path, side: str, stored: str, name: str, shape: list[int]) -> None:
    found = [*shape[:-1], shape[-1] + 1]
    rewrite(folder / side, lambda state: state.update({stored: torch.zeros(found)}))
    refused(folder, f"{side} '{folder / side}'", f"'{name}' has shape {found}, expected {shape}")


def test_a_transposed_matrix_is_a_wrong_shape(folder: Path) -> None:
    rewrite(folder / "drafter", lambda s: s.update({"fc.weight": s["fc.weight"].T.contiguous()}))
    refused(folder, "'fc.weight' has shape [32, 16], expected [16, 32]")


@pytest.mark.parametrize(
    ("side", "stored", "name"),
    [
        ("target", "model.layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_norm.weight"),
        ("target", "model.layers.2.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"),
        ("target", "model.layers.0.self_attn.q_proj.bias", "layers.0.self_attn.q_proj.bias"),
        ("drafter", "layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight"),
        ("drafter", "norm.weight", "norm.weight"),
        ("drafter", "midlayer.fc.weight", "layers.0.fc.weight"),
    ],
)
def test_a_surplus_tensor(folder: Path, side: str, stored: str, name: str) -> None:
    rewrite(folder / side, lambda state: state.update({stored: torch.ones(H)}))
    refused(
        folder,
        f"{side} '{folder / side}' has the tensor '{name}', which no {side} with its config.json has, so that it is "
        "not supported: ",
    )


def test_a_bias_of_zeros_is_none(folder: Path) -> None:
    rewrite(folder / "target", lambda state: state.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(H)}))
    assert not any(name.endswith("bias") for name in open_pair(folder).target_sources(1))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_safetensors(folder: Path, keep: float) -> None:
    file = folder / "target" / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, int(size * keep) if isinstance(keep, float) else keep % size)
    refused(folder, str(file), "truncated", "download it again")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.97, -1])
def test_a_truncated_bin(folder: Path, keep: float, legacy: bool) -> None:
    file = folder / "drafter" / "pytorch_model.bin"
    if legacy:
        torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    size = file.stat().st_size
    os.truncate(file, int(size * keep) if isinstance(keep, float) else keep % size)
    refused(folder, str(file), "truncated", "download it again")


@pytest.mark.parametrize(("side", "name"), [("target", "model.safetensors"), ("drafter", "pytorch_model.bin")])
def test_a_git_lfs_pointer(folder: Path, side: str, name: str) -> None:
    """What a clone without git-lfs leaves in the place of the weights."""
    (folder / side / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 16060522240\n")
    refused(folder, f"{folder / side / name} is Git LFS's pointer to the file, not the file itself: run git lfs pull")


CONVERT = ": convert it to .safetensors where its origin is trusted, or name another checkpoint"
SAVED: dict[str, tuple[Any, str]] = {
    "a list": ([torch.zeros(2)], "does not hold tensors by name, which is all that is supported" + CONVERT),
    "a fraction": (
        {"x": Fraction(1, 2)},
        "holds an object of fractions.Fraction, which is not supported, as reading it could run code" + CONVERT,
    ),
    "a sparse one": (
        {"x": torch.zeros(2).to_sparse()},
        "holds 'x' as a tensor that is sparse, quantized or without numbers" + CONVERT,
    ),
    "text": (b"hello", "is no file of torch.save: download it again"),
    "nothing": (b"", "is empty: download it again"),
    "a pickle": (pickle.dumps({"x": 1}), "is no file of torch.save: download it again"),
}


@pytest.mark.parametrize("case", SAVED)
def test_a_bin_that_holds_no_tensors_by_name(folder: Path, case: str) -> None:
    (content, says), file = SAVED[case], folder / "drafter" / "pytorch_model.bin"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(GumihoError) as caught:
        open_pair(folder)
    assert str(caught.value) == f"{file} {says}"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("side", "stored", "name"),
    [
        ("target", "model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("drafter", "fc.weight", "fc.weight"),
    ],
)
def test_a_wrong_dtype_is_refused_before_anything_is_written(
    folder: Path, side: str, stored: str, name: str, dtype: torch.dtype
) -> None:
    rewrite(folder / side, lambda state: state.update({stored: state[stored].to(dtype)}))
    refused(
        folder,
        f"{side} '{folder / side}'",
        f"'{name}'",
        f"is {str(dtype).removeprefix('torch.')}, expected float16, bfloat16 or float32: convert it, or name the "
        "checkpoint it was made from",
    )


@pytest.mark.parametrize("side", ["target", "drafter"])
def test_no_configuration(folder: Path, side: str) -> None:
    (folder / side / "config.json").unlink()
    refused(folder, f"{side} '{folder / side}' has no config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '"llama"', "\xff"])
def test_a_damaged_configuration(folder: Path, text: str) -> None:
    (folder / "drafter" / "config.json").write_text(text, "latin-1")
    refused(folder, str(folder / "drafter" / "config.json"), "download it again")


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [..., None, "16", 16.5], ids=["missing", "null", "text", "fraction"])
def test_a_configuration_without_a_size(folder: Path, side: str, key: str, value: Any) -> None:
    reconfigure(folder / side, **{key: value})
    refused(folder, f"{side} '{folder / side}'", f"'{key}'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", "1"),
        ("head_dim", 7),
        ("rms_norm_eps", "x"),
    ],
)
def test_a_configuration_with_an_impossible_value(folder: Path, key: str, value: Any) -> None:
    reconfigure(folder / "target", **{key: value})
    refused(folder, str(folder / "target"))


def test_heads_that_cannot_be_grouped(folder: Path) -> None:
    reconfigure(folder / "drafter", num_attention_heads=4, num_key_value_heads=3)
    refused(folder, f"drafter '{folder / 'drafter'}'", "4 attention heads cannot share 3")


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_next", "gemma", "phi3", ["llama"], None], ids=str)
def test_another_architecture(folder: Path, kind: Any) -> None:
    reconfigure(folder / "target", model_type=kind)
    refused(
        folder,
        f"target '{folder / 'target'}'",
        repr(kind),
        "supports only 'llama', 'mistral', 'qwen2', 'qwen3': name another",
    )


def test_another_activation(folder: Path) -> None:
    reconfigure(folder / "target", hidden_act="gelu")
    refused(folder, f"target '{folder / 'target'}'", "'gelu'", "expected 'silu'")


def test_a_missing_shard(folder: Path) -> None:
    side = folder / "target"
    state = load_file(side / "model.safetensors")
    (side / "model.safetensors").unlink()
    files = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(state)}
    (side / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file(
        {n: t for n, t in state.items() if files[n].startswith("model-00001")},
        side / "model-00001-of-00002.safetensors",
    )
    refused(folder, f"target '{side}' lacks the shard model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    "text", ['{"weight_map": {"a"', '{"weight_map": []}', "{}"], ids=["truncated", "a list", "empty"]
)
def test_a_damaged_index(folder: Path, text: str) -> None:
    (folder / "target" / "model.safetensors.index.json").write_text(text)
    refused(folder, str(folder / "target"))


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "drafter" / "pytorch_model.bin").unlink()
    refused(folder, f"drafter '{folder / 'drafter'}' holds no weights", "model.safetensors", "pytorch_model.bin")


def test_a_drafter_without_serial_layers(folder: Path) -> None:
    rewrite(folder / "drafter", lambda s: [s.pop(n) for n in list(s) if n.startswith("layers.")])
    refused(folder, f"drafter '{folder / 'drafter'}' lacks the tensor 'layers.0.")


def test_a_gap_in_heads_and_in_layers(folder: Path) -> None:
    rewrite(folder / "drafter", lambda s: [s.pop(n) for n in list(s) if n.startswith("mlp.1.")])
    refused(folder, "lacks the tensor 'mlp.1.0.linear.weight'")
    rewrite(folder / "drafter", lambda s: [s.pop(n) for n in list(s) if n.startswith("layers.0.")])
    refused(folder, "lacks the tensor 'layers.0.self_attn.q_proj.weight'")


# --- which tensor goes where ------------------------------------------------------------------------------------------


def test_head_weights_are_stacked_in_order_and_transposed(folder: Path) -> None:
    """Element by element against the stored tensors, so that neither the order nor an axis can be mistaken."""
    state = torch.load(folder / "drafter" / "pytorch_model.bin")
    sources = open_pair(folder).draft_sources(HEADS, 20)
    first, bias = values(sources["heads.first.weight"]), values(sources["heads.first.bias"])
    assert (first.shape, bias.shape) == ((HEADS * H, 2 * H), (HEADS * H,))
    for head in range(HEADS):
        for out in range(H):
            assert torch.equal(first[head * H + out], state[f"mlp.{head}.0.linear.weight"][out])
            assert bias[head * H + out] == state[f"mlp.{head}.0.linear.bias"][out]
    for block in range(5):
        weight, bias = values(sources[f"heads.weight.{block}"]), values(sources[f"heads.bias.{block}"])
        assert (weight.shape, bias.shape) == ((HEADS, H, H), (HEADS, 1, H))
        for head in range(HEADS):
            stored = state[f"mlp.{head}.{block + 1}.linear.weight"]
            for out in range(H):
                for into in range(H):
                    assert weight[head, into, out] == stored[out, into]
            assert torch.equal(bias[head, 0], state[f"mlp.{head}.{block + 1}.linear.bias"])
    assert not any(name.startswith("heads.weight.5") for name in sources)


@pytest.mark.parametrize("count", range(HEADS + 1))
def test_fewer_heads_than_the_checkpoint_has(folder: Path, count: int) -> None:
    state = torch.load(folder / "drafter" / "pytorch_model.bin")
    sources = open_pair(folder).draft_sources(count, 20)
    if count == 0:
        assert not any(name.startswith("heads.") for name in sources)
        return
    expected = torch.cat([state[f"mlp.{head}.0.linear.weight"] for head in range(count)])
    assert torch.equal(values(sources["heads.first.weight"]), expected)
    expected = torch.stack([state[f"mlp.{head}.2.linear.weight"].T for head in range(count)])
    assert torch.equal(values(sources["heads.weight.1"]), expected)


def test_every_other_parameter_is_its_own_tensor(folder: Path) -> None:
    pair = open_pair(folder)
    target = load_file(folder / "target" / "model.safetensors")
    sources = pair.target_sources(20)
    assert set(sources) == {n.removeprefix("model.") for n in target} | {"rotary.cos", "rotary.sin"}
    for name, tensor in target.items():
        assert torch.equal(values(sources[name.removeprefix("model.")]), tensor), name

    drafter = torch.load(folder / "drafter" / "pytorch_model.bin")
    sources = pair.draft_sources(HEADS, 20)
    for name, tensor in drafter.items():
        if not name.startswith("mlp."):
            assert torch.equal(values(sources[name]), tensor), name
    assert torch.equal(values(sources["lm_head.weight"]), target["lm_head.weight"])


def test_sources_are_the_parameters_of_the_graphs(folder: Path) -> None:
    """Every parameter of every module has its source, in its shape."""
    from graphs.tree import TreeConfig

    pair = open_pair(folder)
    modules = pair.modules(TreeConfig(8, 2, HEADS, 3, 3, 2), 20, 22)
    places = {"target": pair.target_sources(22), "draft": pair.draft_sources(HEADS, 22)}
    places |= {"extend": places["draft"], "shared": places["target"]}
    for graph, module in modules.items():
        for name, parameter in module.named_parameters():
            assert places[graph][name].shape == tuple(parameter.shape), (graph, name)


def test_big_tensors_are_read_in_slices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.checkpoints.checkpoint._SLICE_ELEMENTS", 7 * H)
    pair = open_pair(folder)
    source = pair.target_sources(20)["embed_tokens.weight"]
    assert [len(s) for s in source.slices()] == [7] * 8 + [5]
    expected = load_file(folder / "target" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(values(source), expected)


def test_target_and_drafter_have_their_own_rotary_tables(folder: Path) -> None:
    reconfigure(folder / "drafter", rope_theta=500.0)
    pair = open_pair(folder)
    ours, theirs = pair.target_sources(20), pair.draft_sources(HEADS, 20)
    assert torch.equal(values(ours["rotary.cos"]), rotary_tables(pair.target_config, 20)[0])
    assert torch.equal(values(theirs["rotary.cos"]), rotary_tables(pair.draft_config, 20)[0])
    assert not torch.equal(values(ours["rotary.cos"]), values(theirs["rotary.cos"]))
    assert ours["rotary.cos"].fixed == torch.float32
    assert theirs["rotary.sin"].fixed == torch.float32


@pytest.mark.parametrize("layers", [1, 3])
def test_other_than_two_layers(tmp_path: Path, layers: int) -> None:
    """The tensors count, whatever the JSON says."""
    RandomPair(SMALL, layers=layers, heads=1).write(tmp_path)
    reconfigure(tmp_path / "drafter", num_hidden_layers=2)
    pair = open_pair(tmp_path)
    assert pair.draft_shape.layers == layers
    names = {name for name in pair.draft_sources(1, 20) if name.endswith("q_proj.weight")}
    assert names == {f"layers.{i}.self_attn.q_proj.weight" for i in range(layers)}


def test_a_drafter_without_embedding_uses_the_targets(folder: Path) -> None:
    rewrite(folder / "drafter", lambda state: state.pop("embed_tokens.weight"))
    sources = open_pair(folder).draft_sources(HEADS, 20)
    expected = load_file(folder / "target" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(values(sources["embed_tokens.weight"]), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_the_fc_bias_is_where_the_tensor_is(tmp_path: Path, bias: bool) -> None:
    """The official JSONs say ``"bias": false`` either way."""
    RandomPair(SMALL, heads=1, fc_bias=bias).write(tmp_path)
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["bias"] is False
    pair = open_pair(tmp_path)
    assert pair.reader.fc_bias is bias
    assert ("fc.bias" in pair.draft_sources(1, 20)) is bias


def test_a_drafter_without_heads(tmp_path: Path) -> None:
    RandomPair(SMALL, heads=0).write(tmp_path)
    pair = open_pair(tmp_path)
    assert pair.heads == 0
    assert not any(name.startswith("heads.") for name in pair.draft_sources(0, 20))


@pytest.mark.parametrize("copy", [False, True], ids=["no lm_head", "a copy of it"])
def test_tied_embeddings(tmp_path: Path, copy: bool) -> None:
    RandomPair(SMALL | {"tie_word_embeddings": True}, heads=1).write(tmp_path)
    file = tmp_path / "target" / "model.safetensors"
    embedding = load_file(file)["model.embed_tokens.weight"]
    assert "lm_head.weight" not in load_file(file)
    if copy:
        rewrite(tmp_path / "target", lambda s: s.update({"lm_head.weight": embedding.clone()}))
    pair = open_pair(tmp_path)
    for sources in (pair.target_sources(20), pair.draft_sources(1, 20)):
        assert torch.equal(values(sources["lm_head.weight"]), embedding)


@pytest.mark.parametrize(
    "target",
    [
        {"head_dim": 24},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"num_key_value_heads": 2},
        {"num_hidden_layers": 1},
    ],
    ids=str,
)
def test_targets_of_other_shapes(tmp_path: Path, target: dict[str, Any]) -> None:
    RandomPair(SMALL | target, heads=1).write(tmp_path)
    stored = load_file(tmp_path / "target" / "model.safetensors")
    sources = open_pair(tmp_path).target_sources(20)
    assert {n.removeprefix("model.") for n in stored} == set(sources) - {"rotary.cos", "rotary.sin"}
    for name, tensor in stored.items():
        assert torch.equal(values(sources[name.removeprefix("model.")]), tensor)


def test_a_vllm_folder_makes_the_same_sources(folder: Path) -> None:
    expected = {n: values(s) for n, s in open_pair(folder).draft_sources(HEADS, 20).items()}
    state = torch.load(folder / "drafter" / "pytorch_model.bin")
    shutil.rmtree(folder / "drafter")
    config = RandomPair(SMALL).config()
    write_drafter(
        folder / "drafter",
        {f"model.{n}": t for n, t in state.items()} | {"lm_head.weight": torch.zeros(V, H)},
        {"model_type": "gumiho", "model": drafter_config(config, 2)},
        safetensors=True,
    )
    found = {n: values(s) for n, s in open_pair(folder).draft_sources(HEADS, 20).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
