"""Codes of a target's checkpoint go over code for code: against the gguf package's parser, and transformers over the
numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize
from torch import Tensor
from transformers import LlamaForCausalLM

from exporter import cli, options
from exporter.backends.specs import BACKENDS, UNSIGNED
from exporter.recipe.resolve import recipe_of
from exporter.weights.packer import Packer
from exporter.weights.quantize import scale_of
from exporter.weights.source import Location
from exporter.writing.bundle import _pack
from graphs.dialects.quantization import JOINED, dequantize
from runtime import load
from runtime.bundle.reader import Bundle
from tests import gguf_files
from tests.pairs import RandomPair
from tests.rounding import Rounding

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "num_hidden_layers": 3,
}
KINDS: dict[str, dict[str, Any]] = {"Q8_0": {}, "Q4_0": {}, "mix": {}, "tied": {"tie_word_embeddings": True}}


def written(kind: str, folder: Path) -> tuple[Path, LlamaForCausalLM]:
    """A GGUF file, and transformers' model over the numbers that it stands for."""
    model = RandomPair({**SIZES, **KINDS[kind]}, seed=3).make_target()
    raw = dict[str, tuple[np.ndarray, str]]()
    if kind == "mix":  # as llama.cpp's mixes have it: other types for lm_head and for some layers
        for name, own in (
            ("lm_head.weight", "Q5_0"),
            ("model.layers.1.mlp.down_proj.weight", "Q4_1"),
            ("model.layers.2.self_attn.v_proj.weight", "Q8_0"),
            ("model.embed_tokens.weight", "Q8_0"),
        ):
            raw[name] = quantize(model.state_dict()[name].numpy(), GGMLQuantizationType[own]), own
    base = {"mix": "Q4_0", "tied": "Q8_0"}.get(kind, kind)
    file = gguf_files.write(model, folder / "m.gguf", base, raw=raw)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own_kind = GGMLQuantizationType[raw[name][1] if name in raw else base]
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(gguf_dequantize(quantize(parameter.numpy(), own_kind), own_kind)))
    return file, model


def parsed(*argv: str) -> Any:
    return recipe_of(options.config_of(argv))


def stored(bundle: Path) -> dict[str, Tensor]:
    """The parameters of the target's graph, found through the graph itself; its codes as MatMulNBits reads them."""
    graph = onnx.load(
        bundle / Bundle(bundle).manifest.forms["cpu"].graphs["target"].file, load_external_data=False
    ).graph
    dtypes = {onnx.TensorProto.UINT8: torch.uint8, onnx.TensorProto.FLOAT: torch.float32}
    found = dict[str, Tensor]()
    for tensor in graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            at = int(place["offset"]), int(place["length"])
            found[tensor.name] = Location(place["location"], *at, dtypes[tensor.data_type], tuple(tensor.dims)).mapped(
                bundle
            )
    return found


def ggml_name(name: str) -> str:
    return gguf_files.name_of(name if name == "lm_head.weight" else f"model.{name}")


def rows_of_parser(file: Path, name: str, model: LlamaForCausalLM) -> tuple[np.ndarray, str] | None:
    """A tensor's bytes by the gguf package's reader, q and k put back in Hugging Face's order by undoing the
    converter's permutation row by row."""
    tensor = next((t for t in GGUFReader(file).tensors if t.name == ggml_name(name)), None)
    if tensor is None:
        return None
    raw = np.array(tensor.data)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    if (count := heads.get(name.split(".")[-2])) and name.endswith("weight"):
        order = gguf_files.permuted(np.arange(len(raw)), count)
        raw = raw[[order.tolist().index(i) for i in range(len(raw))]]
    return raw, tensor.tensor_type.name


def by_hand(raw: np.ndarray, kind: str) -> tuple[list[list[int]], list[list[float]]]:
    """Codes and scales of every row of Q8_0 or Q4_0, by loops over ggml's blocks."""
    codes, scales = list[list[int]](), list[list[float]]()
    size = {"Q8_0": 34, "Q4_0": 18}[kind]
    for row in raw.view(np.uint8):
        codes.append([])
        scales.append([])
        for start in range(0, len(row), size):
            block = row[start : start + size].tobytes()
            scales[-1].append(float(np.frombuffer(block[:2], np.float16)[0]))
            if kind == "Q8_0":
                codes[-1] += np.frombuffer(block[2:], np.int8).tolist()
            else:
                codes[-1] += [byte % 16 - 8 for byte in block[2:]] + [byte // 16 - 8 for byte in block[2:]]
    return codes, scales


def unpacked(codes: Tensor, bits: int) -> list[list[int]]:
    """By loops, of codes as MatMulNBits reads them."""
    rows = []
    for row in codes.flatten(1).tolist():
        rows.append(
            [byte - 128 for byte in row]
            if bits == 8
            else [half - 8 for byte in row for half in (byte % 16, byte // 16)]
        )
    return rows


def rounding(model: LlamaForCausalLM, parameters: dict[str, Tensor]) -> LlamaForCausalLM:
    """The model with the rows of its products rounded as the CPU rounds them: in the blocks of its stored scales, or
    those of the checkpoint."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            scale = parameters.get(f"{name.removeprefix('model.')}.scale")
            module.__class__, module.block = Rounding, 32 if scale is None else module.in_features // scale.shape[1]
    return model


def apart(parameters: dict[str, Tensor], model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The parameters, those of joined matrices by the names of their parts."""
    found = dict(parameters)
    for whole, parts in JOINED.items():
        for name in parameters:
            if f".{whole}." in name:
                module = f"model.{name.partition(f'.{whole}.')[0]}"
                rows = [model.get_parameter(f"{module}.{part}.weight").shape[0] for part in parts]
                found |= {
                    name.replace(whole, part): own for part, own in zip(parts, found.pop(name).split(rows), strict=True)
                }
    return found


@torch.inference_mode()
def assert_logits(bundle: Path, model: LlamaForCausalLM, near: float, texts: int = 6) -> None:
    """The median of the largest errors, since a rounding that turns over on another order of summation turns others."""
    errors = list[float]()
    with load(bundle, "cpu", threads=1) as opened:
        for ids in np.random.default_rng(5).integers(2, 300, (texts, 9)).tolist():
            opened.decoder.clear()
            opened.decoder.feed(ids)
            found = torch.from_numpy(opened.decoder.target.logits[: len(ids)].copy())
            wanted = model(torch.tensor([ids])).logits[0]
            errors.append(float((found - wanted).abs().max() / wanted.abs().max()))
            alone = list[Tensor]()
            opened.decoder.clear()
            for token in ids:
                opened.decoder.feed([token])
                alone.append(torch.from_numpy(opened.decoder.target.logits[:1].copy()))
            if near < 1e-5:
                assert torch.equal(found, torch.cat(alone))
    assert float(np.median(errors)) < near


def exported(folder: Path, *argv: str) -> Path:
    assert cli.main([*argv, "--out", str(folder / "out"), "--capacity", "32"]) == 0
    return folder / "out"


def test_codes_of_short_rows_are_kept_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 32, where the CPU's int8 has blocks of 64."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 61,
    }
    file = gguf_files.write(RandomPair(sizes).make_target(), tmp_path / "m.gguf", "Q8_0")
    assert cli.main(["--target", str(file), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "Kept: the checkpoint's codes and scales of 15 matrices." in said
    assert "Not quantized" not in said


@pytest.mark.parametrize(
    "kind", ["mix", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("tied", "Q8_0", "Q4_0"))]
)
def test_a_gguf_s_codes_scales_and_logits(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, model = written(kind, tmp_path)
    bundle = exported(tmp_path, "--target", str(file), "--validate")
    said, parameters = capsys.readouterr().out, apart(stored(bundle), model)
    rounded = {"lm_head.weight", "layers.1.mlp.down_proj.weight"} if kind == "mix" else set()
    kept = [name for name in parameters if name.endswith("weight") and name.replace("weight", "scale") in parameters]
    assert len(kept) == 3 * 7 + 2  # with lm_head and embedding
    # An embedding's operator reads the codes of a row without a border between blocks.
    width = 32 if kind != "Q4_0" else 16
    parameters["embed_tokens.weight"] = parameters["embed_tokens.weight"].unflatten(1, (-1, width))
    for name in set(kept) - rounded:
        found = rows_of_parser(file, name, model) or rows_of_parser(file, "embed_tokens.weight", model)
        assert found is not None
        scale, bits = parameters[name.replace("weight", "scale")], 8 if found[1] == "Q8_0" else 4
        codes, scales = by_hand(*found)
        assert unpacked(parameters[name], bits) == codes, name
        assert scale.tolist() == scales, name
        values = dequantize(parameters[name], scale, bits)
        assert torch.equal(values, model.get_parameter(name if name == "lm_head.weight" else f"model.{name}")), name
    assert f"Kept: the checkpoint's codes and scales of {len(kept) - len(rounded) - 1} matrices" in said
    assert (
        "Rounded to int8: layers.1.mlp.down_proj.weight and 1 more (Q4_1, Q5_0); the largest error is 0." in said
    ) == bool(rounded)
    with torch.no_grad():  # what is rounded to int8 is told the model, too
        for name in rounded:
            values = dequantize(parameters[name], parameters[name.replace("weight", "scale")], 8)
            own = model.get_parameter(name if name == "lm_head.weight" else f"model.{name}")
            assert 0 < (values - own).abs().max() < 0.004 * own.abs().max()
            own.copy_(values)
    assert_logits(bundle, rounding(model, parameters), 2e-6)


def test_the_default_and_its_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _ = written("mix", tmp_path)
    as_is = parsed("--target", str(file))
    assert as_is.quantized == {"target": "as-is"}
    assert (as_is.exact, as_is.how("target")) == (True, "as-is, int4 and int8, blocks of 32")
    floats = parsed("--target", str(file), "--weights", "as-is", "--other-weights", "none")
    assert (floats.exact, len(floats.uncoded()), floats.unquantized()) == (False, 2, [])
    assert floats.sources()["weights/target.bin"]["lm_head.weight"].fixed is None
    for argv in (
        ["--weights", "none"],
        ["--preset", "full"],
        ["--backend", "cuda"],
        ["--backend", "cpu", "cuda", "--dtype", "fp32"],
    ):
        assert parsed("--target", str(file), *argv).quantized == {}
    assert parsed("--target", str(file), "--weights", "as-is", "--backend", "cuda").dtype == torch.float16
    others = gguf_files.write(RandomPair(SIZES).make_target(), tmp_path / "q5.gguf", "Q5_0")
    assert parsed("--target", str(others)).quantized == {}
    assert (
        len({plan.fingerprint() for plan in (as_is, floats, parsed("--target", str(file), "--weights", "int8"))}) == 3
    )
    for argv, said in (
        (
            ["--target", str(file), "--backend", "tensorrt"],
            "not for tensorrt, which takes blocks of 64 numbers, and target",
        ),
        (
            ["--target", str(file), "--backend", "migraphx", "--dtype", "bf16"],
            "has them in float16, not bfloat16: choose --dtype fp32",
        ),
        (["--target", str(others)], "holds none (F32, Q5_0): choose int8 or int4"),
    ):
        assert cli.main([*argv, "--weights", "as-is", "--dry-run"]) == 1
        assert said in capsys.readouterr().err
    assert cli.main(["--target", str(file), "--weights", "int4", "--other-weights", "int8", "--dry-run"]) == 1
    assert "--other-weights is for --weights as-is" in capsys.readouterr().err
    assert cli.main(["--target", str(file), "--dry-run"]) == 0
    assert "no error exceeds 0.4% of the largest number of its block" in capsys.readouterr().out


def test_a_tied_lm_head_has_the_embedding_s_codes(tmp_path: Path) -> None:
    file, model = written("tied", tmp_path)
    sources = parsed("--target", str(file)).sources()["weights/target.bin"]
    raw = rows_of_parser(file, "embed_tokens.weight", model)
    assert raw is not None
    codes, scales = by_hand(*raw)
    for name in ("lm_head", "embed_tokens"):
        assert unpacked(sources[f"{name}.weight"].whole(), 8) == codes
        assert sources[f"{name}.scale"].whole().tolist() == scales


def test_a_drafter_reads_the_embedding_s_codes_unless_it_has_one_of_its_own(tmp_path: Path) -> None:
    file, _ = written("Q4_0", tmp_path)
    bits, at = dict[bool, int](), dict[bool, bool]()
    for own in (False, True):
        made = RandomPair(SIZES, heads=1, seed=3)
        drafter = made.write(tmp_path / f"pair-{own}")[1]
        state = torch.load(drafter / "pytorch_model.bin")
        table = state.pop("embed_tokens.weight").float()
        if not own:
            torch.save(state, drafter / "pytorch_model.bin")
        plan = parsed("--ckpt", str(drafter), "--target", str(file), "--capacity", "32")
        places = _pack(plan, Packer(tmp_path / f"out-{own}", plan.dtype, lambda _: None))[UNSIGNED]
        one, two = (places[model]["embed_tokens.weight"] for model in ("target", "draft"))
        at[own], bits[own] = one == two, 8 * two.length // (300 * 128)
        assert 8 * one.length // (300 * 128) == 4
        if own:
            scale = places["draft"]["embed_tokens.scale"].mapped(tmp_path / "out-True")
            values = dequantize(two.mapped(tmp_path / "out-True"), scale, 8)
            assert float((values - table).abs().max()) < 0.005 * float(table.abs().max())
    assert (at, bits) == ({False: True, True: False}, {False: 4, True: 8})


def test_codes_for_both_kinds_of_backend_beside_a_drafter(tmp_path: Path) -> None:
    """MatMulNBits and DequantizeLinear read the same numbers. The drafter's own codes of the same lm_head are
    others."""
    file, _ = written("mix", tmp_path)
    _, drafter = RandomPair(SIZES, heads=1, seed=3).write(tmp_path / "pair")
    plan = parsed(
        "--ckpt",
        str(drafter),
        "--target",
        str(file),
        "--backend",
        "cpu",
        "migraphx",
        "--dtype",
        "fp32",
        "--weights",
        "as-is",
        "--draft-weights",
        "int4",
    )
    places = _pack(plan, Packer(tmp_path / "out", plan.dtype, lambda _: None))
    one, two = (places[codes]["target"] for codes in (UNSIGNED, BACKENDS["migraphx"].codes))
    for name, scheme in plan.schemes(UNSIGNED)["target"].own.items():
        assert scheme is not None
        scale = one[scale_of(name)].mapped(tmp_path / "out")
        found = [dequantize(place[name].mapped(tmp_path / "out"), scale, scheme.bits) for place in (one, two)]
        assert torch.equal(*found), name
        assert (one[name].dtype, two[name].dtype) == (torch.uint8, torch.int8 if scheme.bits == 8 else torch.uint8)
    assert {scheme.bits for scheme in plan.schemes(UNSIGNED)["target"].own.values() if scheme} == {4, 8}
    assert one["lm_head.weight"] != places[UNSIGNED]["draft"]["lm_head.weight"]
    files = (tmp_path / "out").rglob("*.bin")
    assert sum(p.stat().st_size for p in files) <= sum(plan.sizes().values()) - plan.shared()
