"""graphs.dialects.plain: every operation against transformers and loops, eager and exported, on odd shapes."""

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from exporter.tracing import branches
from exporter.tracing.capture import capture
from graphs.dialects import exact
from graphs.dialects.basic import Basic
from graphs.dialects.contrib import Contrib
from graphs.dialects.decomposed import Decomposed
from graphs.dialects.exact import BLOCK, Exact
from graphs.dialects.plain import Past, Plain, Reach, Rows
from graphs.dialects.standard import Standard
from runtime.bundle.graphs import PANEL
from tests.naive import attention

HEADS, KV, CAPACITY, POSITIONS, EPS = 6, 3, 19, 1300, 1e-5
NEAR = {"rtol": 1e-4, "atol": 1e-5}


def tables(d: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(POSITIONS)[:, None] * 100.0 ** (-torch.arange(0, d, 2) / d)
    return angle.cos(), angle.sin()


class Ops(nn.Module):
    """All operations of a dialect behind one signature: a pass that writes, and two that look on."""

    def __init__(self, ops: type[Plain], d: int) -> None:
        super().__init__()
        self.ops = ops
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, HEADS * d))
        self.cos, self.sin = (nn.Parameter(t) for t in tables(d))

    def rows(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Rows:
        return Rows(q, k, v, HEADS, KV, position, self.cos, self.sin)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, depth: Tensor, mask: Tensor, past: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, ...]:
        rows = self.rows(q, k, v, past + depth)
        attention_mask = self.ops.attention_mask(Reach(mask, q.shape[0], past, keys, HEADS // KV))
        out, new_keys, new_values = self.ops.attend(rows, (keys, values), past, attention_mask)
        in_order = self.rows(q, k, v, past + torch.arange(q.shape[0]))
        causal = self.ops.attention_mask(Reach(None, q.shape[0], past, keys, HEADS // KV))
        plain, *_ = self.ops.attend(in_order, (keys, values), past, causal)
        return self.ops.rms_norm(q, self.norm, EPS), out, plain, new_keys, new_values


class Peek(nn.Module):
    """Three rows and then two rows beside a cache into which a pass has just written, of whose rows all but one
    count."""

    def __init__(self, ops: type[Plain], d: int) -> None:
        super().__init__()
        self.ops = ops
        self.cos, self.sin = (nn.Parameter(t) for t in tables(d))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, length: Tensor, keys: Tensor, values: Tensor, few: Tensor
    ) -> tuple[Tensor, ...]:
        def rows(i: int, j: int, position: Tensor) -> Rows:
            return Rows(*(x[i:j] for x in (q, k, v)), HEADS, KV, position, self.cos, self.sin)

        first = rows(0, 3, length + torch.arange(3))
        attention_mask = self.ops.attention_mask(Reach(None, 3, length, keys))
        _, *written = self.ops.attend(first, (keys, values), length, attention_mask)
        count = torch.full((1,), 2, dtype=torch.int64)
        past = Past((keys, values), length, (written[0], written[1]), count)
        first, own = self.ops.attend_readonly(rows(3, 6, (length + 2).expand(3)), past, [], seen[:3, :3])
        second, _ = self.ops.attend_readonly(rows(6, 8, (length + 3).expand(2)), past, [own], seen[3:])
        values_k, indices = self.ops.top_k(few, 7)
        picked = self.ops.gather(few, indices[0])
        best = self.ops.best(few.reshape(-1), 50)
        return first, second, values_k, indices, picked, best


class Sums(nn.Module):
    """The sums over positions in ``Exact``, divided by each other."""

    ops = Exact

    def forward(self, exponentials: Tensor, values: Tensor, ones: Tensor) -> tuple[Tensor]:
        return (exact._sum(exponentials, values) / exact._product(exponentials, ones),)


def inputs(d: int, rows: int, past: int, seed: int, capacity: int = CAPACITY) -> dict[str, Tensor]:
    """A random tree of rows over a cache whose unused part holds leftovers."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, HEADS * d, generator=draw)
    k, v = torch.randn(2, rows, KV * d, generator=draw)
    keys, values = torch.randn(2, 1, KV, capacity, d, generator=draw)
    keys[:, :, past:], values[:, :, past:] = 50.0, -50.0
    depth, mask = torch.zeros(rows, dtype=torch.int64), torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        parent = int(torch.randint(0, row, (1,), generator=draw))
        depth[row] = depth[parent] + 1
        mask[row] |= mask[parent]
    return {
        "q": q,
        "k": k,
        "v": v,
        "depth": depth,
        "mask": mask,
        "past": torch.tensor([past]),
        "keys": keys,
        "values": values,
    }


def rotated(x: Tensor, heads: int, position: Tensor, d: int) -> Tensor:
    """[n, heads * d] -> [n, heads, d], by transformers."""
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=HEADS * d,
            num_attention_heads=HEADS,
            head_dim=d,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        )
    )
    x = x.reshape(1, len(x), heads, d).transpose(1, 2)
    return apply_rotary_pos_emb(x, x, *rotary(x, position[None]))[0][0].transpose(0, 1)


def expected_pass(d: int, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    rows, past = len(x["q"]), int(x["past"])
    norm = LlamaRMSNorm(HEADS * d, EPS)
    norm.weight.data = torch.linspace(0.5, 1.5, HEADS * d)

    def attend(depth: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = rotated(x["k"], KV, past + depth, d), x["v"].reshape(rows, KV, d)
        keys = torch.cat((x["keys"][0, :, :past].transpose(0, 1), k))
        values = torch.cat((x["values"][0, :, :past].transpose(0, 1), v))
        seen = torch.cat((torch.ones(rows, past, dtype=torch.bool), mask), dim=1)
        return attention(rotated(x["q"], HEADS, past + depth, d), keys, values, seen), keys, values

    out, keys, values = attend(x["depth"], x["mask"])
    causal, *_ = attend(torch.arange(rows), torch.ones(rows, rows, dtype=torch.bool).tril())
    return norm(x["q"]).detach(), out, causal, keys.transpose(0, 1), values.transpose(0, 1)


def check_pass(found: list[Tensor], d: int, x: dict[str, Tensor], near: dict[str, float] = NEAR) -> None:
    past, filled = int(x["past"]), int(x["past"]) + len(x["q"])
    norm, out, causal, keys, values = found
    if keys.shape[2] != x["keys"].shape[2]:  # the rows' part alone
        keys, values = (torch.cat((x[n][:, :, :past], new), dim=2) for n, new in (("keys", keys), ("values", values)))
    cut = (norm, out, causal, keys[0, :, :filled], values[0, :, :filled])
    for name, a, b in zip(["norm", "tree", "causal", "keys", "values"], cut, expected_pass(d, x), strict=True):
        torch.testing.assert_close(a, b, **near, msg=lambda m, name=name: f"{name}: {m}")


def peek_inputs(d: int, length: int, seed: int) -> dict[str, Tensor]:
    x = inputs(d, 8, length, seed)
    draw = torch.Generator().manual_seed(seed)
    few = torch.randint(0, 4, (9, 9), generator=draw).float()  # many ties
    # The first three rows are siblings, the last two children of rows 2 and 0, or whatever the seed makes of them.
    seen = (torch.rand(5, 5, generator=draw) < 0.5).tril() | torch.eye(5, dtype=torch.bool)
    return {k: x[k] for k in ("q", "k", "v")} | {
        "seen": seen,
        "length": x["past"],
        "keys": x["keys"],
        "values": x["values"],
        "few": few,
    }


def check_peek(found: list[Tensor], d: int, x: dict[str, Tensor]) -> None:
    """Attention over cache and rows in one piece; the order of equal values by Python's stable sort."""
    length = int(x["length"])
    position = torch.tensor([length, length + 1, *[length + 2] * 3, *[length + 3] * 2])
    real = [0, 1, 3, 4, 5, 6, 7]  # row 2 was written, and does not count
    keys = torch.cat((x["keys"][0, :, :length].transpose(0, 1), rotated(x["k"][real], KV, position, d)))
    values = torch.cat((x["values"][0, :, :length].transpose(0, 1), x["v"][real].reshape(7, KV, d)))
    seen = torch.cat((torch.ones(5, length + 2, dtype=torch.bool), x["seen"]), dim=1)
    whole = attention(rotated(x["q"][3:], HEADS, position[2:], d), keys, values, seen)
    torch.testing.assert_close(torch.cat(found[:2]), whole, **NEAR)
    for line, top, index in zip(x["few"].tolist(), found[2].tolist(), found[3].tolist(), strict=True):
        assert index == sorted(range(9), key=lambda i: -line[i])[:7]
        assert top == [line[i] for i in index]
    assert torch.equal(found[4], torch.stack([x["few"][i] for i in found[3][0].tolist()]))
    flat = x["few"].reshape(-1).tolist()
    assert found[5].tolist() == sorted(range(len(flat)), key=lambda i: -flat[i])[:50]


@cache
def exported_pass(ops: type[Plain], d: int) -> Callable[..., list[Tensor]]:
    axes = {name: {0: "rows"} for name in ("q", "k", "v", "depth")} | {"mask": {0: "rows", 1: "rows"}}
    if ops.block:
        axes |= {name: {2: "positions"} for name in ("keys", "values")}
    part = ops.value_part(d)

    def cached(x: dict[str, Tensor]) -> dict[str, Tensor]:
        return x | {
            "values": torch.cat(x["values"].split(part, dim=-1), dim=2).reshape(1, -1, x["keys"].shape[2], part)
        }

    run = export(Ops(ops, d), cached(inputs(d, 4, 3, 0, 3 * ops.block if ops.block else CAPACITY)), axes, 5)

    def whole(**x: Tensor) -> list[Tensor]:
        *others, values = run(**cached(x))
        return [*others, torch.cat(values.reshape(1, KV, -1, *values.shape[2:]).unbind(2), dim=-1)]

    whole.graph = run.graph  # type: ignore[attr-defined]
    return whole


def export(
    module: Ops | Peek | Sums, example: dict[str, Tensor], axes: dict[str, dict[int, str]], outputs: int
) -> Callable[..., list[Tensor]]:
    """A traced module in ONNX Runtime, with no graph optimization in between."""
    given = [(name, tensor, axes.get(name, {})) for name, tensor in example.items()]
    model = capture(module, given, [f"out{i}" for i in range(outputs)], module.ops.opset)
    for name, parameter in module.named_parameters():
        model.graph.initializers[name].const_value = ir.tensor(parameter.detach().numpy(), name=name)
    for node in model.graph:
        for value in node.outputs:  # some of the dialects' shapes are data
            value.shape = None
    branches.make(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    used = [name for name in example if name in names]

    def run(**tensors: Tensor) -> list[Tensor]:
        feed = {name: np.ascontiguousarray(tensors[name].numpy()) for name in used}
        return [torch.from_numpy(np.asarray(out)) for out in session.run(None, feed)]

    run.graph = model.graph  # type: ignore[attr-defined]
    return run


# Rows and filled part of the cache, up to the last position. Contrib rotates head sizes in steps of 16 only.
PASSES = [(rows, past) for rows in (1, 2, 5, 9) for past in (1, 2, 7, CAPACITY - rows)]
LONG = [(rows, past) for rows in (1, 2, 9, 70) for past in (127, 128, 955, 1023, 1024, 1230)]


@pytest.mark.parametrize("d", [24, 16])
@pytest.mark.parametrize("ops", [Plain, Standard, Contrib, Basic])
@torch.inference_mode()
def test_a_pass_eager(ops: type[Plain], d: int) -> None:
    for seed, (rows, past) in enumerate([*PASSES, (1, 0), (9, 0)]):
        x = inputs(d, rows, past, seed)
        before = x["keys"].clone()
        check_pass(list(Ops(ops, d)(*x.values())), d, x)
        assert torch.equal(x["keys"], before)  # eager caches are values: the caller's are untouched


@pytest.mark.parametrize("d", [24, 16])
@torch.inference_mode()
def test_peek_eager(d: int) -> None:
    for length in (1, 2, 11, CAPACITY - 3):
        x = peek_inputs(d, length, length)
        for ops in (Plain, Basic):
            check_peek(list(Peek(ops, d)(*x.values())), d, x)


@pytest.mark.parametrize("d", [24, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_caches_of_several_panels(d: int) -> None:
    """Caches of any number of blocks, whose unused part holds leftovers."""
    run = exported_pass(Exact, d)
    for seed, (rows, past) in enumerate(LONG):
        for blocks in {-(-(past + rows) // BLOCK), 11}:
            x = inputs(d, rows, past, seed, blocks * BLOCK)
            check_pass(run(**x), d, x, {"rtol": 1e-4, "atol": 2e-4})  # angles of later positions are rounded more


@pytest.mark.parametrize("d", [64, 24])
def test_no_bit_of_a_sum_depends_on_what_is_beside_its_terms(d: int) -> None:
    """Neither on other rows, nor on zeros between and behind the terms, unless these pass a border."""
    draw, columns = torch.Generator().manual_seed(0), Exact.value_part(d)
    positions = 2 * PANEL + 3 * BLOCK
    x = {
        "exponentials": torch.zeros(1, KV, 1, 9, positions),
        "values": torch.randn(1, KV * 2, positions, columns, generator=draw),
        "ones": torch.ones(positions, 1),
    }
    axes = {"exponentials": {3: "rows", 4: "positions"}, "values": {2: "positions"}, "ones": {0: "positions"}}
    run = export(Sums(), x, axes, 1)

    def first_row(slots: Tensor, terms: Tensor, values: Tensor, rows: int, end: int) -> bytes:
        """The sum of a row's terms at these positions, beside other rows."""
        given = {name: tensor.clone() for name, tensor in x.items()}
        given["exponentials"][:, :, :, 1:] = torch.rand(1, KV, 1, 8, positions, generator=draw)
        given["exponentials"][..., 0, slots] = terms
        given["values"][:, :, slots] = values
        (out,) = run(
            exponentials=given["exponentials"][:, :, :, :rows, :end],
            values=given["values"][:, :, :end],
            ones=given["ones"][:end],
        )
        weights, by_head = terms[0, :, 0].double(), values.reshape(KV, 2, -1, columns).double()
        wanted = torch.einsum("ht,hptc->hpc", weights, by_head) / weights.sum(-1)[:, None, None]
        torch.testing.assert_close(out[0, :, :, 0].double(), wanted, rtol=1e-4, atol=1e-5)
        return out[:, :, :, 0].numpy().tobytes()

    # The last terms belong to a tree: their order is given, their places are not.
    for settled, last in ((1, 20), (900, 60), (1100, 60), (1500, 500), (2100, 60)):
        terms = torch.rand(1, KV, 1, settled + last, generator=draw)
        values = torch.randn(1, KV * 2, settled + last, columns, generator=draw)
        seen, room = set(), min(192, -(-(settled + last) // PANEL) * PANEL - settled - last)
        for rows in (1, 2, 3, 9):
            for gaps in (0, room):
                moved = torch.randperm(last + gaps, generator=draw)[:last].sort().values
                slots = torch.cat((torch.arange(settled), settled + moved))
                for end in {int(slots[-1]) + 1, -(-(int(slots[-1]) + 1) // BLOCK) * BLOCK, positions}:
                    seen.add(first_row(slots, terms, values, rows, end))
        assert len(seen) == 1
        beyond = torch.cat((torch.arange(settled), settled + torch.arange(last) + room + last // 2))
        passes_border = beyond[-1] // PANEL > (settled + last - 1) // PANEL
        assert passes_border == (first_row(beyond, terms, values, 1, positions) not in seen)


@pytest.mark.parametrize(
    ("ops", "d", "operators"),
    [
        (Standard, 24, {"RMSNormalization", "RotaryEmbedding", "TensorScatter", "Attention"}),
        (Decomposed, 24, {"RMSNormalization", "RotaryEmbedding", "TensorScatter", "Softmax"}),
        (Exact, 24, {"RMSNormalization", "RotaryEmbedding", "TensorScatter", "FusedMatMul"}),
        (Contrib, 16, {"RMSNormalization", "GroupQueryAttention"}),
        (Contrib, 48, {"RMSNormalization", "GroupQueryAttention"}),
        (Basic, 24, {"MatMul", "Softmax"}),
    ],
)
def test_a_pass_exported(ops: type[Plain], d: int, operators: set[str]) -> None:
    run, capacity = exported_pass(ops, d), ops.block or CAPACITY
    assert operators <= {node.op_type for node in run.graph.all_nodes()}  # type: ignore[attr-defined]
    for seed, (rows, past) in enumerate(PASSES):
        x = inputs(d, rows, past, seed, capacity)
        check_pass(run(**x), d, x)
    for rows in (1, 2, 5, 9, CAPACITY):  # a prompt's first chunk
        x = inputs(d, rows, 0, rows, capacity) | {
            "depth": torch.arange(rows),
            "mask": torch.ones(rows, rows, dtype=torch.bool).tril(),
        }
        check_pass(run(**x), d, x)


EMPTY = pytest.mark.xfail(
    strict=True, reason="GroupQueryAttention takes rows over an empty cache for a prompt in order"
)


@pytest.mark.parametrize(
    ("ops", "d"), [(Standard, 24), (Exact, 24), (Basic, 24), pytest.param(Contrib, 16, marks=EMPTY)]
)
def test_a_tree_over_an_empty_cache_exported(ops: type[Plain], d: int) -> None:
    run = exported_pass(ops, d)
    x = inputs(d, 9, 0, 1, ops.block or CAPACITY)
    check_pass(run(**x), d, x)


@pytest.mark.parametrize(("ops", "d"), [(Standard, 24), (Contrib, 16), (Contrib, 48), (Basic, 24)])
def test_peek_exported(ops: type[Plain], d: int) -> None:
    run = export(Peek(ops, d), peek_inputs(d, 3, 0), {}, 6)
    for length in (1, 2, 11, CAPACITY - 3):
        x = peek_inputs(d, length, length)
        check_peek(run(**x), d, x)


def test_norm_sums_in_fp32() -> None:
    """Squares of fp16 numbers above 256 overflow fp16."""
    x, weight = torch.full((2, 64), 1000.0, dtype=torch.float16), torch.ones(64, dtype=torch.float16)
    assert torch.equal(Plain.rms_norm(x, weight, EPS), torch.ones_like(x))


def test_top_k_of_equal_values_takes_the_lower_index() -> None:
    values, indices = Plain.top_k(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0]]), 5)
    assert indices.tolist() == [[1, 2, 4, 3, 5]]
    assert values.tolist() == [[3, 3, 3, 2, 2]]
    assert Plain.top_k(torch.zeros(5000), 50)[1].tolist() == list(range(50))


def test_dialects_are_one_expression_eagerly() -> None:
    x = inputs(16, 5, 7, 0)
    plain = Ops(Plain, 16)(*x.values())
    for ops in (Standard, Contrib, Exact):
        for a, b in zip(plain, Ops(ops, 16)(*x.values()), strict=True):
            assert torch.equal(a, b)
