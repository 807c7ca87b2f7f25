"""Cross-check for ROCm: compiles the exported modules with torch-migraphx instead of from ONNX.

    python tools/cross_check.py --ckpt DRAFTER --target TARGET [--rows 8] [--compiler migraphx] [--torch-device cuda]

Runs target and drafter over random tokens, eagerly and with ``torch.compile``, and prints the largest differences. If
they are small but a bundle's engines fail the golden run, the fault is in the ONNX graphs or MIGraphX's parser. Needs
torch-migraphx and PyTorch for ROCm (https://github.com/ROCm/torch_migraphx); ``--compiler eager --torch-device cpu``
runs anywhere, to check the tool itself.
"""

import argparse
import sys

import torch
from torch import Tensor, nn

from exporter import options
from exporter.recipe.sources import open_pair
from exporter.tracing.signature import arguments, signature
from exporter.weights.source import Source
from graphs.dialects.basic import Basic
from graphs.tree import TreeConfig, default_beam
from runtime.cli.command import run
from runtime.errors import UnavailableError

CAPACITY = 256


def load(module: nn.Module, sources: dict[str, Source], device: str, dtype: torch.dtype) -> nn.Module:
    """The module with the checkpoint's tensors, on a device."""
    names = dict(module.named_parameters())
    state = {name: source.whole().to(source.dtype(dtype)) for name, source in sources.items() if name in names}
    module.load_state_dict(state, assign=True)
    return module.to(device)


def inputs(module: nn.Module, dtype: torch.dtype, sizes: dict[str, int], vocabulary: int, device: str) -> list[object]:
    """Random values for a graph's inputs: a past of half the capacity, and rows in causal order."""
    draw = torch.Generator().manual_seed(0)
    values: dict[str, Tensor] = {}
    for name, example, _ in signature(module, dtype, sizes)[0]:  # type: ignore[arg-type]
        if name == "tokens":
            values[name] = torch.randint(0, vocabulary, example.shape, generator=draw)
        elif name in ("depth", "path"):
            values[name] = torch.arange(len(example))
        elif name == "mask":
            values[name] = torch.ones_like(example).tril()
        elif name == "past_length":
            values[name] = torch.tensor([CAPACITY // 2])
        elif name == "count":
            values[name] = torch.tensor([sizes["accepted"]])
        else:
            values[name] = torch.randn(example.shape, generator=draw).to(dtype)
    return arguments(module, {name: value.to(device) for name, value in values.items()})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="Gumiho drafter: a folder or a hub id")
    parser.add_argument(
        "--target", help="target model: a folder or a hub id (default: known for the released drafters)"
    )
    parser.add_argument("--rows", type=int, default=8, help="rows of the draft tree, root included (default: 8)")
    parser.add_argument(
        "--dtype", choices=("fp32", "fp16"), default="fp16", help="precision of weights and inputs (default: fp16)"
    )
    parser.add_argument("--compiler", default="migraphx", help="backend of torch.compile (default: migraphx)")
    parser.add_argument(
        "--torch-device", default="cuda", help="PyTorch's device name; ROCm devices are called cuda too (default: cuda)"
    )
    args = parser.parse_args(argv)
    return run(lambda: check(args))


def check(args: argparse.Namespace) -> int:
    """Prints the difference between eager and compiled modules, output by output."""
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[args.dtype]
    if args.compiler == "migraphx":
        try:
            import torch_migraphx  # noqa: F401  # registers the compiler
        except ImportError as error:
            raise UnavailableError(
                f"torch_migraphx cannot be imported ({error}): install it and PyTorch for ROCm"
            ) from None
    if args.torch_device.startswith("cuda") and not torch.cuda.is_available():
        raise UnavailableError(
            f"PyTorch {torch.__version__} finds no GPU: install it for ROCm, or give --torch-device cpu"
        )
    named = [f"--ckpt={args.ckpt}", *([f"--target={args.target}"] if args.target else [])]
    pair = open_pair(options.config_of(named))
    vocabulary = pair.target_shape.vocabulary
    tree = TreeConfig(args.rows, 2, pair.heads, 14, 35, default_beam(args.rows)).fitted(vocabulary)
    positions = CAPACITY + args.rows
    modules = pair.modules(tree, CAPACITY, positions, Basic)
    sources = {"target": pair.target_sources(positions), "draft": pair.draft_sources(tree.depth - 2, positions)}
    for name in ("target", "draft"):
        module = load(modules[name], sources[name], args.torch_device, dtype)
        values = inputs(module, dtype, {"rows": tree.rows, "accepted": tree.depth + 1}, vocabulary, args.torch_device)
        with torch.inference_mode():
            expected = module(*values)
            found = torch.compile(module, backend=args.compiler)(*values)
        names = signature(module, dtype)[1]  # type: ignore[arg-type]
        for output, a, b in zip(names, found, expected, strict=True):
            if a.dtype.is_floating_point:
                relative_error = float((a.float() - b.float()).abs().max() / b.float().abs().max())
                print(f"{name} {output}: largest difference {relative_error:.1e} of the largest value")
            else:
                print(f"{name} {output}: {int((a != b).sum())} of {a.numel()} differ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
