"""Targets quantized by GPTQ, AWQ and compressed-tensors: packed here by loops, read against the numbers they were
packed from, and exported against transformers over these numbers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from exporter import cli
from exporter.checkpoints.lone_target import LoneTarget
from exporter.checkpoints.target import target_checkpoint
from exporter.training.target import model_of
from graphs.dialects.quantization import dequantize
from runtime import DamageError, InputError, load
from runtime.bundle.reader import Bundle
from tests.end_to_end.test_forms import tokens
from tests.pairs import RandomPair
from tests.test_as_is import assert_logits, parsed, rounding, stored

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "num_hidden_layers": 2,
}


@dataclass
class Form:
    """How a target is quantized and stored."""

    method: str
    group: int
    symmetric: bool = False
    scales: torch.dtype = torch.float16
    version: str = "gptq_v2"
    config: dict[str, Any] = field(default_factory=dict)
    least: int = 0  # zero point

    def quantization_config(self) -> dict[str, Any]:
        own: dict[str, Any] = {"quant_method": self.method, "bits": 4, "group_size": self.group}
        if self.method == "gptq":
            own |= {"sym": self.symmetric, "desc_act": False, "checkpoint_format": self.version}
        elif self.method == "awq":
            own |= {"zero_point": True, "version": "gemm"}
        else:
            weights = {
                "num_bits": 4,
                "type": "int",
                "symmetric": self.symmetric,
                "strategy": "group",
                "group_size": self.group,
            }
            group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
            own = {
                "quant_method": self.method,
                "format": "pack-quantized",
                "config_groups": {"group_0": group},
                "ignore": ["lm_head"],
            }
        return own | self.config


FORMS = {
    "gptq": Form("gptq", 128, symmetric=True, version="gptq"),
    "gptq, zeros": Form("gptq", 64, version="gptq", least=1),
    "gptq_v2": Form("gptq", 32),
    "awq": Form("awq", 128),
    "compressed": Form("compressed-tensors", 32, symmetric=True, scales=torch.bfloat16),
    "compressed, zeros": Form("compressed-tensors", 64),
}


def quantized(weight: Tensor, form: Form) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
    """Codes from 0 to 15, scales and zero points of every row, by loops."""
    codes, scales, zeros = list[list[int]](), list[list[float]](), list[list[int]]()
    for row in weight.tolist():
        for kept in (codes, scales, zeros):
            kept.append([])
        for start in range(0, len(row), form.group):
            part = row[start : start + form.group]
            low, high = min(*part, 0.0), max(*part, 0.0)
            step = max(-low, high) / 7 if form.symmetric else (high - low) / (15 - form.least)
            scale = float(torch.tensor(step).to(form.scales))
            zero = 8 if form.symmetric else min(15, max(form.least, round(-low / scale)))
            scales[-1].append(scale)
            zeros[-1].append(zero)
            codes[-1] += [min(15, max(0, round(value / scale) + zero)) for value in part]
    return codes, scales, zeros


def words(lines: list[list[int]], order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Eight numbers of a line in an int32, that at ``order[i]`` in its i-th four bits."""
    made = []
    for line in lines:
        made.append([])
        for start in range(0, len(line), 8):
            word = 0
            for i in range(8):
                word |= line[start + order[i]] << 4 * i
            made[-1].append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(made, dtype=torch.int32)


def transposed(lines: list[list[Any]]) -> list[list[Any]]:
    return [list(line) for line in zip(*lines, strict=True)]


def tensors(module: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    """What a checkpoint has instead of a weight, and the numbers it stands for."""
    codes, scales, zeros = quantized(weight, form)
    values = [
        [
            scale * (code - zero)
            for code, scale, zero in zip(row, np.repeat(s, form.group), np.repeat(z, form.group), strict=True)
        ]
        for row, s, z in zip(codes, scales, zeros, strict=True)
    ]
    scale = torch.tensor(scales).to(form.scales)
    if form.method == "compressed-tensors":
        made = {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
        if not form.symmetric:
            made["weight_zero_point"] = words(transposed(zeros)).T.contiguous()
    elif form.method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        made = {"qweight": words(transposed(codes), order), "qzeros": words(transposed(zeros), order)}
    else:
        less = int(form.version == "gptq")
        made = {
            "qweight": words(codes).T.contiguous(),
            "qzeros": words([[z - less for z in line] for line in transposed(zeros)]),
        }
        made["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // form.group
    if form.method != "compressed-tensors":
        made["scales"] = scale.T.contiguous()
    return {f"{module}.{ending}": tensor for ending, tensor in made.items()}, torch.tensor(values, dtype=torch.float32)


def write(form: Form, folder: Path, sizes: dict[str, Any] | None = None) -> LlamaForCausalLM:
    """A folder of a quantized target whose lm_head is not quantized; transformers' model over its numbers."""
    model = RandomPair({**SIZES, **(sizes or {})}, seed=3).make_target()
    state = dict[str, Tensor]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "layers" in name:
                made, values = tensors(name.removesuffix(".weight"), parameter, form)
                state |= made
                parameter.copy_(values)
            else:
                parameter.copy_(parameter.half())
                state[name] = parameter.half()
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": form.quantization_config()}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, LlamaForCausalLM]]:
    """Each form's folder and model, written once."""
    known = dict[str, tuple[Path, LlamaForCausalLM]]()

    def folder(name: str) -> tuple[Path, LlamaForCausalLM]:
        if name not in known:
            path = tmp_path_factory.mktemp("quantized") / "target"
            known[name] = path, write(FORMS[name], path)
        return known[name]

    return folder


@pytest.mark.parametrize("name", FORMS)
def test_numbers_and_codes_are_those_that_were_packed(name: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.checkpoints.quantized._SLICE_ELEMENTS", 24 * 128)
    folder, model = made(name)
    form, checkpoint = FORMS[name], target_checkpoint(str(folder))
    pair = LoneTarget(checkpoint)
    assert len(pair.coded()) == 2 * 7
    for parameter, source in pair.target_sources(1).items():
        if parameter.startswith("rotary."):
            continue
        values = model.get_parameter(parameter if parameter == "lm_head.weight" else f"model.{parameter}").detach()
        assert torch.equal(source.whole().float(), values), parameter
        assert torch.equal(checkpoint.read(parameter, 3, 21), checkpoint.read(parameter)[3:21])
        if source.coded:
            parts = [dequantize(codes, scale.float(), 4, zero) for codes, scale, zero in source.coded.parts()]
            assert len(parts) > 1
            assert torch.equal(torch.cat(parts), values), parameter
            assert (source.coded.zeros, source.coded.scales) == (
                form.method != "compressed-tensors" or not form.symmetric,
                form.scales,
            )


def test_a_configuration_in_a_file_of_its_own(made: Any, tmp_path: Path) -> None:
    """As AutoGPTQ wrote it before version 0.5, with the weights under a name of its own."""
    folder, _ = made("gptq")
    shutil.copy(folder / "model.safetensors", tmp_path / "gptq_model-4bit-128g.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = {"bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": False, "sym": True, "true_sequential": True}
    (tmp_path / "quantize_config.json").write_text(json.dumps(own))
    found, expected = target_checkpoint(str(tmp_path)), target_checkpoint(str(folder))
    assert found.names() == expected.names()
    assert all(torch.equal(found.read(name), expected.read(name)) for name in found.names())
    (tmp_path / "quantize_config.json").write_text(json.dumps({**own, "bits": 3}))
    with pytest.raises(InputError, match="bits 3, expected 4"):
        target_checkpoint(str(tmp_path))


@torch.inference_mode()
def test_biases_of_zeros_are_none(made: Any, tmp_path: Path) -> None:
    """AutoGPTQ writes them for every matrix."""
    folder, _ = made("gptq, zeros")
    state = load_file(folder / "model.safetensors")
    state |= {n.replace("qweight", "bias"): torch.zeros(t.shape[1]) for n, t in state.items() if n.endswith("qweight")}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with_biases, without = (LoneTarget(target_checkpoint(str(f))).target_sources(1) for f in (tmp_path, folder))
    assert with_biases.keys() == without.keys()


def test_a_drafter_is_trained_on_those_numbers(made: Any) -> None:
    folder, model = made("awq")
    ids = torch.arange(20)[None]
    found = model_of(LoneTarget(target_checkpoint(str(folder))))
    assert torch.equal(found(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "name",
    [
        "awq",
        *(
            pytest.param(n, marks=pytest.mark.exhaustive)
            for n in ("compressed", "gptq", "gptq, zeros", "gptq_v2", "compressed, zeros")
        ),
    ],
)
@torch.inference_mode()
def test_floats_in_the_lm_head_leave_transformers_tokens_and_logits(name: str, made: Any, tmp_path: Path) -> None:
    folder, model = made(name)
    argv = [
        "--target",
        str(folder),
        "--weights",
        "as-is",
        "--other-weights",
        "none",
        "--capacity",
        "32",
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli.main(argv) == 0
    assert_logits(tmp_path / "out", model, 2e-5)
    with load(tmp_path / "out", "cpu", threads=1) as opened:
        for prompt in ([5, 9, 33], [60], [7, 8, 9, 10, 11, 2]):
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
            )
            assert tokens(opened, prompt, 20)[0] == out[0, len(prompt) :].tolist()


def test_by_default_the_lm_head_is_rounded_to_int8_and_rows_are_exact(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = made("gptq, zeros")
    assert cli.main(["--target", str(folder), "--capacity", "32", "--out", str(tmp_path / "out"), "--validate"]) == 0
    said, parameters = capsys.readouterr().out, stored(tmp_path / "out")
    assert Bundle(tmp_path / "out").manifest.weights == {"target": "as-is, int4, blocks of 32"}
    assert "Kept: the checkpoint's codes and scales of 14 matrices" in said
    assert "Rounded to int8: lm_head.weight (float16); the largest error is 0." in said
    head = dequantize(parameters["lm_head.weight"], parameters["lm_head.scale"], 8)
    exact = LlamaForCausalLM(model.config).eval()
    exact.load_state_dict(model.state_dict() | {"lm_head.weight": head})
    assert_logits(tmp_path / "out", rounding(exact, parameters), 2e-6)


def test_what_is_chosen(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = made("compressed")
    assert parsed("--target", str(folder)).quantized == {"target": "as-is"}
    assert parsed("--target", str(folder), "--backend", "migraphx").quantized == {}
    assert cli.main(["--target", str(folder), "--backend", "cuda", "--weights", "as-is", "--dry-run"]) == 1
    assert "has them in bfloat16, not float16: choose --dtype fp32" in capsys.readouterr().err


ACTIVATIONS = {
    "config_groups": {
        "g": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}, "input_activations": {"num_bits": 8}}
    }
}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (Form("gptq", 32, config={"bits": 8}), "gptq with bits 8, expected 4"),
        (Form("gptq", 32, config={"bits": True}), "gptq with bits True, expected 4"),
        (Form("gptq", 32, config={"group_size": -1}), "gptq with group_size -1, expected 32 or 64 or 128"),
        (
            Form("gptq", 32, config={"checkpoint_format": "marlin"}),
            "checkpoint_format 'marlin', expected 'gptq' or 'gptq_v2'",
        ),
        (Form("gptq", 32, config={"dynamic": {"-:lm_head": {}}}), "with dynamic"),
        (Form("awq", 32, config={"version": "gemv"}), "awq with version 'gemv', expected 'gemm'"),
        (
            Form("compressed-tensors", 32, config={"format": "int-quantized"}),
            "format 'int-quantized', expected 'pack-quantized'",
        ),
        (Form("compressed-tensors", 32, config={"config_groups": None}), "groups in config_groups: 0, expected 1"),
        (Form("compressed-tensors", 32, config={"transform_config": {"a": 1}}), "with transform_config"),
        (Form("compressed-tensors", 32, config=ACTIVATIONS), "with input_activations"),
    ],
)
def test_other_formats_are_refused_by_name(form: Form, said: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    write(form, tmp_path, sizes)
    with pytest.raises(InputError, match=f"quantized by {form.method} with {said.split('with ')[-1]}"):
        target_checkpoint(str(tmp_path))


NAME = "model.layers.1.mlp.up_proj"
Change = Callable[[dict[str, Tensor]], object]


def act_order(state: dict[str, Tensor]) -> None:
    state[f"{NAME}.g_idx"] = state[f"{NAME}.g_idx"].flip(0).contiguous()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop(f"{NAME}.qzeros"), "lacks the tensor 'layers.1.mlp.up_proj.qzeros', without which"),
        (lambda s: s.pop(f"{NAME}.scales"), "lacks the tensor 'layers.1.mlp.up_proj.scales'"),
        (lambda s: s.pop(f"{NAME}.qweight"), "lacks the tensor 'layers.1.mlp.up_proj.weight', expected with shape"),
        (
            lambda s: s.update({f"{NAME}.qzeros": s[f"{NAME}.qzeros"][:1]}),
            r"up_proj.qzeros' is \[1, 16\], expected \[2, 16\]",
        ),
        (lambda s: s.update({f"{NAME}.qweight": s[f"{NAME}.qweight"].long()}), "up_proj.qweight' is I64, expected I32"),
        (
            lambda s: s.update({f"{NAME}.qweight": s[f"{NAME}.qweight"][:8]}),
            r"up_proj.scales' is \[2, 128\], expected \[1, 128\]",
        ),
        (
            lambda s: s.update({f"{NAME}.qweight": s[f"{NAME}.qweight"][0]}),
            r"up_proj.qweight' is \[128\], expected a matrix",
        ),
        (lambda s: s.update({f"{NAME}.qweight": s[f"{NAME}.qweight"][:5]}), "expected whole groups of 64"),
        (lambda s: s.update({f"{NAME}.weight": torch.zeros(2, 2)}), "and no 'layers.1.mlp.up_proj.weight' beside it"),
        (
            act_order,
            "quantized with act-order .desc_act., so that the groups of 'layers.1.mlp.up_proj' are not consecutive",
        ),
        (lambda s: s[f"{NAME}.qzeros"].fill_(-1), "'layers.1.mlp.up_proj.qzeros' holds the zero point 16"),
        (lambda s: s.update({f"{NAME}.bias": torch.eye(2)[0]}), "has the tensor 'layers.1.mlp.up_proj.bias'"),
        (lambda s: s[f"{NAME}.scales"].fill_(torch.inf), "'layers.1.mlp.up_proj.scales' holds NaN or infinity"),
    ],
)
def test_damage_is_told_in_a_sentence(change: Change, said: str, made: Any, tmp_path: Path) -> None:
    folder, _ = made("gptq, zeros")
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises((InputError, DamageError), match=said):
        LoneTarget(target_checkpoint(str(tmp_path))).target_sources(1)["layers.1.mlp.up_proj.weight"].whole()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["g", "weights", "num_bits"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.sampled_from(list(FORMS)), st.data())
def test_any_configuration_is_read_or_refused(made: Any, name: str, data: st.DataObject) -> None:
    """Nothing but a sentence comes of a field of another kind."""
    from exporter.checkpoints.quantized import _format

    config = FORMS[name].quantization_config()
    key = data.draw(st.sampled_from(sorted(config.keys() - {"quant_method"})))
    config[key] = data.draw(JSON)
    said = "is quantized by"
    try:
        size = _format(config, "target 'x'").group
    except InputError as error:
        said = str(error)
    else:
        assert size in (32, 64, 128)
    assert "is quantized by" in said
