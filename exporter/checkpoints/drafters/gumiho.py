"""Gumiho's checkpoints, and those of EAGLE-1 and EAGLE-2, which are alike."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import UNQUANTIZED, Schemes
from graphs.drafters.gumiho import Gumiho
from graphs.tree import TreeConfig
from runtime.errors import DamageError

from ...weights.source import Source
from ..checkpoint import Checkpoint, require_tensors, tensor_indices
from ..families import family
from .reader import LM_HEAD, TOKEN_MAP, Overrides, Reader


class GumihoReader(Reader):
    """blocks: residual blocks of a head. fc_bias: whether ``fc`` has a bias."""

    # A whole lm_head is a copy of the target's, so it is not read.
    optional = frozenset((LM_HEAD, TOKEN_MAP))

    def __init__(self, checkpoint: Checkpoint, target: Checkpoint, overrides: Overrides) -> None:
        super().__init__(checkpoint, target, overrides)
        layers, blocks = tensor_indices(checkpoint, "layers.#."), tensor_indices(checkpoint, "mlp.#.#.")
        self.heads = 1 + max((h for h, _ in blocks), default=-1)
        self.blocks = max((b for _, b in blocks), default=0)
        self.fc_bias = "fc.bias" in checkpoint  # the official config.json files say false even if the tensor exists
        self.shape = replace(self.shape, layers=len(layers))
        self.family = family(len(layers), self.heads)
        self.require_size("hidden_size", self.config.hidden_size, self.target.hidden_size)
        self.require_size("vocab_size", self.config.vocab_size, self.target.vocab_size)
        # Checked first, because tensor names may hold any number and the modules are built from them.
        expected = ((i,) for i in range(max(1, len(layers))))
        require_tensors(checkpoint, "layers.{}.self_attn.q_proj.weight", layers, expected)
        parts = ((h, b) for h in range(self.heads) for b in range(self.blocks + 1))
        require_tensors(checkpoint, "mlp.{}.{}.linear.weight", blocks, parts)

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """See ``Reader``."""
        expected, h = super()._expected(), self.shape.hidden
        for head in range(self.heads):
            for block in range(self.blocks + 1):
                expected[f"mlp.{head}.{block}.linear.weight"] = (h, h if block else 2 * h)
                expected[f"mlp.{head}.{block}.linear.bias"] = (h,)
        return expected

    def _rows(self) -> int | None:
        """See ``Reader``."""
        if LM_HEAD not in self.checkpoint:
            return None
        shape, hidden = self.checkpoint.shape(LM_HEAD), self.shape.hidden
        if len(shape) != 2 or shape[1] != hidden:
            raise DamageError(
                f"{self.where}: tensor '{LM_HEAD}' has shape {list(shape)}, expected {hidden} columns: download it "
                "again"
            )
        self.checkpoint.check_dtype(LM_HEAD)
        return shape[0]

    def module(
        self,
        tree: TreeConfig | None,
        capacity: int,
        positions: int,
        ops: type[Plain] = Plain,
        schemes: Schemes = UNQUANTIZED,
        trimmed: int | None = None,
    ) -> Gumiho:
        """See ``Reader``."""
        return Gumiho(self.shape, capacity, positions, tree, self.fc_bias, self.blocks, ops, schemes, trimmed)

    def sources(self, heads: int, schemes: Schemes) -> dict[str, Source]:
        """See ``Reader``. Blocks of all heads are stacked."""
        names = [name for name in self.expected if not name.startswith("mlp.")]
        sources = {name: self.checkpoint.source_of(name) for name in names}
        h = self.shape.hidden
        input_major = schemes.of("heads.weight.0", h) is None
        for block in range(self.blocks + 1) if heads else ():
            weights = [f"mlp.{head}.{block}.linear.weight" for head in range(heads)]
            biases = [f"mlp.{head}.{block}.linear.bias" for head in range(heads)]
            stacked = Source((heads, 1, h), partial(self._stack, biases, transposed=False))
            if block:
                matrices = partial(self._stack, weights, transposed=input_major)
                sources[f"heads.weight.{block - 1}"] = Source((heads, h, h), matrices)
                sources[f"heads.bias.{block - 1}"] = stacked
            else:
                sources["heads.first.weight"] = Source(
                    (heads * h, 2 * h), partial(self._stack, weights, transposed=False)
                )
                sources["heads.first.bias"] = replace(stacked, shape=(heads * h,))
        return sources

    def _stack(self, names: list[str], transposed: bool) -> Iterator[Tensor]:
        for name in names:
            tensor = self.checkpoint.read(name)
            yield tensor.T if transposed else tensor
