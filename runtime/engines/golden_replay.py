"""Replays the golden run, which new engines must reproduce. Every pass reads recorded inputs, so an error shows in the graph that
causes it."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from ..backends import Backend, Engine, close
from ..bundle.graphs import SHARED, Form, of_drafter
from ..bundle.reader import Bundle
from ..decoding.kv_cache import KVCache
from ..errors import GumihoError
from .devices import Array, Call, Device
from .golden_difference import chain_difference, choice_difference, relative, score_error, tree_difference
from .golden_file import TREE, Drafted, noise, read

if TYPE_CHECKING:
    from ..backends.onnxruntime_lanes import Lanes

# By the precision of a graph's products. The recorded run does not round rows to int8; the error of that grows with the layers.
TOLERANCE = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 0.25, "int8": 0.25}
_AMONG = 16  # rows; those of more than 193 need not have the same bits (graphs.dialects.exact)
# The share of the recorded rows, among those that score well above the tree's worst row, that must be in the new tree, and of its
# rows that must be recorded. Each level of the tree keeps only its best nodes: if two are nearly tied, rounding decides which one is
# kept, and with it a whole subtree. In fp32 that is too rare to allow for.
_SHARE = {"float32": 1.0, "float16": 0.5, "bfloat16": 0.5, "int8": 0.5}


def replay(bundle: Bundle, form: Form, engines: Mapping[str, Engine], device: Device) -> dict[str, float]:
    """Runs the recorded passes on new caches whose unused positions contain garbage, padded if the form is static.

    Returns the largest error of ``target`` (logits and hidden rows, relative to the largest logit or hidden value) and, with a
    drafter, ``draft`` (tree scores, in nats). Raises GumihoError if an output has NaN or infinity, an error exceeds the
    tolerance of its graph's precision, the target chooses another token by more than that, a tree differs from the recorded
    one, or a row of a target that rounds its rows to int8 has other logits alone than among others; and DamageError if the golden run is
    damaged.
    """
    run, manifest = read(bundle), bundle.manifest
    device.enter()
    drafting = [form.graphs[name] for name in ("draft", "extend") if name in form.graphs]
    targets = [form.graphs[name] for name in form.targets.values() or ("target",)]
    target = KVCache(device, *targets, capacity=manifest.capacity)
    target.fit(len(run["prompt.mask"]) + len(run["verify.mask"]))
    draft = KVCache(device, *drafting, capacity=manifest.capacity)
    for cache in (target, draft) if drafting else (target,):
        cache.fill_garbage()
    errors = dict.fromkeys(limits(form, manifest.depth), 0.0)
    roots = list[np.ndarray]()  # logits of the tree's first row, of the passes that are not kept

    def target_pass(name: str, size: int = 0, keep: bool = True) -> tuple[Call, Call]:
        """A recorded pass of the target, and a function that checks its outputs.

        size: rows of the graph to run, if not as many as recorded; fewer are the first ones, which do not depend on the others. keep:
        whether the rows are committed.
        """
        recorded, tolerance = len(run[f"{name}.tokens"]), limits(form, manifest.depth)["target"]
        engine, n = form.target(size or recorded)
        graph, rows = form.graphs[engine], min(n, recorded)
        mask = np.eye(n, dtype=np.bool_)
        mask[:rows, :rows] = run[f"{name}.mask"][:rows, :rows]
        inputs = {"tokens": _pad(run[f"{name}.tokens"], n), "depth": _pad(run[f"{name}.depth"], n), "mask": mask}
        if graph.selects:
            inputs["wanted"] = np.arange(n)
        logits, hidden = (device.zeros((n, width), manifest.dtype) for width in (manifest.vocabulary, manifest.hidden))
        choice = np.zeros(n, np.int64)
        out = {"choice": choice, "logits": logits, "hidden": hidden}

        def check() -> None:
            outputs = {"logits": device.read(logits)[:rows], "hidden": device.read(hidden)[:rows]}
            for output, values in outputs.items():
                _require_finite("target", output, values)
            top_logits = run[f"{name}.top_logits"][:rows]
            top = np.take_along_axis(outputs["logits"], run[f"{name}.top_ids"][:rows], axis=1)
            expected = run[f"{name}.hidden"][:rows]
            # Parts of a row differ in scale: rows of several layers, and tokens.
            columns = [slice(begin, end) for begin, end in pairwise(run["prompt.parts"].tolist())]
            pairs = [(top, top_logits), *((outputs["hidden"][:, part], expected[:, part]) for part in columns)]
            for values, recorded_values in pairs:
                errors["target"] = float(np.maximum(errors["target"], relative(values, recorded_values)))
            _require("target", errors["target"], tolerance)
            if difference := choice_difference(choice[:rows], run[f"{name}.choice"][:rows], top_logits, tolerance):
                raise _differs("target", difference)
            if keep:
                target.commit(graph, range(rows))
            else:
                roots.append(outputs["logits"][0])

        return engines[engine].bind({**inputs, **out, **target.bindings(graph)}), check

    def draft_pass(graph: str, tokens: np.ndarray, path: np.ndarray, hidden: np.ndarray, name: str = "") -> tuple[Call, Call]:
        """A recorded pass of the drafter, and a function that checks its tree. name: of that tree, "" if there is none."""
        count, most = len(tokens), manifest.depth + 1 if name else form.chunk
        n, rows = most if form.static else count, max(manifest.rows, form.chunk)
        inputs = {"tokens": _pad(tokens, n), "path": _pad(path, n), "count": np.array([count]), "hidden": _pad(hidden, rows)}
        if form.graphs[graph].noisy and manifest.tree:
            size = manifest.depth, manifest.tree.vocabulary
            inputs["noise"] = noise(*size) if name == "next" else np.zeros(size, np.float32)
        tree = form.graphs[graph].tree_buffers(device)

        def check() -> None:
            if name:
                precision, tolerance = form.graphs[graph].precision, limits(form, manifest.depth)["draft"]
                drafted, recorded = _drafted(tree, device), Drafted(*(run[f"{name}.{part}"] for part in TREE))
                _require_finite("draft", "tree_score", drafted.score)
                if f"{name}.top_ids" in run:
                    top = run[f"{name}.top_ids"], run[f"{name}.top_scores"]
                    difference = chain_difference(drafted, recorded, *top, tolerance)
                else:
                    difference = tree_difference(drafted, recorded, tolerance, _SHARE[precision])
                if difference:
                    raise _differs("draft", difference)
                errors["draft"] = max(errors["draft"], score_error(drafted, recorded))
                _require("draft", errors["draft"], tolerance)
            draft.commit(form.graphs[graph], range(count))

        return engines[graph].bind({**inputs, **tree, **draft.bindings(form.graphs[graph])}), check

    def tree_pass(name: str, hidden: np.ndarray) -> tuple[Call, Call]:
        return draft_pass("draft", run[f"{name}.read"], run[f"{name}.path"], hidden, name)

    def run_checked(*passes: tuple[Call, Call]) -> None:
        for call, check in passes:
            for _ in range(2 if form.static else 1):  # a device that records calls replays the recording the second time
                call()
            device.synchronize()
            check()

    run_checked(target_pass("prompt", form.chunk if form.static else 0))
    for size in form.targets:
        if size != manifest.rows:
            run_checked(target_pass("verify", size, keep=False))
    if form.graphs["target"].precision == "int8":
        for size in (1, min(len(run["verify.tokens"]), _AMONG)):
            run_checked(target_pass("verify", size, keep=False))
        if not all(np.array_equal(root, roots[0]) for root in roots):
            raise GumihoError(
                "a row of the target has other numbers alone than among others on this processor, so that texts could differ from plain "
                "decoding's: export with --weights none"
            )
    if not drafting:
        run_checked(target_pass("verify"))
        return errors
    prompt, hidden = run["prompt.tokens"], run["prompt.hidden"]
    if "extend" in form.graphs:
        run_checked(draft_pass("extend", prompt[1:], np.arange(len(prompt) - 1), hidden))
    run_checked(tree_pass("tree", hidden), target_pass("verify"), tree_pass("next", run["verify.hidden"]))
    return errors


def replay_each(bundle: Bundle, form: Form, engines: Mapping[str, Engine], device: Device) -> dict[str, float]:
    """``replay`` of every drafter's golden run; the largest errors of all."""
    errors = dict[str, float]()
    for drafter in bundle.manifest.each:
        suffix = bundle.manifest.suffix(drafter)
        own = replay(bundle.of(drafter), form.of(suffix), of_drafter(engines, suffix), device)
        errors = {name: float(np.maximum(error, errors.get(name, 0.0))) for name, error in own.items()}
    return errors


def limits(form: Form, depth: int) -> dict[str, float]:
    """The largest errors that pass, as ``replay`` returns them. depth: of the tree."""
    # A node's score is the sum of as many log-probabilities as its depth.
    factors = {"target": 1, "draft": depth}
    return {name: TOLERANCE[form.graphs[name].precision] * factor for name, factor in factors.items() if name in form.graphs}


def check(bundle: Bundle, backend: Backend, folder: Path) -> dict[str, float]:
    """``replay_each`` with the engines in a folder, which are closed afterwards."""
    engines, device = backend.open(bundle, folder)
    try:
        return replay_each(bundle, backend.form(bundle, folder), engines, device)
    finally:
        close(engines, device)


def check_shared(bundle: Bundle, backend: Backend, folder: Path) -> None:
    """Replays the golden run through the graph ``shared``, in all lanes at once. Raises GumihoError as ``replay`` does."""
    form = backend.form(bundle, folder).of("")
    engines, device = backend.open(bundle, folder, streams=2)
    try:
        lanes = _EveryLane(cast("Lanes", engines["target"]), limits(form, bundle.manifest.depth)["target"])
        replay(bundle.of(""), form, of_drafter({**engines, "target": lanes}, ""), device)
    finally:
        close(engines, device)


class _EveryLane:
    """A target whose passes have the same rows in every lane, and fail if the lanes differ."""

    def __init__(self, lanes: "Lanes", tolerance: float) -> None:
        self._lanes, self._tolerance, self.close = lanes, tolerance, lanes.close

    def bind(self, buffers: Mapping[str, Array]) -> Call:
        copies = [{name: buffer.copy() for name, buffer in buffers.items()} for _ in range(1, self._lanes.count)]
        passes = [self._lanes.bind(own) for own in (buffers, *copies)]

        def call() -> None:
            for name, buffer in buffers.items():
                for copy in copies:
                    copy[name][...] = buffer
            self._lanes.run(passes)
            passes[0].result()
            for copy in copies:
                for name in ("logits", "hidden"):
                    _require(SHARED, relative(copy[name], buffers[name]), self._tolerance)

        return call


def _require_finite(graph: str, output: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise GumihoError(
            f"the compiled {graph} engine is discarded, since its output '{output}' holds NaN or infinity: check the bundle "
            "with `gumiho doctor`, then try another version of the backend"
        )


def _require(graph: str, error: float, limit: float) -> None:
    if not error <= limit:
        raise _differs(graph, f"by {error:.2g}, more than {limit:.2g}")


def _differs(graph: str, difference: str) -> GumihoError:
    return GumihoError(
        f"the compiled {graph} engine is discarded, since it differs from the golden run {difference}: "
        "try another version of the backend"
    )


def _drafted(tree: Mapping[str, Array], device: Device) -> Drafted:
    return Drafted(*(device.read(tree[f"tree_{part}"]).copy() for part in TREE))


def _pad(array: np.ndarray, rows: int) -> np.ndarray:
    """The first ``rows`` rows of an array, padded with zeros if it has fewer."""
    out = np.zeros((rows, *array.shape[1:]), array.dtype)
    out[: len(array)] = array[:rows]
    return out
