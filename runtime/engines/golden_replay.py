"""Replays the golden run, which new engines must reproduce. Every pass reads recorded inputs, so an error shows in the
graph that causes it."""

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

# By the precision of a graph's products. The recorded run does not round rows to int8; the error of that grows with the
# layers.
TOLERANCE = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 0.25, "int8": 0.25}
_AMONG = 16  # rows of a pass whose first row is compared with the same row alone
# The share of the recorded rows, among those that score well above the tree's worst row, that must be in the new tree,
# and of its rows that must be recorded. Each level of the tree keeps only its best nodes: if two are nearly tied,
# rounding decides which one is kept, and with it a whole subtree. In fp32 that is too rare to allow for.
_SHARE = {"float32": 1.0, "float16": 0.5, "bfloat16": 0.5, "int8": 0.5}


def replay(bundle: Bundle, form: Form, engines: Mapping[str, Engine], device: Device) -> dict[str, float]:
    """Runs the recorded passes on new caches whose unused positions contain garbage, padded if the form is static.

    Returns the largest error of ``target`` (logits and hidden rows, relative to the largest logit or hidden value) and,
    with a drafter, ``draft`` (tree scores, in nats). Raises GumihoError if an output has NaN or infinity, an error
    exceeds the tolerance of its graph's precision, the target chooses another token by more than that, a tree differs
    from the recorded one, or a row of a target that rounds its rows to int8 has other logits alone than among others;
    and DamageError if the golden run is damaged.
    """
    passes = _RecordedPasses(bundle, form, engines, device)
    passes.target("prompt", form.chunk if form.static else 0)
    for size in form.targets:
        if size != bundle.manifest.rows:
            passes.target("verify", size, keep=False)
    if form.graphs["target"].precision == "int8":
        for size in (1, min(len(passes.run["verify.tokens"]), _AMONG)):
            passes.target("verify", size, keep=False)
        if not all(np.array_equal(root, passes.roots[0]) for root in passes.roots):
            raise GumihoError(
                "a row of the target has other numbers alone than among others on this processor, so that texts could "
                "differ from plain decoding's: export with --weights none"
            )
    if "extend" in form.graphs:
        passes.extension()
    if "draft" in form.graphs:
        passes.tree("tree", "prompt")
    passes.target("verify")
    if "draft" in form.graphs:
        passes.tree("next", "verify")
    return passes.errors


class _RecordedPasses:
    """Runs passes with recorded inputs, compares their outputs with the recorded ones, and keeps their rows in caches.

    run: the arrays of the golden run. errors: the largest so far, by graph. roots: the logits of the first row of each
    pass whose rows were not kept.
    """

    def __init__(self, bundle: Bundle, form: Form, engines: Mapping[str, Engine], device: Device) -> None:
        self.run, self._manifest = read(bundle), bundle.manifest
        self._form, self._engines, self._device = form, engines, device
        device.enter()
        drafting = [form.graphs[name] for name in ("draft", "extend") if name in form.graphs]
        targets = [form.graphs[name] for name in form.targets.values() or ("target",)]
        self._target = KVCache(device, *targets, capacity=self._manifest.capacity)
        self._target.fit(len(self.run["prompt.mask"]) + len(self.run["verify.mask"]))
        self._draft = KVCache(device, *drafting, capacity=self._manifest.capacity)
        for cache in (self._target, self._draft) if drafting else (self._target,):
            cache.fill_garbage()
        self._limits, self.roots = limits(form, self._manifest.depth), list[np.ndarray]()
        self.errors = dict.fromkeys(self._limits, 0.0)

    def target(self, name: str, size: int = 0, keep: bool = True) -> None:
        """size: rows of the graph to run, if not as many as recorded; fewer are the first ones, which do not depend on
        the others. keep: whether the rows stay in the cache."""
        run, device, manifest, recorded = self.run, self._device, self._manifest, len(self.run[f"{name}.tokens"])
        engine, n = self._form.target(size or recorded)
        graph, rows = self._form.graphs[engine], min(n, recorded)
        mask = np.eye(n, dtype=np.bool_)
        mask[:rows, :rows] = run[f"{name}.mask"][:rows, :rows]
        inputs = {"tokens": _pad(run[f"{name}.tokens"], n), "depth": _pad(run[f"{name}.depth"], n), "mask": mask}
        if graph.selects:
            inputs["wanted"] = np.arange(n)
        logits, hidden = (device.zeros((n, width), manifest.dtype) for width in (manifest.vocabulary, manifest.hidden))
        choice = np.zeros(n, np.int64)
        outputs = {"choice": choice, "logits": logits, "hidden": hidden}
        self._call(engine, {**inputs, **outputs, **self._target.bindings(graph)})
        found = device.read(logits)[:rows]
        self._check_rows(name, choice[:rows], found, device.read(hidden)[:rows])
        if keep:
            self._target.commit(graph, range(rows))
        else:
            self.roots.append(found[0])

    def _check_rows(self, name: str, choice: np.ndarray, logits: np.ndarray, hidden: np.ndarray) -> None:
        """Compares the first recorded rows. choice: int64 [n]; logits: [n, V]; hidden: [n, H]."""
        run, errors, rows, tolerance = self.run, self.errors, len(choice), self._limits["target"]
        _require_finite("target", "logits", logits)
        _require_finite("target", "hidden", hidden)
        top_logits, expected = run[f"{name}.top_logits"][:rows], run[f"{name}.hidden"][:rows]
        top = np.take_along_axis(logits, run[f"{name}.top_ids"][:rows], axis=1)
        # Parts of a row differ in scale: rows of several layers, and tokens.
        columns = [slice(begin, end) for begin, end in pairwise(run["prompt.parts"].tolist())]
        for values, recorded in [(top, top_logits), *((hidden[:, part], expected[:, part]) for part in columns)]:
            errors["target"] = float(np.maximum(errors["target"], relative(values, recorded)))
        _require("target", errors["target"], tolerance)
        if difference := choice_difference(choice, run[f"{name}.choice"][:rows], top_logits, tolerance):
            raise _differs("target", difference)

    def extension(self) -> None:
        """The drafter reads the prompt."""
        tokens, hidden = self.run["prompt.tokens"][1:], self.run["prompt.hidden"]
        self._read("extend", tokens, np.arange(len(tokens)), hidden, self._form.chunk)
        self._draft.commit(self._form.graphs["extend"], range(len(tokens)))

    def tree(self, name: str, source: str) -> None:
        """The drafter drafts a tree. source: the target's pass whose hidden rows it reads."""
        run, graph, manifest = self.run, self._form.graphs["draft"], self._manifest
        tree, tokens = graph.tree_buffers(self._device), run[f"{name}.read"]
        more = dict(tree)
        if graph.noisy and manifest.tree:
            size = manifest.depth, manifest.tree.vocabulary
            more["noise"] = noise(*size) if name == "next" else np.zeros(size, np.float32)
        self._read("draft", tokens, run[f"{name}.path"], run[f"{source}.hidden"], manifest.depth + 1, more)
        self._check_tree(name, Drafted(*(self._device.read(tree[f"tree_{part}"]).copy() for part in TREE)))
        self._draft.commit(graph, range(len(tokens)))

    def _read(
        self,
        graph: str,
        tokens: np.ndarray,
        path: np.ndarray,
        hidden: np.ndarray,
        most: int,
        more: Mapping[str, Array] | None = None,
    ) -> None:
        """A pass of the drafter. tokens, path: int64 [n], n at most ``most``; hidden: [rows, H]; more: buffers
        besides."""
        n, rows = most if self._form.static else len(tokens), max(self._manifest.rows, self._form.chunk)
        count = np.array([len(tokens)])
        inputs = {"tokens": _pad(tokens, n), "path": _pad(path, n), "count": count, "hidden": _pad(hidden, rows)}
        self._call(graph, {**inputs, **(more or {}), **self._draft.bindings(self._form.graphs[graph])})

    def _check_tree(self, name: str, drafted: Drafted) -> None:
        run, tolerance, precision = self.run, self._limits["draft"], self._form.graphs["draft"].precision
        recorded = Drafted(*(run[f"{name}.{part}"] for part in TREE))
        _require_finite("draft", "tree_score", drafted.score)
        if f"{name}.top_ids" in run:
            top = run[f"{name}.top_ids"], run[f"{name}.top_scores"]
            difference = chain_difference(drafted, recorded, *top, tolerance)
        else:
            difference = tree_difference(drafted, recorded, tolerance, _SHARE[precision])
        if difference:
            raise _differs("draft", difference)
        self.errors["draft"] = max(self.errors["draft"], score_error(drafted, recorded))
        _require("draft", self.errors["draft"], tolerance)

    def _call(self, engine: str, buffers: Mapping[str, Array]) -> None:
        call = self._engines[engine].bind(buffers)
        # a device that records calls replays the recording the second time
        for _ in range(2 if self._form.static else 1):
            call()
        self._device.synchronize()


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
    return {
        name: TOLERANCE[form.graphs[name].precision] * factor for name, factor in factors.items() if name in form.graphs
    }


def check(bundle: Bundle, backend: Backend, folder: Path) -> dict[str, float]:
    """``replay_each`` with the engines in a folder, which are closed afterwards."""
    engines, device = backend.open(bundle, folder)
    try:
        return replay_each(bundle, backend.form(bundle, folder), engines, device)
    finally:
        close(engines, device)


def check_shared_passes(bundle: Bundle, backend: Backend, folder: Path) -> None:
    """Replays the golden run through the graph ``shared``, in all lanes at once. Raises GumihoError as ``replay``
    does."""
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
            f"the compiled {graph} engine is discarded, since its output '{output}' holds NaN or infinity: check the "
            "bundle with `gumiho doctor`, then try another version of the backend"
        )


def _require(graph: str, error: float, limit: float) -> None:
    if not error <= limit:
        raise _differs(graph, f"by {error:.2g}, more than {limit:.2g}")


def _differs(graph: str, difference: str) -> GumihoError:
    return GumihoError(
        f"the compiled {graph} engine is discarded, since it differs from the golden run {difference}: "
        "try another version of the backend"
    )


def _pad(array: np.ndarray, rows: int) -> np.ndarray:
    """The first ``rows`` rows of an array, padded with zeros if it has fewer."""
    out = np.zeros((rows, *array.shape[1:]), array.dtype)
    out[: len(array)] = array[:rows]
    return out
