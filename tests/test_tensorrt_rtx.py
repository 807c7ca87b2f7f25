"""TensorRT for RTX: what NVIDIA's own parser and compiler make of our graphs, which needs no GPU. What runs plans is
tested on a stand-in (``test_stand_ins``)."""

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path

import onnx
import pytest

from exporter import cli
from exporter.config import ExportConfig
from runtime import GumihoError, InputError
from runtime.backends.rtx_cards import CARDS, card
from runtime.bundle.reader import Bundle
from runtime.cli import compile as compile_command
from runtime.engines.store import read_record
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.eagle3 import RandomEagle3
from tests.end_to_end.test_quantized import FP8_PAIR
from tests.pairs import RandomPair
from tests.rtx import MISSING, RTX, trt
from tests.test_stand_ins import copied, hide

# Large enough for blocks of 64 codes, with heads that fused attention is for.
CODED = RandomPair(
    {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 301,
    },
    layers=1,
    heads=1,
    seed=12,
)
needs_library = pytest.mark.skipif(trt is None, reason=MISSING)


@pytest.fixture
def bundle(make_bundle: MakeBundle, tmp_path: Path) -> Path:
    return copied(make_bundle(DEMO, *EVERY_BACKEND), tmp_path / "bundle")


def coded(make_bundle: MakeBundle, how: str = "fp8") -> Path:
    """A bundle with quantized weights."""
    return make_bundle(
        CODED,
        "--backend",
        "tensorrt-rtx",
        "--capacity",
        "64",
        "--rows",
        "8",
        "--weights",
        how,
        "--draft-weights",
        how,
    )


def graphs(bundle: Path, backend: str, dialect: str, name: str) -> Path:
    return bundle / Bundle(bundle).manifest.form(backend).variants()[dialect][name].file


@needs_library
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_the_compiler_gets_what_it_has_kernels_for(make_bundle: MakeBundle, backend: str) -> None:
    """By name: attention, its rotation, and caches written in place; two caches, and rotated queries and keys, a
    layer. The decomposed form has no attention."""
    made = make_bundle(DEMO, *EVERY_BACKEND)
    fused, decomposed = (RTX.layers(graphs(made, backend, d, "target")) for d in ("standard", "decomposed"))
    layers = len(Bundle(made).manifest.form(backend).graphs["target"].caches) // 2
    assert layers > 1
    for found, attention in ((fused, layers), (decomposed, 0)):
        assert found["ATTENTION_INPUT"] == found["ATTENTION_OUTPUT"] == attention
        assert found["ROTARY_EMBEDDING"] == found["KV_CACHE_UPDATE"] == 2 * layers


@needs_library
def test_codes_meet_their_products(make_bundle: MakeBundle) -> None:
    """Between codes and the product that they are for there is nothing but their dequantization, and what turns
    matrices around; else the compiler would write whole matrices of floats."""
    made = coded(make_bundle)
    network = RTX.network(graphs(made, "tensorrt-rtx", "standard", "target"))
    users = Counter[str]()
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    by_output = {layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)}
    for layer in layers:
        for i in range(layer.num_inputs):
            tensor = layer.get_input(i)
            made_by = by_output.get(tensor.name) if tensor is not None else None
            if made_by is not None and made_by.type.name == "DEQUANTIZE":
                users[layer.type.name] += 1
    assert users["MATRIX_MULTIPLY"] == sum(users.values()) > 1


@needs_library
def test_names_that_collide_with_the_parsers_do_not_parse(make_bundle: MakeBundle, bundle: Path) -> None:
    """What once kept every quantized graph from being read: nodes named ``X_<number>``. The check finds it."""
    made = copied(coded(make_bundle), bundle.parent / "fp8")
    file = graphs(made, "tensorrt-rtx", "standard", "target")
    RTX.network(file)
    model = onnx.load_model(file, load_external_data=False)
    for i, node in enumerate(model.graph.node):
        node.name = f"node_{node.op_type}_{i}" if i % 2 else f"node_{node.op_type}"
    file.write_bytes(model.SerializeToString())
    with pytest.raises(GumihoError, match=r"TensorRT for RTX 1\..* cannot read .*target\.onnx"):
        RTX.network(file)


@needs_library
def test_a_network_takes_what_the_manifest_says(make_bundle: MakeBundle) -> None:
    """Its inputs are the graph's and the form's weights, with their types and shapes, and nothing else."""
    for made in (make_bundle(DEMO, *EVERY_BACKEND), coded(make_bundle)):
        form = Bundle(made).manifest.form("tensorrt-rtx")
        read = set[str]()
        for name, graph in form.graphs.items():
            network = RTX.network(made / graph.file)
            inputs = {(one := network.get_input(i)).name: one for i in range(network.num_inputs)}
            weights = form.inputs(name)
            assert inputs.keys() <= weights.keys() | {tensor.name for tensor in graph.inputs}
            for weight in inputs.keys() & weights.keys():
                assert tuple(inputs[weight].shape) == weights[weight].shape
                assert inputs[weight].dtype.itemsize == weights[weight].nbytes / prod(weights[weight].shape)
            read |= inputs.keys()
        assert read >= {name for weights in form.weights.values() for name in weights}


@needs_library
@pytest.mark.parametrize(
    ("how", "gpu", "name"),
    [
        ("fp8", "rtx-4090", "sm89"),
        ("int4", "8.0", "sm80"),
        *(pytest.param("none", kind, kind, marks=pytest.mark.exhaustive) for kind in CARDS),
    ],
)
def test_plans_are_built_without_a_gpu(
    make_bundle: MakeBundle, tmp_path: Path, how: str, gpu: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, into a bundle; weights are not in them."""
    made = copied(coded(make_bundle, how), tmp_path / "bundle")
    assert compile_command.main([str(made), "--gpu", gpu]) == 0
    out = capsys.readouterr().out
    assert f"plans for {name}, not run yet" in out
    folder = Path(out.splitlines()[-1].partition(":")[0])
    record = read_record(folder)
    assert (record.proven, record.key["capability"]) == (False, name)
    assert json.loads((folder / "attention.json").read_text()) == {"attention": "fused", "reason": ""}
    plans = {file.stem for file in folder.glob("*.plan")}
    assert plans == {Path(graph.file).stem for graph in Bundle(made).manifest.form("tensorrt-rtx").graphs.values()}


@needs_library
@pytest.mark.parametrize(
    ("how", "gpus"),
    [("int4", ()), *(pytest.param(how, ["sm89"], marks=pytest.mark.exhaustive) for how in ("none", "int4", "fp8"))],
)
def test_a_drafter_with_a_part_of_the_vocabulary(how: str, gpus: Sequence[str], tmp_path: Path) -> None:
    """EAGLE-3's graphs are read by the parser, as all are that are written here; with a card, plans are built too."""
    argv = RandomEagle3(CODED, taps=(0, 1, 2), drafted=200).write(tmp_path)
    argv += ["--backend", "tensorrt-rtx", "--capacity", "64", "--rows", "8", "--weights", how, "--draft-weights", how]
    assert cli.main([*argv, *(["--gpu", *gpus] if gpus else []), "--out", str(tmp_path / "out")]) == 0
    assert RTX.layers(graphs(tmp_path / "out", "tensorrt-rtx", "standard", "draft"))["GATHER"]
    assert len(list((tmp_path / "out").glob("engines/*/draft*.plan"))) == len(gpus)


@needs_library
def test_one_profile_for_all_sizes_builds_a_smaller_plan(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.backends import tensorrt_rtx

    made, sizes = Bundle(coded(make_bundle)), []
    targets = [graph for name, graph in made.manifest.form("tensorrt-rtx").graphs.items() if name.startswith("target")]
    for ranged in (False, True):
        monkeypatch.setattr(tensorrt_rtx, "RANGED", ranged)
        sizes.append(len(tensorrt_rtx._build(made, targets, CARDS["sm89"], lambda _: None)))
    assert sizes[1] < sizes[0]


@needs_library
def test_an_export_builds_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says that they have not run, and what is to be typed on the device. Heads of 8 numbers get decomposed
    attention."""
    FP8_PAIR.write(tmp_path)
    argv = ["--target", str(tmp_path / "target"), "--out", str(tmp_path / "out"), "--backend", "tensorrt-rtx"]
    assert cli.main([*argv, "--capacity", "64", "--rows", "4", "--gpu", "RTX 3080"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"tensorrt-rtx: engines/tensorrt-rtx-\w{12} holds plans for sm86 \(.*\), not run yet", out)
    assert f"next, on the device: gumiho compile {tmp_path / 'out'} --backend tensorrt-rtx" in out
    (choice,) = (tmp_path / "out").glob("engines/*/attention.json")
    assert json.loads(choice.read_text())["attention"] == "decomposed"
    assert "Attention operation was not supported by a dedicated kernel" in choice.read_text()


def test_cards_are_known_by_name() -> None:
    """Compute capabilities as NVIDIA lists them (developer.nvidia.com/cuda/gpus)."""
    listed = {
        "sm75": ("RTX 2060", "GeForce RTX 2080 Ti", "GTX 1650", "T4", "Quadro RTX 6000"),
        "sm80": ("A100", "A30"),
        "sm86": ("RTX 3050", "NVIDIA GeForce RTX 3090", "rtx-a4000", "RTX A400", "A10", "A2", "a40"),
        "sm89": ("rtx-4060", "GeForce RTX 4090 Laptop", "RTX 4000 Ada", "RTX 6000 Ada", "L4", "L40S"),
        "sm120": ("rtx_5090", "GeForce RTX 5060 Ti", "RTX PRO 6000", "rtx-pro-4500-blackwell"),
        "sm121": ("DGX Spark", "GB10"),
    }
    for name, cards in listed.items():
        for spelled in (*cards, name, name.upper(), f"{name[2:-1]}.{name[-1]}"):
            assert card(spelled).name == name, spelled


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("H100", r"not for 'H100' \(Hopper\): use --backend cuda, or tensorrt"),
        ("GH200", "Hopper"),
        ("sm90", "Hopper"),
        ("orin", "JetPack"),
        ("8.7", "JetPack"),
        ("jetson-agx-thor", "JetPack"),
        ("b200", "data centers"),
        ("rtx-9999", "there is no 'rtx-9999' among the cards of TensorRT for RTX (sm75: "),
        ("radeon", "there is no 'radeon'"),
        ("", "there is no ''"),
    ],
)
def test_other_cards_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message if "(sm75" not in message else re.escape(message)):
        card(name)
    with pytest.raises(InputError):
        ExportConfig(target="t", backend=("tensorrt-rtx",), gpu=(name,)).check()


@needs_library
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--gpu", "sm75", "--weights", "int4"),
            r"sm75 \(.*Turing\)\) has no kernels for int4, which sm80",
        ),
        (
            ("--gpu", "sm89", "sm86", "--draft-weights", "fp8"),
            r"sm86 \(.*\)\) has no kernels for fp8, which sm89",
        ),
        (("--gpu", "sm75", "--dtype", "bf16"), "sm75 .* has no kernels for bfloat16"),
        (("--gpu", "sm90"), "Hopper"),
        (
            ("--backend", "tensorrt-rtx", "migraphx", "--draft-weights", "int4"),
            "not for tensorrt-rtx and migraphx in one",
        ),
    ],
)
def test_cards_without_kernels_are_refused_before_anything_is_written(
    tmp_path: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--ckpt", str(DEMO / "drafter"), "--target", str(DEMO / "target"), "--out", str(tmp_path / "out")]
    assert cli.main([*argv, "--backend", "tensorrt-rtx", *options]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backend", "cpu", "--gpu", "sm86"], "--gpu is for backend tensorrt-rtx, and this is cpu"),
        (["--backend", "tensorrt-rtx", "--gpu", "sm86", "sm90"], "Hopper"),
    ],
)
def test_the_command_refuses_what_it_cannot_build(
    make_bundle: MakeBundle, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile_command.main([str(make_bundle(DEMO, *EVERY_BACKEND)), *argv]) == 1
    assert message in capsys.readouterr().err


def test_without_the_library_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "runtime.backends.tensorrt_rtx")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)  # type: ignore[arg-type]
    argv = ["--target", str(DEMO / "target"), "--out", str(tmp_path / "out"), "--backend", "tensorrt-rtx"]
    assert cli.main([*argv, "--gpu", "sm86"]) == 1
    assert "pip install 'gumiho-export[tensorrt-rtx]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
