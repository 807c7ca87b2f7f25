"""graphs.target against transformers, eager and through ONNX Runtime: chunks, single rows and trees over a cache."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.pair import Pair
from exporter.tracing.capture import capture
from exporter.tracing.signature import caches
from exporter.tracing.trace import trace
from exporter.weights.packer import Packer
from exporter.weights.quantize import quantize, quantized
from exporter.weights.source import Source, is_matrix
from graphs.dialects.contrib import Contrib
from graphs.dialects.exact import Exact
from graphs.dialects.plain import Plain
from graphs.dialects.quantization import UNQUANTIZED, Scheme, Schemes, dequantize
from graphs.dialects.standard import Standard
from graphs.target import Target, choose
from graphs.tree import TreeConfig
from runtime.backends.onnxruntime_engine import Engine
from tests.pairs import RandomPair

CAPACITY, TREE = 40, TreeConfig(8, 2, 0, 4, 4, 4)
NEAR = 2e-5  # relative to the largest value

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head dim 24": {"head_dim": 24},
    "head dim 32, one kv head": {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 1},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    # the least window that limits nothing
    "mistral": {"model_type": "mistral", "head_dim": 24, "sliding_window": CAPACITY},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "rms_norm_eps": 0.05},
    "qwen3 with biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "one layer, full heads, 17 tokens": {"num_hidden_layers": 1, "num_key_value_heads": 6, "vocab_size": 17},
}

Run = Callable[[Tensor, Tensor, Tensor, int], list[Tensor]]  # tokens, depth, mask, past -> choice, logits, hidden


@cache
def made(name: str, folder: Path) -> tuple[PreTrainedModel, Pair]:
    pair = RandomPair(SHAPES[name], seed=sum(map(ord, name)))
    target, drafter = pair.write(folder / name)
    return pair.make_target(), Pair(Checkpoint(str(target), "target"), Checkpoint(str(drafter), "drafter"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


def eager(pair: Pair) -> Run:
    module = pair.modules(TREE, CAPACITY, CAPACITY)["target"]
    module.load_state_dict(
        {n: torch.cat(list(s.slices())).float() for n, s in pair.target_sources(CAPACITY).items()}, assign=True
    )
    shape = pair.target_shape
    held = caches(shape.layers, shape.kv_heads, CAPACITY, shape.head_dim, torch.float32)

    @torch.inference_mode()
    def run(tokens: Tensor, depth: Tensor, mask: Tensor, past: int) -> list[Tensor]:
        nonlocal held
        choice, logits, hidden, *held = module(tokens, depth, mask, None, torch.tensor([past]), held)
        return [choice, logits, hidden]

    return run


def onnx(pair: Pair, dialect: type[Plain], folder: Path, schemes: Schemes = UNQUANTIZED) -> Run:
    """The target graph as a bundle holds it, its caches written in place over leftovers."""
    module = pair.modules(TREE, CAPACITY, CAPACITY, dialect, schemes={"target": schemes})["target"]
    sources = dict[str, Source]()
    for name, source in pair.target_sources(CAPACITY).items():
        scheme = schemes.of(name, source.shape[-1]) if is_matrix(name, source) else None
        sources |= quantized(source, name, scheme, torch.float32) if scheme else {name: source}
    locations = Packer(folder, torch.float32, lambda _: None).pack("target.bin", sources)
    model = trace(module, locations, folder, torch.float32)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    engine, shape = Engine(session), pair.target_shape
    positions = -(-CAPACITY // dialect.block) * dialect.block if dialect.block else CAPACITY
    empty = caches(shape.layers, shape.kv_heads, positions, shape.head_dim, torch.float32, dialect)
    slabs = [t.fill_(1e4).numpy() for t in empty]
    kinds = [(part, i) for i in range(shape.layers) for part in ("key", "value")]
    tensors = {
        f"{time}_{part}.{i}": slab for (part, i), slab in zip(kinds, slabs, strict=True) for time in ("past", "present")
    }

    def run(tokens: Tensor, depth: Tensor, mask: Tensor, past: int) -> list[Tensor]:
        rows = len(tokens)
        out = {
            "choice": np.zeros(rows, np.int64),
            "logits": np.zeros((rows, shape.vocabulary), np.float32),
            "hidden": np.zeros((rows, shape.hidden), np.float32),
        }
        feed = {
            "tokens": tokens.numpy(),
            "depth": depth.numpy(),
            "mask": np.ascontiguousarray(mask.numpy()),
            "wanted": np.arange(rows),
        }
        engine.bind(feed | {"past_length": np.array([past])} | out | tensors)()
        return [torch.from_numpy(value) for value in out.values()]

    return run


@torch.inference_mode()
def truth(model: PreTrainedModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and hidden rows of a whole text, by transformers without a cache."""
    hidden = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return model.lm_head(hidden), hidden


def same(found: list[Tensor], logits: Tensor, hidden: Tensor) -> None:
    for a, b in zip(found[1:], (logits, hidden), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= NEAR * b.abs().max()
    assert torch.equal(found[0], found[1].argmax(-1))
    # Where transformers' choice is clear, it is ours.
    top = logits.topk(2).values
    clear = top[:, 0] - top[:, 1] > 2 * NEAR * logits.abs().max()
    assert clear.float().mean() > 0.8
    assert torch.equal(found[0][clear], logits.argmax(-1)[clear])


def causal(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril()


def random_tree(rows: int, draw: torch.Generator) -> tuple[list[int], Tensor, Tensor]:
    """Parents, depth and mask; parents come before children."""
    parents, depth, mask = [0], torch.zeros(rows, dtype=torch.int64), torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        parents.append(int(torch.randint(0, row, (1,), generator=draw)))
        depth[row] = depth[parents[row]] + 1
        mask[row] |= mask[parents[row]]
    return parents, depth, mask


def whole_life(run: Run, model: PreTrainedModel, seed: int) -> None:
    """Prefill in chunks of uneven size, one row, two trees of which nothing stays, and rows up to the last position."""
    draw = torch.Generator().manual_seed(seed)
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (CAPACITY,), generator=draw)
    logits, hidden = truth(model, ids.tolist())
    past = 0
    for n in (7, 1, 5, 1):
        same(run(ids[past : past + n], *causal(n), past), logits[past : past + n], hidden[past : past + n])
        past += n
    for rows in (2, 11):
        parents, depth, mask = random_tree(rows, draw)
        tokens = torch.randint(0, vocabulary, (rows,), generator=draw)
        found = run(tokens, depth, mask, past)
        lines = []
        for row in range(rows):
            path, at = [row], row
            while at:
                at = parents[at]
                path.append(at)
            own = truth(model, ids[:past].tolist() + tokens[path[::-1]].tolist())
            lines.append((own[0][-1], own[1][-1]))
        same(found, *(torch.stack(part) for part in zip(*lines, strict=True)))
    # The trees' rows lie behind ``past`` still, and nothing of them may be seen.
    rest = CAPACITY - past
    same(run(ids[past:], *causal(rest), past), logits[past:], hidden[past:])


@pytest.mark.parametrize("name", SHAPES)
def test_eager_is_transformers(name: str, folder: Path) -> None:
    model, pair = made(name, folder)
    whole_life(eager(pair), model, seed=1)


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        pytest.param("head dim 24", Standard, marks=pytest.mark.exhaustive),
        ("llama3", Standard),
        ("head dim 32, one kv head", Contrib),
        ("head dim 24", Exact),
        pytest.param("one layer, full heads, 17 tokens", Exact, marks=pytest.mark.exhaustive),
        ("qwen3 with biases", Contrib),
        pytest.param("qwen3", Exact, marks=pytest.mark.exhaustive),
        pytest.param("qwen2", Standard, marks=pytest.mark.exhaustive),
    ],
    ids=[
        "Standard-24",
        "Standard-llama3",
        "Contrib-32",
        "Exact-24",
        "Exact-full",
        "Contrib-qwen3",
        "Exact-qwen3",
        "Standard-qwen2",
    ],
)
def test_exported_is_transformers(name: str, dialect: type[Plain], folder: Path, tmp_path: Path) -> None:
    model, pair = made(name, folder)
    whole_life(onnx(pair, dialect, tmp_path), model, seed=2)


@pytest.mark.parametrize("how", ["eager", "onnx"])
def test_choice_of_equal_logits_is_the_lowest_id(how: str, tmp_path: Path) -> None:
    target, drafter = RandomPair(seed=5).write(tmp_path / "pair")
    pair = Pair(Checkpoint(str(target), "target"), Checkpoint(str(drafter), "drafter"))
    sources = pair.target_sources(CAPACITY)
    row = torch.cat(list(sources["lm_head.weight"].slices())).float()
    # Every token's row stands there four times: at its own place, and 200, 400 and 600 places on.
    row[:800] = row[:200].repeat(4, 1)
    row[800:] = 0
    head = {"lm_head.weight": type(sources["lm_head.weight"])(tuple(row.shape), lambda: iter((row,)))}
    pair.target_sources = lambda positions: sources | head  # type: ignore[method-assign]
    run = eager(pair) if how == "eager" else onnx(pair, Standard, tmp_path)
    choice, logits, _ = run(torch.arange(30), *causal(30), 0)
    assert (logits == logits.max(-1, keepdim=True).values).sum(-1).min() >= 4  # ties there are
    assert choice.tolist() == [line.index(max(line)) for line in logits.tolist()]
    assert choice.max() < 200


NAN, INFINITE = float("nan"), float("inf")
QUANTIZED = {"int4": Scheme(16, torch.uint8), "int8": Scheme(16, torch.uint8, 8), "w8a8": Scheme(0, torch.int8, 8)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Heads that every dialect takes."""
    folder = tmp_path_factory.mktemp("finite")
    target, drafter = RandomPair({"head_dim": 16, "num_hidden_layers": 2}, seed=7).write(folder)
    return Pair(Checkpoint(str(target), "target"), Checkpoint(str(drafter), "drafter"))


def test_each_matrix_in_a_scheme_of_its_own(tmp_path: Path) -> None:
    """lm_head in 8 bits, the layers in 4, and one matrix of the second layer as it is, unlike that of the third."""
    target, drafter = RandomPair({"head_dim": 16, "num_hidden_layers": 3}, seed=7).write(tmp_path)
    pair = Pair(Checkpoint(str(target), "target"), Checkpoint(str(drafter), "drafter"))
    own = {"lm_head.weight": QUANTIZED["int8"], "layers.1.mlp.down_proj.weight": None}
    schemes, meant, kinds = Schemes(QUANTIZED["int4"], own), dict[str, Source](), list[str]()
    for name, source in pair.target_sources(CAPACITY).items():
        scheme = schemes.of(name, source.shape[-1]) if is_matrix(name, source) else None
        values = dequantize(*quantize(source.whole(), scheme, torch.float32), scheme.bits) if scheme else source.whole()
        meant[name] = Source(source.shape, lambda values=values: iter((values,)))  # type: ignore[misc]
        kinds += [f"int{scheme.bits}" if scheme else "none"] * is_matrix(name, source)
    assert {kind: kinds.count(kind) for kind in kinds} == {"int4": 3 * 7 - 1, "none": 1, "int8": 1}
    run = onnx(pair, Standard, tmp_path / "graph", schemes)
    pair.target_sources = lambda positions: meant  # type: ignore[method-assign]
    tokens = torch.arange(12)
    _, logits, hidden = eager(pair)(tokens, *causal(12), 0)
    same(run(tokens, *causal(12), 0), logits, hidden)


def damaged(pair: Pair, name: str, at: tuple[int, ...], value: float) -> Pair:
    """The pair with one number of its target changed."""
    sources = pair.target_sources(CAPACITY)
    whole = torch.cat(list(sources[name].slices())).float()
    whole[at] = value
    changed = {name: Source(tuple(whole.shape), lambda: iter((whole,)))}
    copy = Pair(pair.target, pair.drafter)
    copy.target_sources = lambda positions: sources | changed  # type: ignore[method-assign]
    return copy


def apart(run: Run) -> tuple[Tensor, Tensor]:
    """Choice and logits of six rows that see nobody but themselves and a finite past of one position."""
    run(torch.tensor([9]), *causal(1), 0)
    choice, logits, _ = run(torch.arange(6), torch.zeros(6, dtype=torch.int64), torch.eye(6, dtype=torch.bool), 1)
    return choice, logits


DAMAGE = {
    "one logit": ("lm_head.weight", (11, 5), NAN),
    "an infinite logit": ("lm_head.weight", (11, 5), INFINITE),
    "a norm": ("norm.weight", (3,), NAN),
    "a layer": ("layers.0.mlp.down_proj.weight", (2, 2), INFINITE),
}


@pytest.mark.parametrize(
    ("damage", "dialect"),
    [*((damage, None) for damage in DAMAGE), ("one logit", Standard), ("a layer", Contrib), ("a norm", Exact)],
)
def test_choice_says_when_logits_are_not_finite(
    plain: Pair, damage: str, dialect: type[Plain] | None, tmp_path: Path
) -> None:
    pair = damaged(plain, *DAMAGE[damage])
    choice, logits = apart(eager(pair) if dialect is None else onnx(pair, dialect, tmp_path))
    assert not logits.isfinite().all(-1).any()
    assert choice.tolist() == [-1] * 6


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.exhaustive if how != "w8a8" else ()) for how in QUANTIZED]
)
def test_products_that_round_their_rows_hide_nothing(plain: Pair, how: str, tmp_path: Path) -> None:
    """Rounded to int8, a NaN is a whole number like any other."""
    pair = damaged(plain, "norm.weight", (3,), NAN)
    choice, _ = apart(onnx(pair, Exact, tmp_path, Schemes(QUANTIZED[how])))
    assert choice.tolist() == [-1] * 6


class Choose(nn.Module):
    def forward(self, logits: Tensor, hidden: Tensor) -> Tensor:
        return choose(logits, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_the_rows_that_are_not_finite_have_no_choice(dtype: torch.dtype) -> None:
    """Eager and in ONNX Runtime: one number or several, that cancel each other, at any place; sums beyond fp16 are
    finite."""
    draw = torch.Generator().manual_seed(0)
    logits, hidden = torch.randn(12, 70, generator=draw), torch.randn(12, 5, generator=draw)
    logits[0], logits[10], logits[11] = 60000, -60000, 0
    logits[1, 69], logits[2, 0], logits[3, 35], hidden[4, 0], hidden[5, 4] = NAN, INFINITE, -INFINITE, NAN, INFINITE
    logits[6, 3:5] = torch.tensor([INFINITE, -INFINITE])
    logits[7] = INFINITE
    logits, hidden = logits.to(dtype), hidden.to(dtype)
    bad = range(1, 8)
    expected = [-1 if i in bad else line.index(max(line)) for i, line in enumerate(logits.tolist())]
    assert choose(logits, hidden).tolist() == expected
    model = capture(Choose(), [("a", logits, {}), ("b", hidden, {})], ["choice"], 18)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {"a": logits.numpy(), "b": hidden.numpy()})[0].tolist() == expected


@pytest.mark.parametrize("name", ["plain", "biases", "mistral", "qwen2", "qwen3", "qwen3 with biases"])
def test_parameters_are_the_checkpoints(name: str, folder: Path) -> None:
    """Their names, without the leading ``model.``, and the rotary tables."""
    model, pair = made(name, folder)
    with torch.device("meta"):
        module = Target(pair.target_shape, CAPACITY, CAPACITY)
    ours = {name for name, _ in module.named_parameters()} - {"rotary.cos", "rotary.sin"}
    theirs = {name.removeprefix("model.") for name, _ in model.named_parameters()}
    assert ours == theirs | {"lm_head.weight"}
