"""A bundle of one target with several drafters."""

import re
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path

from runtime.errors import InputError

from ..checkpoints.drafters import open_drafter
from ..checkpoints.pair import Pair
from ..config import ExportConfig
from .recipe import Recipe
from .sources import overrides, trimmed
from .trees import tree_config


def _named(config: ExportConfig) -> list[str]:
    """The names of several drafters. Raises InputError if they are not different, or belong to options of one."""
    names = [
        re.sub(r"[^A-Za-z0-9_-]", "-", Path(source).name.removesuffix(".gguf")).lstrip("-")[:64]
        for source in config.ckpt
    ]
    twice = next((name for name in names if names.count(name) > 1 or not name), None)
    if twice is not None:
        raise InputError(
            f"two drafters of --ckpt would have the name '{twice}', by which texts choose one: rename a folder"
            if twice
            else f"a drafter of --ckpt has no name by its path ({', '.join(map(str, config.ckpt))}): name its folder"
        )
    if config.family:
        raise InputError(
            f"--family is of one drafter, and --ckpt names {len(config.ckpt)}: export that one alone, or leave it out"
        )
    return names


def with_further(recipe: Recipe) -> Recipe:
    """The recipe with the other drafters. Raises InputError if they cannot be in one bundle."""
    config, target = recipe.config, recipe.pair.target
    name, *names = _named(config)
    pairs = [Pair(target, open_drafter(str(source)), overrides(config)) for source in config.ckpt[1:]]
    returns = reduce(or_, (pair.returns for pair in pairs), recipe.pair.returns)
    further = dict[str, Recipe]()
    for other, pair in zip(names, pairs, strict=True):
        own = trimmed(config, pair).returning(returns)
        further[other] = replace(recipe, pair=own, tree=(tree := tree_config(config, own)))
        if tree.rows != recipe.tree.rows:
            raise InputError(
                f"drafters {name} and {other} have trees of {recipe.tree.rows} and {tree.rows} rows, and a bundle has "
                "one number: give --rows that both can have"
            )
    return replace(recipe, pair=recipe.pair.returning(returns), name=name, further=further)
