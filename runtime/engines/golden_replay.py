"""The golden run: a short recorded one that every engine is replayed against after compiling.

golden.npz holds the inputs and outputs of a prefill (``prompt``), the drafter's extension and tree (``tree``), the target's
pass over a tree of the same size (``verify``), and the tree drafted after its longest path (``next``), as eager PyTorch computed
them. Every pass of the replay is fed the recorded inputs, so that an error shows in the graph it comes from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..backends import Backend, Engine, close
from ..bundle.files import read_arrays
from ..bundle.manifest import Form, Manifest
from ..bundle.reader import Bundle
from ..bundle.records import Damage
from ..decoding.kv_cache import KVCache
from ..devices import Array, Call, Device
from ..errors import GumihoError

FILE = "golden.npz"
# By the precision of a graph's products. The recorded run rounds no rows to int8, and what that does grows with the layers.
TOLERANCE = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 0.25, "int8": 0.25}
# Of the recorded rows that are well above the tree's worst, the share that must be there again. A level keeps and carries on its best
# nodes only: where two of those are as good as tied, rounding decides which, and all that grows below follows. In fp32 that is
# too rare to allow for.
_SHARE = {"float32": 1.0, "float16": 0.5, "bfloat16": 0.5, "int8": 0.5}
_TREE = ("tokens", "depth", "parent", "mask", "score")
_MOST = 64 << 20  # bytes


def replay(bundle: Bundle, form: Form, engines: Mapping[str, Engine], device: Device) -> dict[str, float]:
    """Runs the recorded passes over fresh caches whose unused positions hold garbage, padded where the form is static.

    Returns the largest error of target (logits and hidden, relative to the largest logit or hidden value) and draft (tree
    scores, in nats). Raises GumihoError where an output holds NaN or infinity, an error exceeds the tolerance of its graph's
    precision, the target chooses another token by more than that, or a tree is not the recorded one.
    """
    run, manifest = read(bundle), bundle.manifest
    device.enter()
    target, draft = KVCache(device, form.graphs["target"]), KVCache(device, form.graphs["draft"], form.graphs["extend"])
    for cache in (target, draft):
        cache.fill_garbage()
    errors = {"target": 0.0, "draft": 0.0}

    def target_pass(name: str) -> tuple[Call, Call]:
        """The pass, and what looks at its outputs."""
        rows, tolerance = len(run[f"{name}.tokens"]), limits(form, manifest.depth)["target"]
        n = form.chunk if form.static else rows
        mask = np.eye(n, dtype=np.bool_)
        mask[:rows, :rows] = run[f"{name}.mask"]
        inputs = {"tokens": _pad(run[f"{name}.tokens"], n), "depth": _pad(run[f"{name}.depth"], n), "mask": mask}
        logits, hidden = (device.zeros((n, width), manifest.dtype) for width in (manifest.vocabulary, manifest.hidden))
        choice = np.zeros(n, np.int64)
        out = {"choice": choice, "logits": logits, "hidden": hidden}

        def check() -> None:
            found = {"logits": device.read(logits)[:rows], "hidden": device.read(hidden)[:rows]}
            for output, values in found.items():
                _require_finite("target", output, values)
            expected = run[f"{name}.top_logits"]
            top = np.take_along_axis(found["logits"], run[f"{name}.top_ids"], axis=1)
            for values, recorded in ((top, expected), (found["hidden"], run[f"{name}.hidden"])):
                errors["target"] = float(np.maximum(errors["target"], _relative(values, recorded)))
            _require("target", errors["target"], tolerance)
            if other := other_choice(choice[:rows], run[f"{name}.choice"], expected, tolerance):
                raise _differs("target", other)
            target.commit(form.graphs["target"], range(rows))

        return engines["target"].bind({**inputs, **out, **target.bindings(form.graphs["target"])}), check

    def draft_pass(graph: str, tokens: np.ndarray, path: np.ndarray, hidden: np.ndarray, name: str = "") -> tuple[Call, Call]:
        """name: of the recorded tree, if the pass grows one."""
        count, most = len(tokens), manifest.depth + 1 if name else form.chunk
        n, rows = most if form.static else count, max(manifest.rows, form.chunk)
        inputs = {"tokens": _pad(tokens, n), "path": _pad(path, n), "count": np.array([count]), "hidden": _pad(hidden, rows)}
        tree = form.graphs[graph].tree_buffers(device)

        def check() -> None:
            if name:
                precision, tolerance = form.graphs[graph].precision, limits(form, manifest.depth)["draft"]
                found, recorded = _drafted(tree, device), Drafted(*(run[f"{name}.{part}"] for part in _TREE))
                _require_finite("draft", "tree_score", found.score)
                # Scores are sorted, so they compare row by row even where candidates as good as tied changed places.
                off = float(np.abs(found.score - recorded.score).max())
                errors["draft"] = float(np.maximum(errors["draft"], off))
                _require("draft", errors["draft"], tolerance)
                if other := other_tree(found, recorded, tolerance, _SHARE[precision]):
                    raise _differs("draft", other)
            draft.commit(form.graphs[graph], range(count))

        return engines[graph].bind({**inputs, **tree, **draft.bindings(form.graphs[graph])}), check

    def tree_pass(name: str, hidden: np.ndarray) -> tuple[Call, Call]:
        return draft_pass("draft", run[f"{name}.read"], run[f"{name}.path"], hidden, name)

    def make(*passes: tuple[Call, Call]) -> None:
        for call, check in passes:
            call()
            device.synchronize()
            check()

    prompt, hidden = run["prompt.tokens"], run["prompt.hidden"]
    make(target_pass("prompt"), draft_pass("extend", prompt[1:], np.arange(len(prompt) - 1), hidden))
    (draft_tree, check_tree), (verify, check_verify) = tree_pass("tree", hidden), target_pass("verify")
    start, finish = device.fuse(draft_tree, verify)
    for _ in range(2):  # a device that records the two as one runs what it recorded the second time
        start()
        finish()
    check_tree()
    check_verify()
    make(tree_pass("next", run["verify.hidden"]))
    return errors


def limits(form: Form, depth: int) -> dict[str, float]:
    """The largest errors that pass, as ``replay`` returns them. depth: of the tree."""
    # A node's score adds up as many log-probabilities as it is deep.
    return {"target": TOLERANCE[form.graphs["target"].precision], "draft": TOLERANCE[form.graphs["draft"].precision] * depth}


def check(bundle: Bundle, backend: Backend, folder: Path) -> dict[str, float]:
    """``replay`` over the engines in a folder, which are closed afterwards."""
    engines, device = backend.open(bundle, folder)
    try:
        return replay(bundle, backend.form(bundle, folder), engines, device)
    finally:
        close(engines, device)


# --- what a replay compares ----------------------------------------------------------------------------------------------


def _require_finite(graph: str, output: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise GumihoError(
            f"the compiled {graph} engine is not kept, since its output '{output}' holds NaN or infinity: the weights are damaged, or "
            "this version of the backend computes them wrongly; check the bundle with `python -m runtime.doctor`, then try another version"
        )


def _require(graph: str, error: float, limit: float) -> None:
    if not error <= limit:
        raise _differs(graph, f"by {error:.2g}, more than {limit:.2g}")


def _differs(graph: str, how: str) -> GumihoError:
    return GumihoError(
        f"the compiled {graph} engine differs from the golden run {how}: it is not kept; try another version of the backend"
    )


def other_choice(found: np.ndarray, recorded: np.ndarray, top_logits: np.ndarray, tolerance: float) -> str:
    """The first row whose choice is not the recorded one though its two largest logits are well apart; "" where there is none.

    found, recorded: int64 [n]; top_logits: fp32 [n, k], recorded, in descending order; tolerance: of the largest logit.
    """
    largest = np.abs(top_logits).max()
    apart = (
        np.ones(len(found), np.bool_) if top_logits.shape[1] < 2 else top_logits[:, 0] - top_logits[:, 1] > tolerance * largest
    )
    for row in np.flatnonzero((found != recorded) & (apart | (found < 0))):
        return f"in its choice for row {row}: token {found[row]} instead of {recorded[row]}"
    return ""


@dataclass(frozen=True)
class Drafted:
    """A draft graph's tree. tokens, depth, parent: int64 [R]; mask: bool [R, R]; score: fp32 [R], cumulative log-probabilities."""

    tokens: np.ndarray
    depth: np.ndarray
    parent: np.ndarray
    mask: np.ndarray
    score: np.ndarray


def _drafted(tree: Mapping[str, Array], device: Device) -> Drafted:
    return Drafted(*(device.read(tree[f"tree_{part}"]).copy() for part in _TREE))


def malformed(tree: Drafted) -> str:
    """What makes it no tree, "" where it is one: parents come before children, depths and mask follow from them, and after the root
    the best rows come first."""
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
        return f"in its mask: row {int(np.argwhere(mask != tree.mask)[0][0])} does not see its ancestors and itself, and only these"
    return "in the order of its scores" if (np.diff(tree.score[1:]) > 0).any() or tree.score[0] != 0 else ""


def other_tree(found: Drafted, recorded: Drafted, tolerance: float, share: float) -> str:
    """How a tree differs from the recorded one by more than rounding explains; "" where it does not.

    Rows are told apart by the tokens on their path. Of the recorded rows that score better than the worst row by more than the
    tolerance, in nats, at least ``share`` must be there again, with that score.
    """
    if what := malformed(found):
        return what
    ours, theirs = _by_path(found), _by_path(recorded)
    worst = float(recorded.score.min())
    firm = [path for path, score in theirs.items() if score - worst > tolerance]
    missing = [path for path in firm if path not in ours or not abs(ours[path] - theirs[path]) <= tolerance]
    if len(missing) > (1 - share) * len(firm):
        return f"in its tree: {len(missing)} of {len(firm)} rows are missing, the best of them the path {list(missing[0])}"
    return ""


def _by_path(tree: Drafted) -> dict[tuple[int, ...], float]:
    """Scores by the tokens from the root to each row."""
    paths: list[tuple[int, ...]] = [(int(tree.tokens[0]),)]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parent[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths, tree.score.tolist(), strict=True))


def _pad(array: np.ndarray, rows: int) -> np.ndarray:
    """The first ``rows`` rows, zeros after those that are there."""
    out = np.zeros((rows, *array.shape[1:]), array.dtype)
    out[: len(array)] = array[:rows]
    return out


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, relative to the largest expected value; infinite where all that is expected is zero."""
    largest = float(np.abs(expected).max())
    return float(np.abs(found.astype(np.float32) - expected).max()) / largest if largest else np.inf


# --- the file ------------------------------------------------------------------------------------------------------------


def read(bundle: Bundle) -> dict[str, np.ndarray]:
    """The recorded run. Raises GumihoError where a part is missing, has another type or shape, or holds what no run can."""
    file = bundle.path / FILE
    try:
        run = read_arrays(file, _MOST)
        _check(run, bundle.manifest)
        return run
    except (OSError, Damage) as error:
        raise GumihoError(f"{file} is damaged ({error}): copy the bundle again") from None


def _check(run: Mapping[str, np.ndarray], manifest: Manifest) -> None:
    """Raises Damage."""
    rows, tokens, integer, float32 = manifest.rows, manifest.vocabulary, np.dtype(np.int64), np.dtype(np.float32)
    for name in ("prompt", "verify"):
        n, k = (
            len(_part(run, f"{name}.tokens", integer, (None,), tokens)),
            _part(run, f"{name}.top_ids", integer, (None, None), tokens).shape[1],
        )
        if not 1 <= n <= rows or not k or 2 * n > manifest.capacity + rows:
            raise Damage(f"{name} has {n} rows of {k} logits, expected 1 to {rows} rows")
        _part(run, f"{name}.depth", integer, (n,), rows)
        _part(run, f"{name}.mask", np.dtype(np.bool_), (n, n))
        _part(run, f"{name}.choice", integer, (n,), tokens)
        _part(run, f"{name}.top_ids", integer, (n, k), tokens)
        _part(run, f"{name}.top_logits", float32, (n, k))
        _part(run, f"{name}.hidden", np.dtype(manifest.dtype), (n, manifest.hidden))
    for name, source in (("tree", "prompt"), ("next", "verify")):
        n = len(_part(run, f"{name}.read", integer, (None,), tokens))
        if not 1 <= n <= manifest.depth + 1:
            raise Damage(f"{name} reads {n} tokens, expected 1 to {manifest.depth + 1}")
        _part(run, f"{name}.path", integer, (n,), len(run[f"{source}.tokens"]))
        _part(run, f"{name}.tokens", integer, (rows,), tokens)
        _part(run, f"{name}.depth", integer, (rows,), manifest.depth + 1)
        _part(run, f"{name}.parent", integer, (rows,), rows)
        _part(run, f"{name}.mask", np.dtype(np.bool_), (rows, rows))
        _part(run, f"{name}.score", float32, (rows,))
        if what := malformed(Drafted(*(run[f"{name}.{part}"] for part in _TREE))):
            raise Damage(f"{name} is no tree {what}")


def _part(
    run: Mapping[str, np.ndarray], name: str, dtype: np.dtype, shape: tuple[int | None, ...], below: int | None = None
) -> np.ndarray:
    """A part of the run. shape: None for any size; below: what whole numbers must be less than. Raises Damage."""
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
