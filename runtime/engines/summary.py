"""A bundle in sentences: what it contains, how much speculation can gain, and what running it takes.

``gumiho-export`` and ``gumiho doctor`` print these same sentences.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..backends import Backend
from ..backends.memory import size
from ..bundle.graphs import Form
from ..bundle.manifest import Manifest
from ..bundle.reader import Bundle
from ..decoding.prices import Costs
from .golden_replay import limits

TAU = 4.46  # tokens per pass: the paper's mean over six sets of prompts (Llama-3-8B, temperature 0, 64 rows)
_WORTHWHILE = 1.5  # times the speed of plain decoding
_CHOICES = "choices that differ"  # a share of positions, without a limit: near-ties may differ
_NO_DRAFTER = "no drafter: decodes plainly and by prompt lookup"


def content(bundle: Bundle) -> list[str]:
    """What the bundle contains, for which backends."""
    manifest = bundle.manifest
    nbytes = sum(file.size for file in manifest.files.values())
    form = manifest.form(manifest.default)
    words = {model: word for model, word in (("target", "target"), ("draft", "drafter")) if model in form.graphs}
    weights = [f"{word} {manifest.weights.get(model) or form.graphs[model].precision}" for model, word in words.items()]
    rows = f"verifies up to {manifest.rows} rows; capacity {manifest.capacity} positions"
    if manifest.tree:
        rows = (
            f"{manifest.rows} rows, depth {manifest.depth}; capacity {manifest.capacity} positions; "
            f"drafts {manifest.tree.vocabulary} of {manifest.vocabulary} tokens"
        )
    others = [
        f"drafter {name}: depth {own.depth}, {own.tree.vocabulary} tokens" for name, own in manifest.drafters.items()
    ]
    return [
        f"{size(nbytes)} in {len(manifest.files)} files, made for {', '.join(manifest.forms)}",
        f"weights: {'; '.join(weights)}; KV caches {manifest.dtype}",
        rows,
        *others,
        *([f"a text ends at {', '.join(_spelled(bundle, manifest.eos_token_ids))}"] if manifest.eos_token_ids else []),
    ]


def _spelled(bundle: Bundle, ids: Sequence[int]) -> list[str]:
    """Tokens as messages name them."""
    texts = [bundle.tokenizer.id_to_token(i) for i in ids] if bundle.has_tokenizer else [None] * len(ids)
    return [f"{text!r} ({i})" if text else str(i) for text, i in zip(texts, ids, strict=True)]


def measured(bundle: Bundle, folder: Path) -> dict[str, Costs | None]:
    """What passes cost on this machine, by drafter, None if that is not known. folder: of engines."""
    manifest = bundle.manifest
    return {drafter: Costs.read(folder, manifest.rows, manifest.suffix(drafter)) for drafter in manifest.each}


def performance(bundle: Bundle, backend: str, costs: Mapping[str, Costs | None]) -> list[str]:
    """What a cycle costs with each drafter, and the speed-up that follows. costs: see ``measured``; empty if nothing
    is."""
    lines = list[str]()
    for drafter in bundle.manifest.each:
        own = _performance(bundle.of(drafter), backend, costs.get(drafter))
        lines += [f"drafter {drafter}: {line}" for line in own] if drafter else own
    return lines


def _performance(bundle: Bundle, backend: str, costs: Costs | None) -> list[str]:
    manifest, graphs = bundle.manifest, bundle.manifest.form(backend).graphs
    if not manifest.has_drafter:
        return [f"a plain pass reads {size(graphs['target'].reads)} of weights", _NO_DRAFTER]
    target, draft = graphs["target"].reads, graphs["draft"].reads
    share = 1 + draft / target
    lines = [
        f"a plain pass reads {size(target)} of weights, a cycle {size(target + draft)}: {share:.2f} times as much",
        f"memory-bound estimate: {_speed_up(share, manifest)}",
    ]
    if costs is not None:
        share = (costs.target[manifest.rows] + costs.draft + costs.host) / (costs.target[1] + costs.host)
        lines.append(f"estimate from the passes measured here: {_speed_up(share, manifest)}")
    if manifest.depth + 1 > TAU:
        lines.append(
            f"tau is the tokens per pass of the target: {TAU} is the paper's mean with 64 rows, yours depends on the "
            "text"
        )
    if _expected(share, manifest) < _WORTHWHILE:
        lines.append(
            "warning: that is little. A drafter of fewer bytes allows more: see --draft-weights and --draft-vocab"
        )
    return lines


def _expected(share: float, manifest: Manifest) -> float:
    return min(TAU, manifest.depth + 1) / share


def _speed_up(share: float, manifest: Manifest) -> str:
    """share: cost of a cycle in plain passes."""
    deepest = manifest.depth + 1  # tokens of a cycle whose longest path is accepted
    expected = f"{_expected(share, manifest):.1f} at a tau of {TAU}, " if deepest > TAU else ""
    return f"speed-up = tau / {share:.2f}: {expected}at most {deepest / share:.1f}"


def memory(bundle: Bundle, backend: Backend) -> list[str]:
    """What running takes. Raises GumihoError if the processor lacks what the bundle's products need."""
    running = backend.memory(bundle).running
    device = f", and {size(running.device)} on the device" if running.device else ""
    return [f"running takes about {size(running.host)} of memory{device}"]


def verdicts(errors: Mapping[str, float], form: Form, depth: int) -> list[str]:
    """Each error against its limit. errors: as ``golden_replay.replay`` and ``exporter.writing.validate.validate``
    return them.

    The errors of target outputs are relative to the largest value, those of the draft's scores are in nats.
    """
    lines, over = [], too_large(errors, form, depth)
    for name, error in errors.items():
        if name == _CHOICES:
            lines.append(f"{name} {error:.1%}: {'ok' if not error else 'only near-ties may differ'}")
        else:
            verdict = "TOO LARGE" if name in over else "ok"
            lines.append(f"{name} {error:.1e} of at most {_limit(name, form, depth):.1e}: {verdict}")
    return lines


def too_large(errors: Mapping[str, float], form: Form, depth: int) -> list[str]:
    """The outputs whose errors exceed their limits. errors: see ``verdicts``."""
    return [name for name, error in errors.items() if name != _CHOICES and not error <= _limit(name, form, depth)]


def _limit(output: str, form: Form, depth: int) -> float:
    return limits(form, depth)["draft" if output.startswith("draft") else "target"]
