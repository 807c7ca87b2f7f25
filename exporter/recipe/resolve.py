"""Makes the recipe of an export: reads the checkpoints' headers and decides everything that was left open."""

from dataclasses import dataclass, replace

import torch

from graphs.tree import TreeConfig
from runtime.errors import GumihoError, InputError

from ..checkpoints import vllm
from ..checkpoints.pair import Pair
from ..config import DEFAULT_CAPACITY, VLLM, ExportConfig
from . import precision
from .calibration_text import text_of
from .recipe import Recipe
from .several import with_further
from .sources import open_pair, trimmed
from .trees import chain_config, tree_config


@dataclass(frozen=True)
class VllmRecipe:
    """An export of the drafter only, for vLLM, which reads the target's checkpoint itself. dtype: None for the stored
    ones."""

    config: ExportConfig
    pair: Pair
    dtype: torch.dtype | None

    def disk(self) -> int:
        """Bytes of disk space, at most. Raises InputError for a drafter that vLLM cannot run."""
        return vllm.size(self.pair, self.dtype)


def resolve(config: ExportConfig) -> Recipe | VllmRecipe:
    """The recipe of an export. Nothing is written, and no weights are read. Raises GumihoError for what cannot be
    exported."""
    config.check()
    return _of_drafter(config) if VLLM in config.backend else recipe_of(config)


def _of_drafter(config: ExportConfig) -> VllmRecipe:
    dtype = precision.dtypes()[config.dtype] if config.dtype else None
    return VllmRecipe(config, open_pair(config), dtype)


def recipe_of(config: ExportConfig) -> Recipe:
    """The recipe of a bundle."""
    config = precision.with_preset(config)
    pair = open_pair(config)
    config = precision.with_codes(config, pair)
    pair.check_tokenizer()  # a damaged one is refused now, not after all weights have been packed
    pair = trimmed(config, pair)
    capacity = _capacity(config, pair)
    tree = _tree(config, pair, capacity)
    dtype = precision.dtype(config)
    precision.require_codes(config, pair, dtype)
    precision.require_linkable(config)
    precision.require_rtx(config, dtype)
    recipe = Recipe(config, pair, tree, capacity, dtype, precision.quantized(config))
    if len(config.ckpt) > 1:
        recipe = with_further(recipe)
    if config.calibrate is not None:
        if not recipe.calibrates:
            raise InputError(
                "--calibrate is for --weights int4 on cpu and cuda, and int8 and w8a8 on the CPU alone: leave it out"
            )
        recipe = replace(recipe, text=text_of(config.calibrate, pair, capacity))
    recipe.require_links()
    return recipe


def _capacity(config: ExportConfig, pair: Pair) -> int:
    """Positions of the KV caches. Raises GumihoError for more than the target has."""
    limit, window = pair.target_config.positions, pair.target_config.sliding_window
    capacity = min(limit, DEFAULT_CAPACITY) if config.capacity is None else config.capacity
    if window and window < capacity <= pair.target_config.max_position_embeddings:
        raise GumihoError(
            f"--capacity is {capacity}, but target '{pair.target.source}' has a sliding window of {window} positions, "
            f"and a bundle attends to all positions: give --capacity {limit} or less"
        )
    if not 4 <= capacity <= limit:
        raise GumihoError(
            f"--capacity is {capacity}: give 4 to {limit}, the positions that target '{pair.target.source}' knows"
        )
    return capacity


def _tree(config: ExportConfig, pair: Pair, capacity: int) -> TreeConfig:
    tree = tree_config(config, pair) if pair.has_drafter else chain_config(config, capacity)
    if tree.rows > capacity:
        raise InputError(
            f"--capacity is {capacity}, fewer positions than the {tree.rows} rows of a pass: give {tree.rows} or more, "
            "or fewer --rows"
        )
    return tree
