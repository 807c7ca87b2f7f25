"""The tree that a bundle's drafter grows: what was asked for, and what each family does without that."""

from dataclasses import dataclass, replace

from graphs.static_trees import EAGLE_1, MEDUSA
from graphs.tree import Path, TreeConfig, default_beam, default_depth
from runtime.errors import GumihoError, InputError

from ..backends.specs import BACKENDS, CUDA_TOP_K, INT4_ROWS
from ..checkpoints import families
from ..checkpoints.families import EAGLE, EAGLE_3, GUMIHO, HYDRA, SMALL
from ..checkpoints.pair import Pair
from ..config import AS_IS, ExportConfig

_DEEPEST, _MOST_ROWS = 64, 4096  # of a manifest


@dataclass(frozen=True)
class _Family:
    """What a family's own code does. serial_steps: levels drafted by the serial layers, at most. top_k, wide: see
    ``TreeConfig``; beam: nodes expanded with 64 rows. static: the paths of its static tree."""

    serial_steps: int
    top_k: int
    beam: int
    wide: bool = False
    static: tuple[Path, ...] = ()


# EAGLE: depth 6, and ten nodes a level that try ten tokens each, with 60 rows; EAGLE-3 depth 8 (arXiv 2406.16858; arXiv
# 2503.01840, appendix A). Small models are drafted with as chains elsewhere; here they grow EAGLE's trees, since their
# lm_head has the tokens anyway.
_FAMILIES = {
    GUMIHO: _Family(2, 14, 14),
    EAGLE: _Family(6, 10, 10, wide=True, static=EAGLE_1),
    EAGLE_3: _Family(8, 10, 10, wide=True),
    SMALL: _Family(8, 10, 10, wide=True),
    families.MEDUSA: _Family(0, 10, 10, static=MEDUSA),
    HYDRA: _Family(8, 10, 10, wide=True, static=MEDUSA),
}


def chain_config(config: ExportConfig, capacity: int) -> TreeConfig:
    """What a pass verifies without a drafter: a chain of looked-up tokens. Raises GumihoError for an impossible
    --rows."""
    rows = _rows(config)
    if not 2 <= rows <= _MOST_ROWS:
        raise GumihoError(f"--rows is {rows}: give 2 to {_MOST_ROWS}")
    rows = min(rows, capacity)
    return TreeConfig(rows, min(rows - 1, _DEEPEST), heads=0, top_k=1, head_top_k=1, beam=1)


def tree_config(config: ExportConfig, pair: Pair) -> TreeConfig:
    """The tree that the options describe, limited to what the checkpoint has. Raises GumihoError for impossible
    options."""
    rows, family, asked = _rows(config), _FAMILIES[pair.family], config.draft_tree
    reference, chain = asked.reference, asked.policy == "chain"
    for option, value, least in (
        ("--rows", rows, 2),
        ("--serial-steps", asked.serial_steps, 1),
        ("--heads", asked.heads, 0),
        ("--top-k", asked.top_k, 1),
        ("--head-top-k", asked.head_top_k, 1),
        ("--beam", asked.beam, 1),
    ):
        if value is not None and value < least:
            raise GumihoError(f"{option} is {value}: give {least} or more")
    if asked.policy == "static":
        return _static(config, pair, family)
    if chain and (asked.top_k or asked.head_top_k or asked.beam):
        raise GumihoError("--draft-tree chain drafts one token a level: leave out --top-k, --head-top-k and --beam")
    levels = pair.reader.levels or family.serial_steps
    if asked.serial_steps and (not family.serial_steps or (pair.reader.levels and asked.serial_steps > levels)):
        raise GumihoError(
            f"--serial-steps is {asked.serial_steps} and drafter '{pair.drafter.source}' has {levels}: "
            + (f"give at most {levels}" if levels else "leave it out")
        )
    usual = usual_tree(pair.family, rows, pair.heads, asked.serial_steps, levels)
    serial = asked.serial_steps or (levels if reference else usual.serial_steps)
    if asked.heads is not None:
        heads = asked.heads
    elif serial == 1:
        heads = 0
    else:
        heads = pair.heads if reference or chain else usual.heads
    if not serial and (asked.top_k or asked.beam):
        raise GumihoError(f"drafter '{pair.drafter.source}' has no serial levels: leave --top-k and --beam out")
    if asked.head_top_k and not pair.heads:
        raise GumihoError(f"drafter '{pair.drafter.source}' has no heads: leave --head-top-k out")
    if not serial and not heads:
        raise GumihoError(f"--heads is 0, and drafter '{pair.drafter.source}' has nothing else: give 1 to {pair.heads}")
    if heads > pair.heads:
        raise GumihoError(
            f"--heads is {heads} and drafter '{pair.drafter.source}' has {pair.heads}: give at most that many"
        )
    if heads and serial == 1:
        raise GumihoError(
            f"--heads is {heads} with --serial-steps {serial}: heads read the last two serial tokens, so give 2 steps "
            "or 0 heads"
        )
    top_k = 1 if chain else asked.top_k or usual.top_k
    beam = 1 if chain else asked.beam or (top_k if reference else usual.beam)
    most = CUDA_TOP_K if "cuda" in config.backend and not reference else usual.head_top_k
    head_top_k = 1 if chain else asked.head_top_k or most
    quirks = reference and pair.family == GUMIHO
    return TreeConfig(rows, serial, heads, top_k, head_top_k, beam, quirks, usual.wide).fitted(pair.drafted)


def usual_tree(family: str, rows: int, heads: int, serial_steps: int | None = None, levels: int = 64) -> TreeConfig:
    """The tree of a family's drafter with so many heads, where no option says otherwise. serial_steps: None for as many
    as are worth it, of at most ``levels``."""
    own = _FAMILIES[family]
    serial = serial_steps or min(own.serial_steps, levels, default_depth(rows))
    heads = min(heads, max(0, default_depth(rows) - serial))
    return TreeConfig(rows, serial, heads, own.top_k, 35, default_beam(rows, own.beam), wide=own.wide)


def _static(config: ExportConfig, pair: Pair, family: _Family) -> TreeConfig:
    if not family.static:
        raise InputError(
            f"--draft-tree static is for EAGLE-1, Medusa and Hydra, and drafter '{pair.drafter.source}' is none: leave "
            "it out"
        )
    asked = config.draft_tree
    if asked.serial_steps or asked.heads or asked.top_k or asked.head_top_k or asked.beam:
        raise InputError(
            "--draft-tree static fixes levels and tokens: leave out --serial-steps, --heads, --top-k, --head-top-k and "
            "--beam"
        )
    if pair.family == EAGLE:
        tree = TreeConfig.static(family.static).fitted(pair.drafted)
        return tree if config.rows is None else replace(tree, rows=min(config.rows, tree.rows))
    deepest = pair.heads or pair.reader.levels or 0
    paths = [path for path in family.static if len(path) <= deepest][: None if config.rows is None else config.rows - 1]
    return TreeConfig.static(paths, pair.heads > 0).fitted(pair.drafted)


def _rows(config: ExportConfig) -> int:
    """R: the number that was asked for, or else as many rows as cost little on every backend."""
    if config.rows is not None:
        return config.rows
    specs = [BACKENDS[name] for name in config.backend]
    unpacked = config.weights in ("int4", AS_IS) and any(spec.static for spec in specs)
    return min([spec.rows for spec in specs] + [INT4_ROWS] * unpacked)
