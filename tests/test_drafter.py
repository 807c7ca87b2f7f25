"""graphs.drafters, eager and through ONNX Runtime, against tests.naive behind the same context."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.pair import Pair
from exporter.tracing.signature import caches
from exporter.tracing.trace import trace
from exporter.weights.packer import Packer
from graphs.dialects.contrib import Contrib
from graphs.dialects.plain import Plain
from graphs.dialects.rounded import Rounded
from graphs.dialects.standard import Standard
from graphs.drafter import Drafter
from graphs.static_trees import EAGLE_1
from graphs.tree import TreeConfig
from runtime.backends.onnxruntime_engine import Engine
from tests.naive import Model, NaiveDrafter, Node, Noisy, brute_force_tree, reference_tree, static_tree
from tests.pairs import RandomPair, drafter_config
from tests.test_tree import check_tree, paths

DEMO = Path(__file__).parent.parent / "demo"
CAPACITY, SPARE = 48, 4
NEAR = 1e-4  # scores this close may change places: sums are taken in another order
NEAR_DRAWN = 1e-2  # noise prefers tokens whose logits, of some hundreds, have larger rounding errors

Run = Callable[..., list[Tensor]]  # tokens, hidden, path, count, past_length, noise -> the tree; caches stay inside


def tree_of(rows: int, serial: int = 2, heads: int = 5, **more: Any) -> TreeConfig:
    return TreeConfig(rows, serial, heads, **{"top_k": 14, "head_top_k": 35, "beam": 14, **more}).fitted(1009)


def naive_of(target: LlamaForCausalLM, state: dict[str, Tensor], config: dict[str, Any]) -> NaiveDrafter:
    known = LlamaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "model_type", "bias")})
    return NaiveDrafter(state, known, target.lm_head.weight.detach())


def expected(naive: Model, tree: TreeConfig) -> list[Node]:
    """A few nodes more than the tree has: what nearly made it."""
    rows = tree.rows + SPARE
    if tree.reference:
        return reference_tree(naive, rows, tree.serial_steps, tree.heads, tree.top_k, tree.head_top_k)
    if tree.paths:
        return sorted(static_tree(naive, tree.paths), key=lambda node: -node.score)[:rows]
    return brute_force_tree(
        naive, rows, tree.serial_steps, tree.heads, tree.top_k, tree.head_top_k, tree.beam, tree.wide
    )


def compare(found: list[Tensor], naive: Model, tree: TreeConfig, near: float = NEAR) -> None:
    """The same nodes with the same scores, but for nodes within ``near`` of the last one that was chosen."""
    token, depth, parent, mask, score = found
    check_tree(token, depth, parent, mask, score)
    nodes = expected(naive, tree)
    want = {node.path: float(node.score) for node in nodes}
    last = float(nodes[tree.rows - 2].score)
    chosen = dict(zip(paths(token, parent)[1:], score[1:].tolist(), strict=True))
    for path, value in chosen.items():
        assert path in want, f"{path} scores {value}, and the last node that may be chosen {last}"
        assert value == pytest.approx(want[path], abs=near)
    for node in nodes[: tree.rows - 1]:
        assert node.path in chosen or float(node.score) - last < near, f"{node} is missing"
    for path, value in chosen.items():
        assert value > last - near, f"{path} does not belong"


def load(module: Drafter, pair: Pair, tree: TreeConfig, positions: int) -> Drafter:
    """The drafter with the checkpoint's tensors, fused as the exporter does."""
    sources = pair.draft_sources(pair.used_heads(tree), positions)
    names = dict(module.named_parameters())
    state = {name: source.whole().to(names[name].dtype) for name, source in sources.items() if name in names}
    module.load_state_dict(state, assign=True)
    return module


def eager(pair: Pair, tree: TreeConfig, capacity: int = CAPACITY) -> Run:
    module = load(pair.modules(tree, capacity, capacity + 3)["draft"], pair, tree, capacity + 3)
    shape = pair.draft_shape
    held = caches(shape.layers, shape.kv_heads, capacity, shape.head_dim, torch.float32)

    @torch.inference_mode()
    def run(*inputs: Tensor) -> list[Tensor]:
        nonlocal held
        *tree_out, held = (*(out := module(*inputs[:5], held, *inputs[5:]))[:5], list(out[5:]))
        return tree_out

    return run


def onnx(pair: Pair, tree: TreeConfig, dialect: type[Plain], folder: Path, capacity: int = CAPACITY) -> Run:
    """The draft graph as a bundle holds it, its caches written in place."""
    positions = capacity + 3
    module = pair.modules(tree, capacity, positions, dialect)["draft"]
    sources = pair.draft_sources(pair.used_heads(tree), positions)
    model = trace(
        module, Packer(folder, torch.float32, lambda _: None).pack("draft.bin", sources), folder, torch.float32
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    engine, shape, rows = Engine(session), pair.draft_shape, tree.rows
    held = caches(shape.layers, shape.kv_heads, capacity, shape.head_dim, torch.float32)
    # What lies behind the filled part of a cache is left over from earlier cycles: it must never be read.
    slabs = [t.fill_(1e4).numpy() for t in held]
    kinds = [(part, i) for i in range(shape.layers) for part in ("key", "value")]
    tensors = {
        f"{time}_{part}.{i}": slab for (part, i), slab in zip(kinds, slabs, strict=True) for time in ("past", "present")
    }

    def run(*inputs: Tensor) -> list[Tensor]:
        names = ("tokens", "hidden", "path", "count", "past_length", "noise")
        out = {
            "tree_tokens": np.zeros(rows, np.int64),
            "tree_depth": np.zeros(rows, np.int64),
            "tree_parent": np.zeros(rows, np.int64),
            "tree_mask": np.zeros((rows, rows), np.bool_),
            "tree_score": np.zeros(rows, np.float32),
        }
        feed = {name: np.ascontiguousarray(value.numpy()) for name, value in zip(names, inputs, strict=False)}
        for tensor in session.get_inputs():
            if tensor.name == "noise":
                feed.setdefault("noise", np.zeros(tensor.shape, np.float32))
        engine.bind(feed | out | tensors)()
        return [torch.from_numpy(value) for value in out.values()]

    return run


def cycles(
    run: Run,
    naive: NaiveDrafter,
    tree: TreeConfig,
    hidden_size: int,
    vocabulary: int,
    seed: int,
    rows_of: Callable[[list[int]], Tensor] | None = None,
) -> None:
    """A prompt, then cycles that accept paths of different length, whose rows lie scattered in the target's output.

    Half of the cycles are padded: more tokens than ``count`` says, of which the tree must know nothing. Most are
    drafted under noise. rows_of: what the drafter reads of the target at the positions of a text, instead of random
    rows.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    hidden = torch.zeros(0, hidden_size)
    first = int(torch.randint(0, vocabulary, (1,), generator=draw)) if rows_of else 0
    ids = getattr(naive, "ids", torch.arange(vocabulary))
    for cycle, (count, temperature) in enumerate(
        zip((9, 1, 3, min(8, tree.rows), 2), (1.0, 0.0, 0.3, 2.0, 0.7), strict=True)
    ):
        padding = 2 * (cycle % 2)
        buffer = torch.randn(max(tree.rows, count) + padding, hidden_size, generator=draw)
        path = torch.cat(
            (torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(len(buffer) - 1, generator=draw).sort().values)
        )[: count + padding]
        path[:count] = path[torch.randperm(count, generator=draw)].sort().values
        after = torch.randint(0, vocabulary, (count + padding,), generator=draw)
        past = torch.tensor([len(tokens)])
        if rows_of:
            buffer[path[:count]] = rows_of([first, *tokens, *after[: count - 1].tolist()])[-count:]
        noise = temperature * -torch.log(
            torch.empty(tree.serial_steps + tree.heads, vocabulary).exponential_(generator=draw)
        )
        drawn = () if tree.reference else (noise[: tree.depth, ids].contiguous(),)
        found = run(after, buffer, path, torch.tensor([count]), past, *drawn)
        tokens += after[:count].tolist()
        hidden = torch.cat((hidden, buffer[path[:count]]))
        assert found[0][0] == tokens[-1]
        model = naive.read(tokens, hidden)
        if drawn:
            compare(found, Noisy(model, noise.numpy(), tree.serial_steps), tree, NEAR_DRAWN if temperature else NEAR)
        else:
            compare(found, model, tree)


@cache
def random_pair(folder: Path, layers: int, heads: int, head_dim: int | None = None) -> tuple[Pair, NaiveDrafter]:
    fields = {"head_dim": head_dim} if head_dim else {}
    # Without a final norm the features of a random drafter are large: a small lm_head keeps rounding well below NEAR.
    made = RandomPair(fields, layers=layers, heads=heads, fc_bias=heads != 2, seed=10 * layers + heads, scale=1.0)
    where = folder / f"{layers}-{heads}-{head_dim}"
    target, drafter = made.write(where)
    model = made.make_target()
    naive = naive_of(model, made.make_drafter(model), drafter_config(model.config, layers))
    return Pair(Checkpoint(str(target), "target"), Checkpoint(str(drafter), "drafter")), naive


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


def eagle_2(rows: int, beam: int, serial: int = 6) -> TreeConfig:
    return tree_of(rows, serial=serial, heads=0, top_k=10, beam=beam, wide=True)


CONFIGS = [
    # layers, heads of the checkpoint, head dim, tree
    *((2, 5, None, tree_of(rows)) for rows in (2, 64)),
    (2, 5, None, tree_of(33, beam=1)),
    (1, 5, 24, tree_of(33)),
    (1, 0, None, tree_of(8, heads=0)),
    (1, 0, None, eagle_2(60, beam=10)),
    (1, 0, 24, eagle_2(8, beam=2, serial=5)),
    (1, 0, None, TreeConfig.static(EAGLE_1)),
    (1, 0, None, replace(TreeConfig.static(EAGLE_1), rows=9)),
    (3, 5, None, tree_of(16)),
    (3, 2, None, tree_of(33, heads=2, serial=3, beam=6)),
    (3, 0, 24, tree_of(16, heads=0, serial=3)),
    (2, 0, None, tree_of(8, heads=0, serial=1)),
    (2, 5, None, tree_of(16, heads=3, serial=3)),  # fewer heads than the checkpoint has
    (2, 5, None, tree_of(8, top_k=1, head_top_k=1, beam=1)),  # a chain
    *((2, 5, None, tree_of(rows, reference=True)) for rows in (8, 64)),
    (3, 2, None, tree_of(33, heads=2, reference=True)),
    *(
        pytest.param(2, 5, None, tree_of(rows, reference=reference), marks=pytest.mark.exhaustive)
        for rows in (2, 3, 5, 8, 16, 33)
        for reference in (False, True)
        if (rows, reference) not in ((2, False), (8, True))
    ),
    *(
        pytest.param(2, 5, None, tree_of(rows, top_k=1, head_top_k=1, beam=1), marks=pytest.mark.exhaustive)
        for rows in (2, 3, 5)
    ),
    *(
        pytest.param(2, 5, None, tree_of(rows, beam=beam), marks=pytest.mark.exhaustive)
        for rows, beam in ((16, 4), (64, 5))
    ),
    pytest.param(1, 2, None, tree_of(16, heads=2), marks=pytest.mark.exhaustive),
    pytest.param(1, 0, 24, tree_of(16, heads=0, reference=True), marks=pytest.mark.exhaustive),
]


def _id(value: object) -> str:
    if not isinstance(value, TreeConfig):
        return value.__name__ if isinstance(value, type) else str(value)
    kind = "reference" if value.reference else "chain" if value.top_k == 1 else f"beam{value.beam}"
    kind = "static" if value.paths else f"wide-{kind}" if value.wide else kind
    return f"R{value.rows}-{value.serial_steps}+{value.heads}-{kind}"


@pytest.mark.parametrize(("layers", "heads", "head_dim", "tree"), CONFIGS, ids=_id)
def test_eager_tree_is_the_naive_one(
    folder: Path, layers: int, heads: int, head_dim: int | None, tree: TreeConfig
) -> None:
    pair, naive = random_pair(folder, layers, heads, head_dim)
    assert (pair.draft_shape.layers, pair.heads) == (layers, heads)
    cycles(eager(pair, tree), naive, tree, 48, 1009, seed=tree.rows)


EXPORTED = [
    # Contrib takes head sizes in steps of 16 only: exporter.backends.specs.layout.
    pytest.param(2, 5, 16, tree_of(16, beam=4), Contrib, marks=pytest.mark.exhaustive),
    pytest.param(2, 5, 16, tree_of(64), Contrib, marks=pytest.mark.exhaustive),
    pytest.param(2, 5, 16, tree_of(33, reference=True), Contrib, marks=pytest.mark.exhaustive),
    pytest.param(3, 2, 16, tree_of(16, heads=2, serial=3, beam=6), Contrib, marks=pytest.mark.exhaustive),
    (2, 5, 16, tree_of(2), Contrib),
    pytest.param(3, 2, None, tree_of(16, heads=2, serial=3, beam=6), Standard, marks=pytest.mark.exhaustive),
    pytest.param(1, 5, 24, tree_of(8, top_k=1, head_top_k=1, beam=1), Standard, marks=pytest.mark.exhaustive),
    (2, 2, 24, tree_of(16, heads=2, beam=4), Rounded),
    (1, 0, 16, eagle_2(16, beam=3, serial=4), Contrib),
    (1, 0, None, TreeConfig.static(EAGLE_1[:9]), Standard),
    pytest.param(1, 0, None, TreeConfig.static(EAGLE_1), Standard, marks=pytest.mark.exhaustive),
    pytest.param(1, 0, 16, eagle_2(60, beam=10), Contrib, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("layers", "heads", "head_dim", "tree", "dialect"), EXPORTED, ids=_id)
def test_exported_tree_is_the_naive_one(
    folder: Path, tmp_path: Path, layers: int, heads: int, head_dim: int | None, tree: TreeConfig, dialect: type[Plain]
) -> None:
    pair, naive = random_pair(folder, layers, heads, head_dim)
    cycles(onnx(pair, tree, dialect, tmp_path), naive, tree, 48, 1009, seed=tree.rows)


def test_biases_that_only_the_tensors_show(tmp_path: Path) -> None:
    """As of an EAGLE for Qwen2, whose queries, keys and values have them."""
    made = RandomPair(layers=1, heads=0, scale=1.0)
    target, drafter = made.write(tmp_path)
    model = made.make_target()
    state, draw = made.make_drafter(model), torch.Generator().manual_seed(5)
    for part in "qkv":
        width = state[f"layers.0.self_attn.{part}_proj.weight"].shape[0]
        state[f"layers.0.self_attn.{part}_proj.bias"] = torch.randn(width, generator=draw)
    torch.save(state, drafter / "pytorch_model.bin")
    config = drafter_config(model.config, 1) | {"attention_bias": True}
    naive = naive_of(model, state | {"layers.0.self_attn.o_proj.bias": torch.zeros(48)}, config)
    pair = Pair(Checkpoint(str(target), "target"), Checkpoint(str(drafter), "drafter"))
    tree = eagle_2(16, beam=3, serial=4)
    cycles(eager(pair, tree), naive, tree, 48, 1009, seed=0)


@torch.inference_mode()
def test_heads_equal_their_loops(folder: Path) -> None:
    pair, naive = random_pair(folder, 2, 5)
    module = load(pair.modules(tree_of(64), 8, 8)["draft"], pair, tree_of(64), 8)
    tokens, hidden = torch.randint(0, 1009, (2, 7)), torch.randn(2, 7, 48)
    fused = module.heads(torch.cat([module.fuse(t, h) for t, h in zip(tokens, hidden, strict=True)], dim=-1))
    for head in range(5):
        for row in range(7):
            loop = naive.head(head, ((int(tokens[0, row]), hidden[0, row]), (int(tokens[1, row]), hidden[1, row])))
            torch.testing.assert_close(fused[head, row], loop, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_cut_off_drafter_fills_the_same_caches(folder: Path) -> None:
    pair, _ = random_pair(folder, 2, 5)
    tree = tree_of(8)
    modules = pair.modules(tree, CAPACITY, CAPACITY + 3)
    grown, cut = (load(modules[name], pair, tree, CAPACITY + 3) for name in ("draft", "extend"))
    tokens, hidden = torch.randint(0, 1009, (6,)), torch.randn(6, 48)
    inputs = (tokens, hidden, torch.arange(6), torch.tensor([6]), torch.tensor([0]))
    whole, part = (
        m(*inputs, caches(2, pair.draft_shape.kv_heads, CAPACITY, pair.draft_shape.head_dim, torch.float32))
        for m in (grown, cut)
    )
    assert len(part) == 4
    for a, b in zip(whole[5:], part, strict=True):
        assert torch.equal(a, b)
        assert b[:, :, :6].abs().min() > 0
        assert not b[:, :, 6:].any()


@pytest.fixture(scope="module")
def demo() -> tuple[Pair, NaiveDrafter, LlamaForCausalLM]:
    if not (DEMO / "target").is_dir():
        pytest.skip("the demo pair is not there")
    pair = Pair(Checkpoint(str(DEMO / "target"), "target"), Checkpoint(str(DEMO / "drafter"), "drafter"))
    model = LlamaForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    state = torch.load(DEMO / "drafter" / "pytorch_model.bin", weights_only=True)
    config = json.loads((DEMO / "drafter" / "config.json").read_text("utf-8"))
    state = {name.replace("mlp.mlp.", "mlp."): tensor for name, tensor in state.items()}
    return pair, naive_of(model, state, config), model


@pytest.mark.parametrize(
    ("how", "tree"),
    [
        ("eager", tree_of(64)),
        ("eager", tree_of(33, reference=True)),
        pytest.param("onnx", tree_of(16, beam=4), marks=pytest.mark.exhaustive),
    ],
    ids=_id,
)
def test_demo_pair_grows_the_naive_tree(
    demo: tuple[Pair, NaiveDrafter, LlamaForCausalLM], how: str, tree: TreeConfig, tmp_path: Path
) -> None:
    """Real text, and the target's own hidden rows."""
    pair, naive, model = demo
    ids = pair.tokenizer("def read(self, size=-1):\n    if self.closed:\n        raise ValueError(")["input_ids"]
    with torch.inference_mode():
        ids += model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0].float()
    capacity = len(ids) + 12
    run = eager(pair, tree, capacity) if how == "eager" else onnx(pair, tree, Contrib, tmp_path, capacity)
    at = 0
    for count in (len(ids) - 12, 1, 4, 2, 4):
        rows = torch.randn(64, hidden.shape[1])
        path = torch.arange(count) if count > 8 else torch.arange(count) * 7
        rows = rows if len(path) <= 64 else torch.randn(len(path), hidden.shape[1])
        rows[path] = hidden[at : at + count]
        after = torch.tensor(ids[at + 1 : at + count + 1])
        found = run(after, rows, path, torch.tensor([count]), torch.tensor([at]))
        at += count
        compare(found, naive.read(ids[1 : at + 1], hidden[:at]), tree)
