"""The golden run: a short recorded one that every engine is replayed against after compiling.

golden.npz holds the inputs and outputs of a prefill (``prompt``), the drafter's extension and tree (``tree``), the target's
pass over that tree (``verify``), and the tree of the cycle after it (``next``), as eager PyTorch computed them. Every pass of
the replay is fed the recorded inputs, so that an error shows in the graph it comes from.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .bundle import Bundle
from .cache import Slab
from .errors import GumihoError

TOLERANCE = {"float32": 2e-3, "float16": 3e-2}


def replay(bundle: Bundle, engines: Mapping[str, Any]) -> dict[str, float]:
    """Runs the recorded passes over fresh caches.

    Returns the largest error of target (logits and hidden, relative to the largest logit or hidden value) and draft (tree
    scores, in nats). Raises GumihoError where one exceeds the tolerance of the bundle's dtype.
    """
    run, manifest = bundle.golden(), bundle.manifest
    target, draft = Slab(manifest.graphs["target"]), Slab(manifest.graphs["draft"])
    errors = {"target": 0.0, "draft": 0.0}

    def target_pass(name: str) -> np.ndarray:
        rows = len(run[f"{name}.tokens"])
        out = {
            "choice": np.zeros(rows, np.int64),
            "logits": np.zeros((rows, manifest.vocabulary), manifest.dtype),
            "hidden": np.zeros((rows, manifest.hidden), manifest.dtype),
        }
        inputs = {part: run[f"{name}.{part}"] for part in ("tokens", "depth", "mask")}
        engines["target"].bind(inputs | out | target.ports)()
        top = np.take_along_axis(out["logits"], run[f"{name}.top_ids"], axis=1)
        for found, expected in ((top, run[f"{name}.top_logits"]), (out["hidden"], run[f"{name}.hidden"])):
            errors["target"] = max(errors["target"], _relative(found, expected))
        return out["hidden"]

    def draft_pass(name: str, hidden: np.ndarray) -> None:
        out = manifest.graphs["draft"].tree_buffers()
        inputs = {part: run[f"{name}.{part}"] for part in ("tokens", "path", "count")}
        engines["draft"].bind(inputs | {"hidden": hidden} | out | draft.ports)()
        draft.length += run[f"{name}.count"]
        # Scores are sorted, so they compare row by row even where two candidates are as good as tied and changed places.
        errors["draft"] = max(errors["draft"], float(np.abs(out["tree_score"] - run[f"{name}.score"]).max()))

    prompt = len(run["prompt.tokens"])
    target_pass("prompt")
    hidden = run["prompt.hidden"]
    engines["extend"].bind(
        {"tokens": run["prompt.tokens"][1:], "path": np.arange(prompt - 1), "count": np.array([prompt - 1]), "hidden": hidden}
        | draft.ports
    )()
    draft.length += prompt - 1
    target.length += prompt
    draft_pass("tree", hidden)
    target_pass("verify")
    draft_pass("next", run["verify.hidden"])

    limit = TOLERANCE[manifest.dtype]
    for graph, error in errors.items():
        if not error <= limit:
            raise GumihoError(
                f"the compiled {graph} engine differs from the golden run by {error:.2g}, more than {limit:.2g}: it is not kept; "
                "try another version of the backend"
            )
    return errors


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found.astype(np.float32) - expected).max() / np.abs(expected).max())
