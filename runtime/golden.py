"""The golden run: a short recorded one that every engine is replayed against after compiling.

golden.npz holds the inputs and outputs of a prefill (``prompt``), the drafter's extension and tree (``tree``), the target's
pass over a tree of the same size (``verify``), and what is drafted behind its longest path (``next``), as eager PyTorch computed
them. Every pass of the replay is fed the recorded inputs, so that an error shows in the graph it comes from.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .backends import Backend, Engine, close
from .bundle import Bundle, Form
from .cache import Slab
from .devices import Call, Device
from .errors import GumihoError

# By the precision of a graph's products. The recorded run rounds no rows to int8, and what that does grows with the layers.
TOLERANCE = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 0.25, "int8": 0.25}


def replay(bundle: Bundle, form: Form, engines: Mapping[str, Engine], device: Device) -> dict[str, float]:
    """Runs the recorded passes over fresh caches, padded where the form is static.

    Returns the largest error of target (logits and hidden, relative to the largest logit or hidden value) and draft (tree
    scores, in nats). Raises GumihoError where one exceeds the tolerance of its graph's precision.
    """
    run, manifest = bundle.golden(), bundle.manifest
    device.enter()
    target, draft = Slab(device, form.graphs["target"]), Slab(device, form.graphs["draft"], form.graphs["extend"])
    errors = {"target": 0.0, "draft": 0.0}

    def target_pass(name: str) -> tuple[Call, Call]:
        """The pass, and what looks at its outputs."""
        rows = len(run[f"{name}.tokens"])
        n = form.chunk if form.static else rows
        mask = np.eye(n, dtype=np.bool_)
        mask[:rows, :rows] = run[f"{name}.mask"]
        inputs = {"tokens": _pad(run[f"{name}.tokens"], n), "depth": _pad(run[f"{name}.depth"], n), "mask": mask}
        logits, hidden = (device.zeros((n, width), manifest.dtype) for width in (manifest.vocabulary, manifest.hidden))
        out = {"choice": np.zeros(n, np.int64), "logits": logits, "hidden": hidden}

        def check() -> None:
            top = np.take_along_axis(device.read(logits)[:rows], run[f"{name}.top_ids"], axis=1)
            for found, expected in ((top, run[f"{name}.top_logits"]), (device.read(hidden)[:rows], run[f"{name}.hidden"])):
                errors["target"] = max(errors["target"], _relative(found, expected))
            target.keep(form.graphs["target"], range(rows))

        return engines["target"].bind({**inputs, **out, **target.ports(form.graphs["target"])}), check

    def draft_pass(graph: str, tokens: np.ndarray, path: np.ndarray, hidden: np.ndarray, name: str = "") -> tuple[Call, Call]:
        """name: of the recorded tree, if the pass grows one."""
        count, most = len(tokens), manifest.depth + 1 if name else form.chunk
        n, rows = most if form.static else count, max(manifest.rows, form.chunk)
        inputs = {"tokens": _pad(tokens, n), "path": _pad(path, n), "count": np.array([count]), "hidden": _pad(hidden, rows)}
        tree = form.graphs[graph].tree_buffers(device)

        def check() -> None:
            if name:
                # Scores are sorted, so they compare row by row even where candidates as good as tied changed places.
                off = np.abs(device.read(tree["tree_score"]) - run[f"{name}.score"])
                errors["draft"] = max(errors["draft"], float(off.max()))
            draft.keep(form.graphs[graph], range(count))

        return engines[graph].bind({**inputs, **tree, **draft.ports(form.graphs[graph])}), check

    def tree_pass(name: str, hidden: np.ndarray) -> tuple[Call, Call]:
        return draft_pass("draft", run[f"{name}.tokens"], run[f"{name}.path"], hidden, name)

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

    for graph, error in errors.items():
        # A node's score adds up as many log-probabilities as it is deep.
        limit = TOLERANCE[form.graphs[graph].precision] * (manifest.depth if graph == "draft" else 1)
        if not error <= limit:
            raise GumihoError(
                f"the compiled {graph} engine differs from the golden run by {error:.2g}, more than {limit:.2g}: it is not kept; "
                "try another version of the backend"
            )
    return errors


def check(bundle: Bundle, backend: Backend, folder: Path) -> dict[str, float]:
    """``replay`` over the engines in a folder, which are closed behind it."""
    engines, device = backend.open(bundle, folder)
    try:
        return replay(bundle, backend.form(bundle, folder), engines, device)
    finally:
        close(engines, device)


def _pad(array: np.ndarray, rows: int) -> np.ndarray:
    """The first ``rows`` rows, zeros behind those that are there."""
    out = np.zeros((rows, *array.shape[1:]), array.dtype)
    out[: len(array)] = array[:rows]
    return out


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found.astype(np.float32) - expected).max() / np.abs(expected).max())
