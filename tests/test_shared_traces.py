"""Traces that are shared: a graph that ``tests.traces`` reads again, or traces in the quicker way, is, byte by byte, the one that an export
has, and so is one that was traced with rotary tables of another length."""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch.fx.graph_module import GraphModule
from torch.fx.proxy import TracerBase

from exporter import trace
from exporter.weights.source import Location
from graphs.dialects.standard import Standard
from graphs.drafter import Drafter
from graphs.drafters.gumiho import Gumiho
from graphs.layer import LlamaShape
from graphs.target import Target
from graphs.tree import TreeConfig
from tests import traces

SHAPE = LlamaShape(vocabulary=101, hidden=32, intermediate=48, layers=1, heads=4, kv_heads=2, head_dim=8, eps=1e-5)
TREE = TreeConfig(rows=5, serial_steps=2, heads=1, top_k=2, head_top_k=2, beam=2)


def exported(capacity: int, positions: int = 128) -> bytes:
    with torch.device("meta"):
        module = Gumiho(SHAPE, capacity, positions, TREE, fc_bias=True, ops=Standard)
    parameters = enumerate(module.named_parameters())
    places = {n: Location("w.bin", 4096 * i, t.nbytes, t.dtype, tuple(t.shape)) for i, (n, t) in parameters}
    return ir.to_proto(trace.trace(module, places, Path("nowhere"), torch.float32)).SerializeToString()


def test_a_graph_read_is_the_graph_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("exporter.trace._capture", traces._traced)
        patch.setattr(GraphModule, "recompile", traces._compile)
        patch.setattr(TracerBase, "record_stack_traces", True)
        wanted = exported(64)
    monkeypatch.setattr("exporter.trace._capture", traces.Traces(tmp_path))
    assert exported(64) == wanted
    monkeypatch.setattr("tests.traces.trace_anew", lambda *_: pytest.fail("it is traced again"))
    assert exported(64) == wanted
    with pytest.raises(pytest.fail.Exception, match="traced again"):
        exported(65)


def test_rotary_tables_of_any_length_share_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("exporter.trace._capture", traces.trace_anew)  # with the tables that it has
        wanted = [exported(64, positions) for positions in (128, 130)]
    made = list[object]()

    def anew(module: Target | Drafter, dtype: torch.dtype, sizes: Mapping[str, int] | None) -> ir.Model:
        made.append(module)
        return traces.trace_anew(module, dtype, sizes)

    monkeypatch.setattr("exporter.trace._captured", {})
    monkeypatch.setattr("exporter.trace._traced", anew)
    assert [exported(64, positions) for positions in (128, 130)] == wanted
    assert wanted[0] != wanted[1]
    assert len(made) == 1
