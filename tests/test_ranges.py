"""exporter.backends.ranges by brute force: random graphs of integers, run by ONNX Runtime, and in fp32 without rounding
by numpy."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from hypothesis import event, given
from hypothesis import strategies as st

from exporter.backends.operators import _facts, refusals
from exporter.backends.ranges import LIMIT, ranges

Feed = dict[str, np.ndarray]

# Each makes a value of a length n of the earlier ones x and y; {c} is a small constant.
STEPS = (
    "{o} = Add({x}, {y})",
    "{o} = Sub({x}, {y})",
    "{o} = Mul({x}, {y})",
    "{o} = Mul({x}, {c})",
    "{o} = Max({x}, {y})",
    "{o} = Neg({x})",
    "{o} = Gather <axis = 0> ({x}, backward)",
    "{o}a = ReduceSum <keepdims = 1> ({x}, axis) {o} = Expand({o}a, size)",
    "{o}a = ReduceMin <keepdims = 1> ({x}, axis) {o} = Expand({o}a, size)",
    "{o}a = Less({x}, {y}) {o} = Where({o}a, {x}, {y})",
    "{o}a = Equal({x}, {y}) {o} = Cast <to = 7> ({o}a)",
    "{o}a = Concat <axis = 0> ({x}, {y}) {o} = Slice({o}a, axis1, end, axis)",
    "{o}a, {o} = TopK <axis = 0> ({x}, size)",
    "{o}a = Cast <to = 1> ({x}) {o}b = Mul({o}a, {f}) {o} = Cast <to = 7> ({o}b)",
    "{o}a = Cast <to = 10> ({x}) {o} = Cast <to = 7> ({o}a)",
    "{o}a = Cast <to = 1> ({x}) {o}b = Mul({o}a, {f}) {o}c = Clip({o}b, {low}, {high}) {o}e = Floor({o}c) {o} = Cast "
    "<to = 7> ({o}e)",
)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[ir.Model, int]:
    """A graph over integers of vectors of one length, all of whose values are outputs, and that length."""
    n = draw(st.sampled_from([3, 200, 4099]))
    values, body = ["a", "b"], ""
    for i in range(draw(st.integers(1, 6))):
        x, y = (draw(st.sampled_from(values)) for _ in "xy")
        constant, factor = draw(st.sampled_from(["two", "minus", "many"])), draw(st.sampled_from(["half", "three"]))
        low, high = (draw(st.sampled_from(["half", "three", "none", "most"])) for _ in range(2))
        body += " " + draw(st.sampled_from(STEPS)).format(x=x, y=y, c=constant, f=factor, o=f"v{i}", low=low, high=high)
        values.append(f"v{i}")
    constants = (
        f"int64[1] axis = {{0}}, int64[1] axis1 = {{1}}, int64[1] end = {{{n + 1}}}, int64[1] size = {{{n}}}, int64 "
        f"two = {{2}}, "
        "int64 minus = {-3}, int64 many = {4096}, float half = {0.5}, float three = {3.0}, float none = {0.0}, float "
        "most = {16777216.0}, "
        f"int64[{n}] backward = {{{', '.join(map(str, reversed(range(n))))}}}"
    )
    ends = ", ".join(f"int64[{n}] {name}" for name in values[2:])
    text = (
        f'<ir_version: 10, opset_import: ["" : 18]> g (int64[{n}] a, int64[{n}] b) => ({ends}) <{constants}> {{{body}}}'
    )
    return ir.from_onnx_text(text), n


def run(model: ir.Model, feed: Feed) -> Feed:
    """Every output, by ONNX Runtime; those of the same name as an input are that."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip((out.name for out in session.get_outputs()), session.run(None, feed), strict=True))


def _cast(x: np.ndarray, to: int) -> np.ndarray:
    """To an integer nothing is cut off."""
    return x.astype(np.float16).astype(np.float32) if to == 10 else x.astype(np.float32)


NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Max": np.maximum,
    "Clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "Floor": np.floor,
    "Neg": np.negative,
    "Less": np.less,
    "Equal": np.equal,
    "Where": np.where,
    "Gather": lambda x, i: x[i.astype(int)],
    "ReduceSum": lambda x, _: x.sum(keepdims=True, dtype=np.float32),
    "ReduceMin": lambda x, _: x.min(keepdims=True),
    "Expand": lambda x, n: np.broadcast_to(x, n.astype(int)),
    "Concat": lambda *x: np.concatenate(x),
    "Slice": lambda x, start, end, _: x[int(start[0]) : int(end[0])],
    "TopK": lambda x, _: np.argsort(-x, kind="stable").astype(np.float32),
}


def without_rounding(model: ir.Model, feed: Feed) -> Feed:
    """Every value, all integers being fp32."""
    found = {name: value.astype(np.float32) for name, value in feed.items()}
    found |= {v.name: v.const_value.numpy().astype(np.float32) for v in model.graph.initializers.values()}
    for node in model.graph:
        given = [found[value.name] for value in node.inputs]
        made = (
            _cast(given[0], node.attributes["to"].as_int()) if node.op_type == "Cast" else NUMPY[node.op_type](*given)
        )
        found[node.outputs[-1].name] = made
    return found


@given(graphs(), st.integers(0, 2**32))
def test_what_is_accepted_is_the_same_in_fp32(made: tuple[ir.Model, int], seed: int) -> None:
    model, n = made
    draw = np.random.default_rng(seed)
    # Small numbers are often equal; the largest there may be are the length's.
    feed = {
        name: np.where(draw.random(n) < 0.5, draw.integers(0, 3, n), draw.integers(n // 2, n + 1, n)) for name in "ab"
    }
    truth, facts = run(model, feed), _facts(model)
    # The longest axis, a constant's among them, is what an input may hold.
    known = ranges(model.graph, {v: f.shape or () for v, f in facts.items()}, {v: f.dtype for v, f in facts.items()}, n)
    for value in model.graph.outputs:
        if value in known:
            low, high = known[value]
            assert -LIMIT <= low <= truth[value.name].min()
            assert truth[value.name].max() <= high <= LIMIT
    accepted = not refusals(model, "migraphx")
    event(f"accepted: {accepted}")
    if accepted:
        floats = without_rounding(model, feed)
        for name, value in truth.items():
            assert np.array_equal(floats[name], value), name
