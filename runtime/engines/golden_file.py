"""The golden run's file: a short recorded run that new engines must reproduce.

golden.npz (of a further drafter golden.NAME.npz) contains the inputs and outputs, as computed by eager PyTorch, of a
prefill (``prompt``), the drafter's extension and tree (``tree``), the target's pass over a tree of the same size
(``verify``), and the tree drafted after its longest path (``next``); of a chain also the best tokens of each level and
their scores. Without a drafter it contains ``prompt`` and ``verify``, a pass over a chain of tokens. If the draft graph
takes noise, the tree ``next`` is drafted with that of ``noise`` here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..bundle.files import read_arrays
from ..bundle.manifest import Manifest
from ..bundle.reader import Bundle
from ..bundle.records import Damage
from ..decoding import noise as draws
from ..errors import DamageError, reason

TREE = ("tokens", "depth", "parent", "mask", "score")  # parts of a tree
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Drafted:
    """A draft graph's tree. tokens, depth, parent: int64 [R]; mask: bool [R, R]; score: fp32 [R], summed
    log-probabilities."""

    tokens: np.ndarray
    depth: np.ndarray
    parent: np.ndarray
    mask: np.ndarray
    score: np.ndarray


def noise(depth: int, vocabulary: int) -> np.ndarray:
    """Noise of a tree's levels, by column instead of by token; fp32 [depth, vocabulary]."""
    return np.stack([draws.noise(0, level, np.arange(vocabulary)) for level in range(depth)]).astype(np.float32)


def read(bundle: Bundle) -> dict[str, np.ndarray]:
    """The recorded run: arrays by name. Raises DamageError if one is missing or has another dtype, shape or range."""
    file = bundle.path / bundle.golden
    try:
        # of older bundles
        run = {"prompt.parts": np.array([0, bundle.manifest.hidden])} | read_arrays(file, _MAX_BYTES)
        _check(run, bundle.manifest)
        return run
    except (OSError, Damage) as error:
        raise DamageError(f"{file} is damaged ({reason(error)}): copy the bundle again") from None


def _check(run: Mapping[str, np.ndarray], manifest: Manifest) -> None:
    """Raises Damage if the run does not fit the manifest."""
    rows, tokens, integer, float32 = manifest.rows, manifest.vocabulary, np.dtype(np.int64), np.dtype(np.float32)
    bounds = _part(run, "prompt.parts", integer, (None,), manifest.hidden + 1)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != manifest.hidden or not (bounds[1:] > bounds[:-1]).all():
        raise Damage(f"prompt.parts does not go from 0 to {manifest.hidden}")
    for name in ("prompt", "verify"):
        n = len(_part(run, f"{name}.tokens", integer, (None,), tokens))
        k = _part(run, f"{name}.top_ids", integer, (None, None), tokens).shape[1]
        if not 1 <= n <= rows or not k or 2 * n > manifest.capacity + rows:
            raise Damage(f"{name} has {n} rows of {k} logits, expected 1 to {rows} rows")
        _part(run, f"{name}.depth", integer, (n,), rows)
        _part(run, f"{name}.mask", np.dtype(np.bool_), (n, n))
        _part(run, f"{name}.choice", integer, (n,), tokens)
        _part(run, f"{name}.top_ids", integer, (n, k), tokens)
        _part(run, f"{name}.top_logits", float32, (n, k))
        _part(run, f"{name}.hidden", np.dtype(manifest.dtype), (n, manifest.hidden))
    for name, source in (("tree", "prompt"), ("next", "verify")) if manifest.has_drafter else ():
        n = len(_part(run, f"{name}.read", integer, (None,), tokens))
        if not 1 <= n <= manifest.depth + 1:
            raise Damage(f"{name} reads {n} tokens, expected 1 to {manifest.depth + 1}")
        _part(run, f"{name}.path", integer, (n,), len(run[f"{source}.tokens"]))
        _part(run, f"{name}.tokens", integer, (rows,), tokens)
        _part(run, f"{name}.depth", integer, (rows,), manifest.depth + 1)
        _part(run, f"{name}.parent", integer, (rows,), rows)
        _part(run, f"{name}.mask", np.dtype(np.bool_), (rows, rows))
        _part(run, f"{name}.score", float32, (rows,))
        if f"{name}.top_ids" in run:
            k = _part(run, f"{name}.top_ids", integer, (rows - 1, None), tokens).shape[1]
            _part(run, f"{name}.top_scores", float32, (rows - 1, k))
        if fault := malformed(Drafted(*(run[f"{name}.{part}"] for part in TREE))):
            raise Damage(f"{name} is malformed {fault}")


def _part(
    run: Mapping[str, np.ndarray], name: str, dtype: np.dtype, shape: tuple[int | None, ...], below: int | None = None
) -> np.ndarray:
    """An array of the run. shape: None allows any size; below: an upper bound of its integers, excluded. Raises
    Damage."""
    if (part := run.get(name)) is None:
        raise Damage(f"{name} is missing")
    fits = part.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, part.shape, strict=True))
    if part.dtype != dtype or not fits:
        raise Damage(
            f"{name} is {part.dtype} {list(part.shape)}, expected {dtype} {['any' if n is None else n for n in shape]}"
        )
    if below is not None and part.size and not 0 <= int(part.min()) <= int(part.max()) < below:
        raise Damage(f"{name} holds numbers from {part.min()} to {part.max()}, expected 0 to {below - 1}")
    if dtype.kind == "f" and not np.isfinite(part).all():
        raise Damage(f"{name} holds NaN or infinity")
    return part


def malformed(tree: Drafted) -> str:
    """Describes the first violated rule of a tree, "" if it is well-formed: parents precede children, depths and mask
    follow from the parents, and after the root the rows are in descending order of score.
    """
    rows = len(tree.tokens)
    parent, row = tree.parent, np.arange(rows)
    if parent[0] != 0 or ((parent[1:] < 0) | (parent[1:] >= row[1:])).any():
        return f"in its parents: {parent.tolist()}"
    mask, depth = np.eye(rows, dtype=np.bool_), np.zeros(rows, np.int64)
    for i in range(1, rows):
        mask[i] |= mask[parent[i]]
        depth[i] = depth[parent[i]] + 1
    if (depth != tree.depth).any():
        return f"in its depths: {tree.depth.tolist()} with the parents {parent.tolist()}"
    if (mask != tree.mask).any():
        wrong_row = int(np.argwhere(mask != tree.mask)[0][0])
        return f"in its mask: row {wrong_row} does not see exactly itself and its ancestors"
    return "in the order of its scores" if (np.diff(tree.score[1:]) > 0).any() or tree.score[0] != 0 else ""
