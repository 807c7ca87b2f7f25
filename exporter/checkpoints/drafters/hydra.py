"""Hydra's checkpoints, of both kinds: ``mlp``, and ``prefix-mlp``, which is Hydra++."""

import re
from collections.abc import Mapping

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import UNQUANTIZED, Schemes
from graphs.drafters.hydra import Hydra
from graphs.tree import TreeConfig
from runtime.errors import InputError

from ...weights.source import Source
from ..checkpoint import Checkpoint
from ..families import HYDRA, HYDRA_PREFIX
from ..json_config import shown
from .reader import TOKEN_MAP, Overrides, Reader

_PART = re.compile(r"hydra_mlp\.(\d{1,3})\.(\d{1,3})\.(linear|res_connection)\.(weight|bias)")
_HEAD = re.compile(r"hydra_lm_head\.(\d{1,3})\.(?:1\.)?(weight|bias)")
# unused, and the target's
_IGNORED = re.compile(re.escape(HYDRA_PREFIX) + r"embed_tokens\.weight|input_embed_fn\.weight")


class HydraReader(Reader):
    """Dropouts have numbers among a head's parts in one kind and not in the other: only their order counts. What
    config.json says of them does not.

    blocks: of each head, after its first one. levels: its heads, one for each. one_head: whether their lm_heads are the
    target's, without biases.
    """

    family = HYDRA

    def __init__(self, checkpoint: Checkpoint, target: Checkpoint, overrides: Overrides) -> None:
        self._prefixed = any(name.startswith(HYDRA_PREFIX) for name in checkpoint.names())
        super().__init__(checkpoint, target, overrides)
        parts, self._stored, self._heads = dict[int, set[int]](), dict[str, str](), dict[str, str]()
        for name in checkpoint.names():
            if found := _PART.fullmatch(name):
                parts.setdefault(int(found[1]), set()).add(int(found[2]))
        for name in checkpoint.names():
            if found := _PART.fullmatch(name):
                i, j = int(found[1]), sorted(parts[int(found[1])]).index(int(found[2]))
                place = f"blocks.{j - 1}." if j else ""
                self._stored[f"heads.{i}.{place}{found[3]}.{found[4]}"] = name
            elif found := _HEAD.fullmatch(name):
                self._heads[f"heads.{int(found[1])}.lm_head.{found[2]}"] = name
            elif name.startswith(HYDRA_PREFIX) and not _IGNORED.fullmatch(name):
                self._stored[name.removeprefix(HYDRA_PREFIX)] = name
        self.levels: int = 1 + max(parts, default=0)
        self.blocks = max(map(len, parts.values()), default=1) - 1
        self._check_kind()
        self.optional = frozenset((TOKEN_MAP, *(name for name in checkpoint.names() if _IGNORED.fullmatch(name))))
        self.require_heads(self._shapes(), {**self._stored, **self._heads}, self.levels)
        biases, weights = (
            [name for name in self._heads.values() if name.endswith("bias") == wanted] for wanted in (True, False)
        )
        self.one_head = not any(checkpoint.read(name).any() for name in biases) and self.all_targets(weights, target)

    def _check_kind(self) -> None:
        kind, offset = (self.checkpoint.config.get(key) for key in ("hydra_head_arch", "hidden_state_offset"))
        if kind not in (None, "mlp", "prefix-mlp") or offset not in (None, 0):
            raise InputError(
                f"{self.where} has hydra_head_arch {shown(kind)} and hidden_state_offset {shown(offset)}, which are "
                "not supported: give one of kind mlp or prefix-mlp, without an offset"
            )

    def _layers(self) -> int:
        """See ``Reader``."""
        return int(self._prefixed)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """By parameter name."""
        h, tokens = self.shape.hidden, self.shape.vocabulary
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(self.levels):
            for part in ("linear", "res_connection"):
                shapes |= {f"heads.{i}.{part}.weight": (h, (i + 2) * h), f"heads.{i}.{part}.bias": (h,)}
            for j in range(self.blocks):
                shapes |= {f"heads.{i}.blocks.{j}.linear.weight": (h, h), f"heads.{i}.blocks.{j}.linear.bias": (h,)}
            shapes |= {f"heads.{i}.lm_head.weight": (tokens, h), f"heads.{i}.lm_head.bias": (tokens,)}
        return shapes | (super()._expected() | {"norm.weight": (h,)} if self._prefixed else {})

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """See ``Reader``."""
        known = {**self._stored, **self._heads}
        return {known[name]: shape for name, shape in self._shapes().items()}

    def lm_heads(self, target: Source, count: int) -> dict[str, Source]:
        """See ``Reader``. Biases too."""
        if self.one_head:
            return super().lm_heads(target, count)
        return self._used(self._heads, count)

    def _used(self, stored: Mapping[str, str], count: int) -> dict[str, Source]:
        """Without the parameters of heads beyond the first ``count``."""
        beyond = tuple(f"heads.{i}." for i in range(count, self.levels))
        return {name: self.checkpoint.source_of(own) for name, own in stored.items() if not name.startswith(beyond)}

    def module(
        self,
        tree: TreeConfig | None,
        capacity: int,
        positions: int,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> Hydra:
        """See ``Reader``."""
        return Hydra(self.shape, capacity, positions, tree, self.blocks, not self.one_head, ops, schemes, trimmed)

    def sources(self, heads: int, schemes: Schemes) -> Mapping[str, Source]:
        """See ``Reader``."""
        return self._used(self._stored, heads)
