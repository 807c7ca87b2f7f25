"""Traces that the processes of a test session share: most of an export of a small pair is tracing."""

import functools
import gc
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch._export import utils as export_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.graph_module import GraphModule
from torch.onnx._internal.exporter._registration import ONNXRegistry

from exporter import trace
from graphs.drafter import Drafter
from graphs.target import Target
from runtime.bundle.locks import locked

_traced = trace._traced
_compile = GraphModule.recompile
_LISTED = "_collect_all_valid_cia_ops_for_namespace"


def trace_anew(module: Target | Drafter, dtype: torch.dtype, sizes: Mapping[str, int] | None) -> ir.Model:
    """A trace that is read from nowhere. The garbage collector, which takes a tenth of it, waits."""
    gc.disable()
    try:
        return _traced(module, dtype, sizes)
    finally:
        gc.enable()


class _Compiled:
    """A forward method that is made when it is asked for."""

    def __get__(self, module: GraphModule, owner: type) -> Callable[..., object]:
        _compile(module)
        return module.forward


def _when_called(module: GraphModule) -> None:
    """Takes the place of ``GraphModule.recompile``."""
    if isinstance(codegen := module.graph._codegen, _PyTreeCodeGen):
        module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
    type(module).forward = _Compiled()  # type: ignore[assignment]


class Traces:
    """Takes the place of ``exporter.trace._traced``: a graph is traced once and read from a file from then on.

    On the meta device a module is its structure, all of which is in its pickle. What else a trace depends on, the source of graphs/
    and exporter/, is the same throughout a session, so the folder must be the session's own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, module: Target | Drafter, dtype: torch.dtype, sizes: Mapping[str, int] | None) -> ir.Model:
        key = pickle.dumps((module, dtype, sorted((sizes or {}).items())))
        file = self._folder / f"trace-{hashlib.sha256(key).hexdigest()[:32]}.onnx"
        with locked(file.with_suffix(".lock"), "another process traces this graph", wait=lambda _: None):
            if not file.exists():
                part = file.with_suffix(".part")
                part.write_bytes(_spelled(trace_anew(module, dtype, sizes)))
                part.rename(file)
        return ir.from_proto(ir.serde.onnx.ModelProto.FromString(file.read_bytes()))


def _spelled(model: ir.Model) -> bytes:
    """Weights, which a trace knows no numbers of, are named as if they lay in a file."""
    for name, value in model.graph.initializers.items():
        held = value.const_value
        if held is not None and isinstance(getattr(held, "raw", None), FakeTensor):
            value.const_value = ir.ExternalTensor("nowhere", 0, 0, held.dtype, shape=held.shape, name=name, base_dir="")
    return ir.to_proto(model).SerializeToString()


@contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Within it traces are read from a folder where it has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_traced", Traces(folder))
        # A second of every trace: torch makes its list of operators anew for each.
        patch.setattr(
            ONNXRegistry, "from_torchlib", staticmethod(functools.lru_cache(maxsize=None)(ONNXRegistry.from_torchlib))
        )
        # The same list of operators again, twice for every trace.
        patch.setattr(export_utils, _LISTED, functools.lru_cache(maxsize=None)(getattr(export_utils, _LISTED)))
        # A tenth of every trace: where in our code each node was made, which ``_simplify`` drops.
        patch.setattr(torch.fx.config, "do_not_emit_stack_traces", True)
        # Another tenth: the source code of graphs that are only interpreted.
        patch.setattr(GraphModule, "recompile", _when_called)
        yield
