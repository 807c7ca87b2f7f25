"""A bundle of one target with several drafters."""

import argparse
import re
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path

from runtime.errors import InputError

from .checkpoints.drafters import open_drafter
from .checkpoints.pair import Pair
from .plan import Plan
from .sources import overrides, trim
from .trees import tree_config


def _named(args: argparse.Namespace) -> list[str]:
    """The names of several drafters. Raises InputError if they are not different, or belong to options of one."""
    sources = [args.ckpt, *args.further]
    names = [re.sub(r"[^A-Za-z0-9_-]", "-", Path(source).name.removesuffix(".gguf")).lstrip("-")[:64] for source in sources]
    twice = next((name for name in names if names.count(name) > 1 or not name), None)
    if twice is not None:
        raise InputError(
            f"two drafters of --ckpt would have the name '{twice}', by which texts choose one: rename a folder"
            if twice
            else f"a drafter of --ckpt has no name by its path ({', '.join(map(str, sources))}): name its folder"
        )
    if args.family:
        raise InputError(f"--family is of one drafter, and --ckpt names {len(sources)}: export that one alone, or leave it out")
    return names


def with_further(args: argparse.Namespace, plan: Plan) -> Plan:
    """The plan with the other drafters. Raises InputError if they cannot be in one bundle."""
    name, *names = _named(args)
    pairs = [Pair(plan.pair.target, open_drafter(source), overrides(args)) for source in args.further]
    returns = reduce(or_, (pair.returns for pair in pairs), plan.pair.returns)
    further = dict[str, Plan]()
    for other, pair in zip(names, pairs, strict=True):
        trim(args, pair)
        further[other] = replace(plan, pair=pair, tree=(tree := tree_config(args, pair)))
        if tree.rows != plan.tree.rows:
            raise InputError(
                f"drafters {name} and {other} have trees of {plan.tree.rows} and {tree.rows} rows, and a bundle has one number: "
                "give --rows that both can have"
            )
    for pair in (plan.pair, *pairs):
        pair.returns = returns
    return replace(plan, name=name, further=further)
