"""What an export tells about itself, before and after."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.bundle.manifest import Manifest

    from .plan import Plan

_TAU = 4.46  # tokens a cycle: the paper's mean over six sets of prompts (Llama-3-8B, temperature 0, 64 rows)
_WORTHWHILE = 1.5  # times plain decoding's speed


def describe(plan: "Plan", out: Path) -> str:
    from .plan import free_space

    tree, sizes = plan.tree, plan.sizes()
    shared = plan.shared()
    lines = [
        f"bundle    {out}",
        f"target    {plan.pair.target.source}: {plan.pair.target_shape}",
        f"drafter   {plan.pair.drafter.source}: {plan.pair.draft_shape.layers} serial layers, {plan.pair.heads} heads",
        f"tree      {tree.rows} rows, depth {tree.depth}, beam {tree.beam}, top-k {tree.top_k}, head top-k {tree.head_top_k}"
        + (", the reference's quirks" if tree.reference else ""),
        f"capacity  {plan.capacity} positions",
        *trimmed(plan),
        *quantization(plan),
        *links(plan),
        *(f"writes    {file}  {size / 1e6:.1f} MB" for file, size in sizes.items()),
        f"shared    {shared / 1e6:.1f} MB of it at least are stored once and not written again",
        f"disk      {plan.disk() / 1e9:.3f} GB needed at most, {free_space(out) / 1e9:.3f} GB free",
        f"memory    {plan.memory() / 1e9:.2f} GB at the peak",
    ]
    return "\n".join(lines)


def trimmed(plan: "Plan") -> list[str]:
    """What is drafted, where that is not every token."""
    found = plan.pair.draft_vocabulary
    return [f"drafts    {len(found.ids)} of {plan.pair.target_shape.vocabulary} tokens, {found.origin}"] if found else []


def quantization(plan: "Plan") -> list[str]:
    """What is quantized and how, and what stays as it is."""
    if not plan.quantized:
        return []
    lines, kept = [f"weights   {model}: {plan.how(model)}" for model in plan.quantized], plan.kept()
    if kept:
        lines.append(
            f"kept      {kept[0]} and {len(kept) - 1} more, whose rows are not several blocks of {plan.block}, are not quantized"
        )
    if "migraphx" in plan.backends and plan.quantized.get("draft") == "int4":
        lines.append(
            "warning: on a GPU MIGraphX turns an int4 drafter's gate and up projections into floats and unpacks what several products "
            "share, lm_head above all, in every pass: a cycle reads and writes more than with --draft-weights none"
        )
    return lines


def forecast(manifest: "Manifest") -> list[str]:
    """What a cycle reads of the weights, and the speed-up that allows where reading them is what a pass costs."""
    graphs = manifest.forms[manifest.default].graphs
    target, draft = graphs["target"].reads, graphs["draft"].reads
    most = _TAU * target / (target + draft)
    lines = [
        f"a cycle reads {target / 1e6:.1f} MB of target and {draft / 1e6:.1f} MB of drafter: with the paper's mean of {_TAU} tokens a "
        f"cycle at most {most:.1f} times the speed of plain decoding"
    ]
    if most < _WORTHWHILE:
        lines.append(
            "warning: that is little. A drafter of fewer bytes allows more: see --draft-weights, --draft-vocab, --heads and --beam"
        )
    return lines


def links(plan: "Plan") -> list[str]:
    """What is linked, and what is packed all the same."""
    packed = sum(plan.sizes().values()) - plan.shared()
    linked = f"linked    {plan.linked() / 1e6:.1f} MB in the checkpoints' files, {packed / 1e6:.1f} MB at most are packed"
    return [linked] if plan.link else []
