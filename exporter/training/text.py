"""The target writes training text: many conversations at once, each in a slot of its own with its own KV cache."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from . import parallel
from .conversation import Conversation, Script
from .store import Text

_CANDIDATES = 64  # tokens that are sampled from: the tail beyond them is noise
_FLUSH = 20.0  # seconds between writes to disk


class Slots:
    """Keys and values of as many conversations as there are slots, by groups of one capacity.

    sizes: slots and positions of each group. Attention reads a group's whole capacity: products of contiguous matrices
    cost less than half of those that skip what is not filled (CPU, bf16).
    """

    def __init__(self, model: Any, sizes: Sequence[tuple[int, int]]) -> None:
        config, weight = model.config, model.lm_head.weight
        self.model, self.sizes = model, sizes
        self.kv_heads, self.head_dim = config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
        made: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        shape = self.kv_heads, self.head_dim
        self.caches = [
            [tuple(torch.zeros(slots, shape[0], capacity, shape[1], **made) for _ in "kv") for slots, capacity in sizes]
            for _ in range(config.num_hidden_layers)
        ]
        self.masks = [
            torch.full((slots, 1, 1, capacity), -torch.inf, device=weight.device) for slots, capacity in sizes
        ]
        self.first = [sum(slots for slots, _ in sizes[:group]) for group in range(len(sizes))]

    def _place(self, slot: int) -> tuple[int, int]:
        """A slot's group, and its row in that."""
        group = max(g for g, first in enumerate(self.first) if slot >= first)
        return group, slot - self.first[group]

    def restart(self, slot: int) -> None:
        group, row = self._place(slot)
        self.masks[group][row] = -torch.inf

    @torch.no_grad()
    def read(self, slot: int, ids: Sequence[int]) -> None:
        """The first tokens of a conversation, in one pass."""
        decoder, (group, row) = self.model.model, self._place(slot)
        tokens = torch.tensor([ids], device=self.masks[0].device)
        positions = torch.arange(len(ids), device=self.masks[0].device)
        x = decoder.embed_tokens(tokens)
        rotary = decoder.rotary_emb(x, positions[None])
        for layer, caches in zip(decoder.layers, self.caches, strict=True):
            x = layer(
                x,
                position_embeddings=rotary,
                slots=_Slot(*(cache[row] for cache in caches[group])),
                positions=positions,
            )
        self.masks[group][row, ..., : len(ids)] = 0

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        """query: [slots, heads, 1, d]; key, value: [slots, kv heads, 1, d]; positions: int64 [slots] -> [slots, 1,
        heads, d]."""
        out = []
        for (slots, capacity), first, mask, (keys, values) in zip(
            self.sizes, self.first, self.masks, self.caches[module.layer_idx], strict=True
        ):
            own = slice(first, first + slots)
            rows, at = torch.arange(slots, device=query.device), positions[own]
            keys[rows, :, at] = key[own, :, 0]
            values[rows, :, at] = value[own, :, 0]
            batch = slots * self.kv_heads
            q = query[own].reshape(batch, -1, self.head_dim) * module.scaling
            scores = torch.bmm(q, keys.view(batch, capacity, -1).transpose(1, 2)).view(
                slots, self.kv_heads, -1, capacity
            )
            share = (scores.float() + mask).softmax(-1).to(values.dtype).view(batch, -1, capacity)
            out.append(torch.bmm(share, values.view(batch, capacity, -1)).view(slots, 1, -1, self.head_dim))
        return torch.cat(out)

    @torch.no_grad()  # FSDP keeps buffers from one call to the next, which may be outside inference mode
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The logits after one more token of every conversation. tokens, positions: int64 [slots] -> [slots, V]."""
        for (slots, _), first, mask in zip(self.sizes, self.first, self.masks, strict=True):
            rows = torch.arange(slots, device=mask.device)
            mask[rows, 0, 0, positions[first : first + slots]] = 0
        decoder = self.model.model
        x = decoder.embed_tokens(tokens[:, None])
        rotary = decoder.rotary_emb(x, positions[:, None])
        for layer in decoder.layers:
            x = layer(x, position_embeddings=rotary, slots=self, positions=positions)
        return self.model.lm_head(decoder.norm(x)[:, 0])


@dataclass(frozen=True)
class _Slot:
    """keys, values: the caches of one slot, [kv heads, capacity, d]."""

    keys: Tensor
    values: Tensor

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        """query: [1, heads, n, d]; key, value: [1, kv heads, n, d], of the first n positions -> [1, n, heads, d]."""
        self.keys[:, : len(positions)], self.values[:, : len(positions)] = key[0], value[0]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=module.scaling, enable_gqa=True)
        return out.transpose(1, 2)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, slots: Slots | _Slot, positions: Tensor, **_: Any
) -> tuple[Tensor, None]:
    return slots.attend(module, query, key, value, positions), None


AttentionInterface.register("gumiho_slots", _attend)


def choose(logits: Tensor, heat: Tensor, generator: torch.Generator) -> Tensor:
    """The next tokens. logits: [slots, V]; heat: temperatures fp32 [slots], 0 for the first choice -> int64 [slots]."""
    values, tokens = logits.float().topk(min(_CANDIDATES, logits.shape[1]))
    noise = -torch.empty(values.shape).exponential_(generator=generator).clamp_min_(1e-30).log().to(values.device)
    place = (values + heat[:, None] * noise).argmax(-1)  # Gumbel: adding noise to logits samples from their softmax
    return tokens.gather(1, place[:, None])[:, 0]


def groups(batch: int, window: int) -> list[tuple[int, int]]:
    """Slots and positions: half are short, since most conversations are, and attention costs what the capacity is."""
    long = max(1, batch // 4)
    sizes = [(batch - 2 * long, max(16, window * 3 // 8)), (long, max(16, window * 5 // 8)), (long, window)]
    return [(slots, capacity) for slots, capacity in sizes if slots > 0]


def write(
    model: Any,
    text: Text,
    script: Script,
    wanted: int,
    batch: int,
    window: int,
    report: Callable[[str], None],
    seed: int = 0,
    stopped: Callable[[], bool] = lambda: False,
    shared: bool = False,
) -> None:
    """Appends records to ``text`` until it has ``wanted`` tokens.

    model: transformers' own, in the precision to compute in. batch: conversations at once. window: most positions of
    one. shared: whether processes share the target, and so call it together, a token of every conversation at a time.
    Resumed, it begins new conversations: those under way are lost, finished ones are not. Of several processes each
    writes so many, with a script and seed of its own, and the first one appends them all.
    """
    implementation = model.config._attn_implementation
    model.config._attn_implementation = "gumiho_slots"
    try:
        writer = _Writer(model, text, script, batch, window, seed, shared)
        begun, flushed, before = time.monotonic(), time.monotonic(), text.tokens
        while not stopped():
            due = not parallel.rank() and time.monotonic() - flushed > _FLUSH
            waiting, busy, flush = parallel.total(writer.pending, writer.busy, due)
            if text.tokens + waiting >= wanted or not busy:
                break
            if flush:
                writer.flush()
                flushed = time.monotonic()
                report(progress(text.tokens, wanted, (text.tokens - before) / (flushed - begun)))
            writer.step()
        writer.flush()
    finally:
        model.config._attn_implementation = implementation


class _Writer:
    """Conversations under way, one in each slot. pending: tokens of the finished ones that are not in ``text`` yet."""

    def __init__(
        self, model: Any, text: Text, script: Script, batch: int, window: int, seed: int, shared: bool
    ) -> None:
        """See ``write``."""
        self._text, self._script, self._batch, self._window, self._shared = text, script, batch, window, shared
        self._device, self._generator = model.lm_head.weight.device, torch.Generator().manual_seed(seed + text.tokens)
        self._slots = Slots(model, groups(batch, window))
        self._limits = [capacity for count, capacity in self._slots.sizes for _ in range(count)]
        self._finished: list[tuple[NDArray[Any], int]] = []
        self.pending = 0
        self._talks = [self._next(slot) for slot in range(len(self._limits))]

    @property
    def busy(self) -> bool:
        return any(self._talks)

    def _next(self, slot: int) -> Conversation | None:
        """Begins the slot's next conversation, if the script has one."""
        talk = self._script.next(self._limits[slot], self._window)
        self._slots.restart(slot)
        if talk and not self._shared and len(talk.ids) > self._batch:  # fewer take no longer beside the other slots
            talk.read = min(len(talk.ids), talk.limit) - 1
            if len(talk.ids) < talk.limit:  # else there is no room for an answer
                self._slots.read(slot, talk.ids[: talk.read])
        return talk

    def step(self) -> None:
        """One token of every conversation."""
        # An idle slot reads the same token over and over, so that processes which share a target call it together.
        talks, device = self._talks, self._device
        tokens = torch.tensor([talk.ids[talk.read] if talk else 0 for talk in talks], device=device)
        positions = torch.tensor([talk.read if talk else 0 for talk in talks], device=device)
        logits = self._slots.step(tokens, positions)
        heat = torch.tensor([talk.heat if talk else 0.0 for talk in talks], device=device)
        chosen = choose(logits, heat, self._generator).tolist()
        for slot, talk in enumerate(talks):
            if talk and self._over(talk, chosen[slot]):
                self._finished.append((talk.record(), talk.source))
                self.pending += len(self._finished[-1][0])
                talks[slot] = self._next(slot)

    def _over(self, talk: Conversation, token: int) -> bool:
        """One token further. Returns whether the conversation is over."""
        talk.read += 1
        if not (talk.add(token, self._script.decode) if talk.choosing else talk.read >= talk.limit - 1):
            return False
        self._script.over(talk)
        return True

    def flush(self) -> None:
        """Appends the finished conversations, of all processes, to ``text``."""
        self._text.append(parallel.gathered(self._finished))
        parallel.wait()
        self._text.refresh()
        self._finished, self.pending = [], 0


def progress(tokens: int, wanted: int, rate: float) -> str:
    left = f"{(wanted - tokens) / rate / 60:.0f} min left" if rate > 0 else "no rate yet"
    return f"text  {tokens:,} of {wanted:,} tokens  {rate:.0f} a second  {left}"
