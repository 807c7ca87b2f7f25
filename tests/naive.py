"""The drafter and its tree again: slow, obvious, and sharing no code with ``graphs``.

No caches, no fused heads, no masks but the causal one: every node is computed from its own root-to-node sequence with
transformers' Llama layers, and trees are found by search instead of by bounded levels.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding, apply_rotary_pos_emb

Path = tuple[int, ...]  # drafted tokens, from the first one on
Feature = Any  # what a step predicts and reads; only the model looks inside


class Model(Protocol):
    """What the two searches below need to know of a drafter."""

    def first(self) -> Feature:
        """The prediction at the pending token."""

    def serial(self, rows: Sequence[tuple[int, Feature]], depth: Sequence[int]) -> list[Feature]:
        """Predictions of drafted rows (token, the prediction it was drawn from) behind the context; each sees those
        before it.

        depth: 0 for the position behind the pending token's, and so on.
        """

    def head(self, i: int, pair: tuple[tuple[int, Feature], tuple[int, Feature]]) -> Feature:
        """Head i's prediction for two drafted tokens in a row."""

    def log_probs(self, feature: Feature) -> np.ndarray:
        """fp32 [V]."""


@dataclass(frozen=True)
class Noisy:
    """A drafter whose tokens are drawn: noise, fp32 [levels, V], is added to the logits of each level. steps: levels
    before the heads'.

    A feature is the model's own and the level that it drafts.
    """

    model: Model
    noise: np.ndarray
    steps: int

    def first(self) -> Feature:
        return self.model.first(), 0

    def serial(self, rows: Sequence[tuple[int, Feature]], depth: Sequence[int]) -> list[Feature]:
        found = self.model.serial([(token, own) for token, (own, _) in rows], depth)
        return [(feature, d + 1) for feature, d in zip(found, depth, strict=True)]

    def head(self, i: int, pair: tuple[tuple[int, Feature], tuple[int, Feature]]) -> Feature:
        (first, (h1, _)), (second, (h2, _)) = pair
        return self.model.head(i, ((first, h1), (second, h2))), self.steps + i

    def log_probs(self, feature: Feature) -> np.ndarray:
        own, level = feature
        drawn = self.model.log_probs(own).astype(np.float64) + self.noise[level]
        return (drawn - np.logaddexp.reduce(drawn)).astype(np.float32)


@dataclass(frozen=True)
class Node:
    path: Path
    score: np.float32


def best(log_probs: np.ndarray, k: int) -> list[int]:
    """The k likeliest tokens, of equal ones the lower first."""
    return np.argsort(-log_probs, kind="stable")[:k].tolist()


def brute_force_tree(
    model: Model, rows: int, serial_steps: int, heads: int, top_k: int, head_top_k: int, beam: int, wide: bool = False
) -> list[Node]:
    """The best ``rows - 1`` nodes of the whole candidate space, best first; fewer where it is smaller.

    Level 1 is the ``top_k`` tokens of the first serial step. Of each serial level's tries the best ``top_k`` are nodes
    (wide: all of them), and of them the best ``beam`` are carried on, each trying its ``top_k`` tokens; from the last
    one, each head adds ``head_top_k`` tokens to every path there is. Equal scores go to the shallower node, then to the
    better parent, then to the likelier token.
    """
    features: dict[Path, Feature] = {(): model.first()}
    top_k = min(top_k, len(model.log_probs(features[()])))

    def rows_of(path: Path) -> list[tuple[int, Feature]]:
        return [(token, features[path[:i]]) for i, token in enumerate(path)]

    def children(node: Node, log_probs: np.ndarray, k: int) -> list[Node]:
        return [Node((*node.path, t), np.float32(node.score + log_probs[t])) for t in best(log_probs, k)]

    parents, levels = [Node((), np.float32(0))], []
    for _ in range(serial_steps):
        for node in parents:
            if node.path:
                features[node.path] = model.serial(rows_of(node.path), range(len(node.path)))[-1]
        level = [child for node in parents for child in children(node, model.log_probs(features[node.path]), top_k)]
        level.sort(key=lambda node: -node.score)  # stable
        levels.append(level if wide else level[:top_k])
        parents = level[: beam if wide else min(beam, top_k)]

    heads_of: dict[Path, list[np.ndarray]] = {}  # last serial node -> each head's log-probabilities
    if heads:
        for node in parents:
            first, second = rows_of(node.path)[-2:]
            heads_of[node.path] = [model.log_probs(model.head(i, (first, second))) for i in range(heads)]

    heap = [(-n.score, len(n.path), rank, 0, n) for level in levels for rank, n in enumerate(level)]
    heapq.heapify(heap)
    found: list[Node] = []
    ranks: dict[int, int] = {}  # depth -> nodes of it found so far
    while heap and len(found) < rows - 1:
        *_, node = heapq.heappop(heap)
        found.append(node)
        depth = len(node.path)
        rank = ranks[depth] = ranks.get(depth, -1) + 1
        i = depth - serial_steps
        if node.path[:serial_steps] in heads_of and 0 <= i < heads:
            for j, child in enumerate(children(node, heads_of[node.path[:serial_steps]][i], head_top_k)):
                heapq.heappush(heap, (-child.score, depth + 1, rank, j, child))
    return found


def reference_tree(
    model: Model, rows: int, serial_steps: int, heads: int, top_k: int = 14, head_top_k: int = 35
) -> list[Node]:
    """The official code's tree: every level pruned to ``top_k`` (serial) or ``head_top_k`` (heads) nodes, with its two
    quirks.

    The rows of the serial steps attend causally to all rows before them, siblings included; and the heads read the last
    two serial levels' tokens of the same rank, whoever is whose parent.
    """
    y = model.first()
    log_probs = model.log_probs(y)
    level = [Node((t,), log_probs[t]) for t in best(log_probs, top_k)]
    inputs = [(n.path[-1], y) for n in level]  # of each node: its token, and the prediction it was drawn from
    before = inputs
    candidates = list(level)
    drafted: list[tuple[int, Feature]] = []
    depths: list[int] = []
    for step in range(serial_steps - 1):
        drafted += inputs
        depths += [step] * len(inputs)
        made = model.serial(drafted, depths)[-len(inputs) :]
        tried = []
        for node, feature in zip(level, made, strict=True):
            log_probs = model.log_probs(feature)
            tried += [
                (Node((*node.path, t), np.float32(node.score + log_probs[t])), feature) for t in best(log_probs, top_k)
            ]
        tried.sort(key=lambda one: -one[0].score)
        tried = tried[:top_k]
        level, before = [node for node, _ in tried], inputs
        inputs = [(node.path[-1], feature) for node, feature in tried]
        candidates += level

    paths = [(node, rank) for rank, node in enumerate(level)]  # rank: of the last serial node it hangs on
    for i in range(heads):
        predicted = [model.log_probs(model.head(i, pair)) for pair in zip(before, inputs, strict=False)]
        grown = [
            (Node((*node.path, t), np.float32(node.score + predicted[rank][t])), rank)
            for node, rank in paths
            for t in best(predicted[rank], head_top_k)
        ]
        grown.sort(key=lambda one: -one[0].score)
        paths = grown[:head_top_k]
        candidates += [node for node, _ in paths]
    candidates.sort(key=lambda node: -node.score)
    return candidates[: rows - 1]


def static_tree(model: Model, paths: Sequence[Path]) -> list[Node]:
    """The tokens at fixed paths of ranks, in the order of the paths."""

    @cache
    def at(path: Path) -> tuple[list[tuple[int, Feature]], np.float32]:
        """The drafted rows down to a path, each a token and what it was drawn from, and the path's score."""
        if not path:
            return [], np.float32(0)
        rows, score = at(path[:-1])
        feature = below(path[:-1])
        log_probs = model.log_probs(feature)
        token = best(log_probs, path[-1] + 1)[-1]
        return [*rows, (token, feature)], np.float32(score + log_probs[token])

    @cache
    def below(path: Path) -> Feature:
        rows, _ = at(path)
        return model.serial(rows, range(len(rows)))[-1] if rows else model.first()

    return [Node(tuple(token for token, _ in rows), score) for rows, score in map(at, paths)]


class Context:
    """A drafter behind a context that is read anew for every node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.hidden = torch.zeros(0)

    def read(self, tokens: Sequence[int], hidden: Tensor) -> Self:
        """Sets the context: the token after each position, and what the drafter reads of the target at it."""
        self.tokens, self.hidden = list(tokens), hidden
        return self

    def _layers(self, rows: list[tuple[int, Tensor]], positions: list[int]) -> Tensor:
        raise NotImplementedError

    def first(self) -> Tensor:
        return self._layers(list(zip(self.tokens, self.hidden, strict=True)), list(range(len(self.tokens))))[-1]

    def serial(self, rows: Sequence[tuple[int, Tensor]], depth: Sequence[int]) -> list[Tensor]:
        n = len(self.tokens)
        context = list(zip(self.tokens, self.hidden, strict=True))
        return list(self._layers(context + list(rows), list(range(n)) + [n + d for d in depth])[n:])


class NaiveDrafter(Context):
    """A drafter from its checkpoint's own tensors, behind a context that is read anew for every node.

    state: tensors by their official names; config: the drafter's; lm_head: the target's weight.
    """

    def __init__(self, state: dict[str, Tensor], config: LlamaConfig, lm_head: Tensor) -> None:
        self.state, self.lm_head = {name: tensor.float() for name, tensor in state.items()}, lm_head.float()
        config._attn_implementation = "eager"
        self.layers = nn.ModuleList()
        for i in range(1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))):
            layer = LlamaDecoderLayer(config, i)
            if i == 0:
                layer.input_layernorm = nn.Identity()
            prefix = f"layers.{i}."
            layer.load_state_dict({n.removeprefix(prefix): t for n, t in self.state.items() if n.startswith(prefix)})
            self.layers.append(layer)
        self.rotary = LlamaRotaryEmbedding(config)
        super().__init__()

    def _fuse(self, token: int, hidden: Tensor) -> Tensor:
        out = self.state["fc.weight"] @ torch.cat((self.state["embed_tokens.weight"][token], hidden))
        return out + self.state["fc.bias"] if "fc.bias" in self.state else out

    @torch.no_grad()
    def _layers(self, rows: list[tuple[int, Tensor]], positions: list[int]) -> Tensor:
        x = torch.stack([self._fuse(token, hidden) for token, hidden in rows])[None]
        mask = torch.full((len(rows), len(rows)), float("-inf")).triu(1)[None, None]
        where = torch.tensor([positions])
        rotation = self.rotary(x, where)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_ids=where, position_embeddings=rotation)
            x = x[0] if isinstance(x, tuple) else x
        return x[0]

    @torch.no_grad()
    def head(self, i: int, pair: tuple[tuple[int, Tensor], tuple[int, Tensor]]) -> Tensor:
        x = torch.cat([self._fuse(*one) for one in pair])
        block = 0
        while f"mlp.{i}.{block}.linear.weight" in self.state:
            y = nn.functional.silu(
                self.state[f"mlp.{i}.{block}.linear.weight"] @ x + self.state[f"mlp.{i}.{block}.linear.bias"]
            )
            x = x + y if block else y
            block += 1
        return x

    def log_probs(self, feature: Tensor) -> np.ndarray:
        return torch.log_softmax(self.lm_head @ feature, dim=0).detach().numpy()


class NaiveEagle3(Context):
    """An EAGLE-3 drafter from the formulas of its paper, behind a context that is read anew for every node. See
    ``NaiveDrafter``.

    state: tensors by SafeAILab's names. config: of its layer. A feature is what the layer returns, or the target's
    tapped rows side by side. normed: ``norm_before_residual``.
    """

    def __init__(self, state: dict[str, Tensor], config: LlamaConfig, normed: bool = False) -> None:
        self.state = {n: t.float() for n, t in state.items() if t.is_floating_point()}
        self.config = config
        self.normed = normed
        self.rotary = LlamaRotaryEmbedding(config)
        super().__init__()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.config.rms_norm_eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    @torch.no_grad()
    def _layers(self, rows: list[tuple[int, Tensor]], positions: list[int]) -> Tensor:
        features = [f if len(f) == self.config.hidden_size else self._linear(f, "fc") for _, f in rows]
        s = torch.stack(features)
        embedded = self.state["embed_tokens.weight"][[token for token, _ in rows]]
        normed = self._norm(s, "midlayer.hidden_norm")
        wide = torch.cat((self._norm(embedded, "midlayer.input_layernorm"), normed), dim=-1)
        x = self._rest("midlayer", normed if self.normed else s, wide, positions)
        for i in range(
            1, 1 + max((int(name.split(".")[1]) for name in self.state if name.startswith("layers.")), default=0)
        ):
            x = self._rest(f"layers.{i}", x, self._norm(x, f"layers.{i}.input_layernorm"), positions)
        return x

    def _rest(self, name: str, s: Tensor, read: Tensor, positions: list[int]) -> Tensor:
        """A layer. s: the rows that it adds to; read: those that its attention reads."""
        n = len(s)
        q, k, v = (
            self._linear(read, f"{name}.self_attn.{part}_proj").view(n, -1, self.config.head_dim) for part in "qkv"
        )
        if f"{name}.self_attn.q_norm.weight" in self.state:
            q, k = self._norm(q, f"{name}.self_attn.q_norm"), self._norm(k, f"{name}.self_attn.k_norm")
        rotation = self.rotary(s[None], torch.tensor([positions]))
        q, k = (y[0] for y in apply_rotary_pos_emb(q[None], k[None], *rotation, unsqueeze_dim=2))
        attended = attention(q, k, v, torch.ones(n, n, dtype=torch.bool).tril())
        t = s + self._linear(attended, f"{name}.self_attn.o_proj")
        x = self._norm(t, f"{name}.post_attention_layernorm")
        gate, up = (self._linear(x, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return t + self._linear(nn.functional.silu(gate) * up, f"{name}.mlp.down_proj")

    def head(self, i: int, pair: tuple[tuple[int, Tensor], tuple[int, Tensor]]) -> Tensor:
        raise NotImplementedError

    def log_probs(self, feature: Tensor) -> np.ndarray:
        """Of the target's tokens; those outside the draft vocabulary have none."""
        drafted = torch.log_softmax(self.state["lm_head.weight"] @ self._norm(feature, "norm"), dim=0)
        found = torch.full((self.config.vocab_size,), -torch.inf)
        found[self.ids] = drafted
        return found.numpy()

    ids: Tensor  # the target's id of each row of lm_head


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention a head at a time. q: [n, heads, d]; k, v: [m, kv heads, d]; mask: bool [n, m] -> [n, heads * d]."""
    share, heads = q.shape[1] // k.shape[1], list[Tensor]()
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // share].T / q.shape[2] ** 0.5
        heads.append(torch.softmax(scores.masked_fill(~mask, -torch.inf), 1) @ v[:, head // share])
    return torch.cat(heads, 1)
