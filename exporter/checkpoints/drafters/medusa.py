"""Medusa's checkpoints: heads beside a target (v0.1), in one checkpoint with a target that was trained with them
(v1.0), without lm_heads (TGI's version 2), and in vLLM's layout."""

import re
from collections.abc import Mapping

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import UNQUANTIZED, Schemes
from graphs.drafters.medusa import Medusa
from graphs.tree import TreeConfig

from ...weights.source import Source
from ..checkpoint import Checkpoint
from ..families import MEDUSA, MEDUSA_BLOCK
from .reader import TOKEN_MAP, Overrides, Reader

_HEAD = re.compile(r"(?:medusa_heads?\.)?(?:lm_heads\.(\d{1,3})|(\d{1,3})\.\d{1,3})\.weight")


class MedusaReader(Reader):
    """What config.json says of heads does not count: those of the released ones name 2, and their files have 5.

    blocks: of each head. bias: whether they have one. one_head: whether the heads have the target's lm_head.
    """

    family, embeds = MEDUSA, False

    def __init__(self, checkpoint: Checkpoint, target: Checkpoint, overrides: Overrides) -> None:
        super().__init__(checkpoint, target, overrides)
        self._stored = dict[str, str]()  # by parameter name
        heads = dict[int, str]()
        for name in checkpoint.names():
            if found := MEDUSA_BLOCK.fullmatch(name):
                i, j = (int(a or b) for a, b in (found.group("i", "k"), found.group("j", "l")))
                self._stored[f"heads.{i}.{j}.linear.{found['part']}"] = name
            elif found := _HEAD.fullmatch(name):
                heads[int(found[1] or found[2])] = name
        places = {tuple(map(int, name.split(".")[1:3])) for name in self._stored}
        self.heads, self.blocks = (1 + max(place[axis] for place in places) for axis in (0, 1))
        self.bias = any(name.endswith("bias") for name in self._stored)
        parts = ("weight", "bias") if self.bias else ("weight",)
        wanted = [
            f"heads.{i}.{j}.linear.{part}" for i in range(self.heads) for j in range(self.blocks) for part in parts
        ]
        if heads.keys() == {0}:  # vLLM's ``original_lm_head``, for all of them
            heads = dict.fromkeys(range(self.heads), heads[0])
        if heads:
            wanted += [f"lm_heads.{i}.weight" for i in range(self.heads)]
        self.require_heads(
            wanted, self._stored | {f"lm_heads.{i}.weight": name for i, name in heads.items()}, self.heads
        )
        self._heads = [heads[i] for i in range(self.heads)] if heads else []
        self.optional = frozenset(checkpoint.names())  # among them a whole target's, with which version 1.0 comes
        self.one_head = not heads or self.all_targets(self._heads, target)

    def _layers(self) -> int:
        """See ``Reader``."""
        return 0

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """See ``Reader``."""
        h = self.shape.hidden
        expected: dict[str, tuple[int, ...]] = {
            stored: (h, h) if name.endswith("weight") else (h,) for name, stored in self._stored.items()
        }
        tokens = self.shape.vocabulary
        rows = self._rows()
        if rows and TOKEN_MAP in self.checkpoint and rows == len(self.checkpoint.read(TOKEN_MAP)):
            tokens = rows
        return expected | dict.fromkeys(self._heads, (tokens, h))

    def _rows(self) -> int | None:
        """See ``Reader``. Of the first one."""
        return (*self.checkpoint.shape(self._heads[0]), 0)[0] if self._heads else None

    def lm_heads(self, target: Source, count: int) -> dict[str, Source]:
        """See ``Reader``."""
        if self.one_head:
            return super().lm_heads(target, count)
        return {f"lm_heads.{i}.weight": self.checkpoint.source_of(name) for i, name in enumerate(self._heads[:count])}

    def module(
        self,
        tree: TreeConfig | None,
        capacity: int,
        positions: int,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> Medusa:
        """See ``Reader``."""
        return Medusa(
            self.shape, capacity, positions, tree, self.blocks, self.bias, not self.one_head, ops, schemes, trimmed
        )

    def sources(self, heads: int, schemes: Schemes) -> Mapping[str, Source]:
        """See ``Reader``."""
        used = {name for name in self._stored if int(name.split(".")[1]) < heads}
        return {name: self.checkpoint.source_of(stored) for name, stored in self._stored.items() if name in used}
