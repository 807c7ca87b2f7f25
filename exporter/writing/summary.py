"""What an export tells its user: the recipe of a dry run, and what was made."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.bundle.manifest import RTX

from ..config import AS_IS
from ..recipe.precision import recommendation, unrunnable

if TYPE_CHECKING:
    from graphs.tree import TreeConfig
    from runtime.bundle.reader import Bundle

    from ..checkpoints.pair import Pair
    from ..recipe.recipe import Recipe
    from ..recipe.resolve import VllmRecipe
    from ..weights.quantize import Rounding
    from .engines import Compiled


def describe(recipe: "Recipe | VllmRecipe") -> str:
    """What an export would write and need."""
    from ..disk import free_space
    from ..recipe.recipe import DTYPE_NAMES, Recipe

    if not isinstance(recipe, Recipe):
        return (
            f"Would write '{recipe.config.folder}': config.json and model.safetensors, at most "
            f"{recipe.disk() / 1e6:.1f} MB."
        )
    pair, tree, out = recipe.pair, recipe.tree, recipe.config.folder
    sizes, shared = recipe.sizes(), recipe.shared()
    target = pair.target_shape
    lines = [
        f"Would write the bundle '{out}' for {', '.join(recipe.backends)}.",
        f"Target: {pair.target.source}, a {pair.target_config.architecture.name} of {target.layers} layers, hidden "
        f"size {target.hidden}, {target.vocabulary} tokens in its vocabulary.",
        *(_drafter(pair, tree) if pair.has_drafter else _no_drafter(tree)),
        *(line for own in recipe.further.values() for line in _drafter(own.pair, own.tree)),
        f"Capacity: {recipe.capacity} positions for prompt and text together.",
        f"Precision: {DTYPE_NAMES[recipe.dtype]}, except what is quantized.",
        *([f"Ends: a text ends at {', '.join(pair.spelled(pair.eos_token_ids))}."] if pair.eos_token_ids else []),
        *_schemes(recipe),
        *_remarks(recipe),
        "Weight files:",
        *(f"  {file}  {size / 1e6:.1f} MB" for file, size in sizes.items()),
        f"  At least {shared / 1e6:.1f} MB of these are equal and stored only once.",
        f"Disk: needs at most {recipe.disk() / 1e9:.3f} GB; {free_space(out) / 1e9:.3f} GB are free.",
        f"Memory: the export takes about {recipe.memory() / 1e9:.2f} GB at its peak.",
        *(f"Note: {line}." for line in (*unrunnable(recipe.config), *recommendation(recipe.config))),
        "Nothing was written, because of --dry-run.",
    ]
    return "\n".join(lines)


def _drafter(pair: "Pair", tree: "TreeConfig") -> list[str]:
    from ..checkpoints.families import EAGLE, GUMIHO, HYDRA, MEDUSA, SMALL

    layers, gumiho = pair.draft_shape.layers, pair.family == GUMIHO
    kind = {
        GUMIHO: f"{layers} serial layers and {pair.heads} heads",
        EAGLE: "an EAGLE",
        SMALL: f"a small model of {layers} layers",
        MEDUSA: f"a Medusa of {pair.heads} heads",
        HYDRA: f"a Hydra{'++' * layers} of {pair.reader.levels} heads",
    }.get(pair.family) or f"an EAGLE-3 that reads what enters layers {', '.join(map(str, pair.reader.reads.taps))}"
    if tree.paths:
        of = "EAGLE-1" if pair.family == EAGLE else "Medusa's code"
        shape = f"the best of the {len(tree.paths)} paths of {of}"
    else:
        shape = f"beam {tree.beam}, top-k {tree.top_k}" + (f", head top-k {tree.head_top_k}" if gumiho else "")
    official = ", built as by the official code" if tree.reference else ""
    return [
        f"Drafter: {pair.drafter.source}, {kind}.",
        f"Draft tree: {tree.rows} rows, depth {tree.depth}, {shape}{official}.",
    ]


def _no_drafter(tree: "TreeConfig") -> list[str]:
    return [
        "Drafter: none. The bundle decodes plainly and by prompt lookup.",
        f"Rows: up to {tree.rows} in a pass that verifies looked-up tokens.",
    ]


def _schemes(recipe: "Recipe") -> list[str]:
    models = {"target": "target", "draft": "drafter"}
    return [f"Quantized {models[model]}: {recipe.how(model)}." for model in recipe.quantized]


def _remarks(recipe: "Recipe", rounding: "Rounding | None" = None) -> list[str]:
    """What a manifest does not say: the origin of the draft vocabulary, the matrices that are not quantized though
    their model is, combinations that are bad for a backend, and how much is linked."""
    lines, drafted = _warnings(recipe.pair), recipe.pair.draft_vocabulary
    if drafted:
        lines.append(f"Drafted: {len(drafted.ids)} of {recipe.pair.target_shape.vocabulary} tokens, {drafted.origin}.")
    if unfit := recipe.unquantized():
        others = f" and {len(unfit) - 1} more" if len(unfit) > 1 else ""
        lines.append(
            f"Not quantized: {unfit[0]}{others}, because the length of their rows is no multiple of a block's."
        )
    lines += _kept(recipe, rounding or {})
    if "migraphx" in recipe.backends and recipe.quantized.get("draft") == "int4":
        lines.append(
            "Warning: on a GPU MIGraphX unpacks int4 weights that several products share (above all lm_head) in every "
            "pass: a cycle may read and write more than with --draft-weights none."
        )
    if recipe.link:
        packed = sum(recipe.sizes().values()) - recipe.shared()
        lines.append(
            f"Linked: {recipe.linked() / 1e6:.1f} MB in the checkpoints' files; at most {packed / 1e6:.1f} MB are "
            "packed."
        )
    return lines


def _warnings(pair: "Pair") -> list[str]:
    """What the target's files lack."""
    from runtime.errors import GumihoError

    from ..checkpoints.end_tokens import end_of_turn
    from ..checkpoints.gguf_file import GgufCheckpoint

    ends, edit = pair.eos_token_ids, "add it to eos_token_id in the target's generation_config.json, and export again"
    if isinstance(pair.target, GgufCheckpoint):
        edit = "write its id to the key tokenizer.ggml.eot_token_id of the target's file, and export again"
    lines = [f"Warning: {note}." for note in pair.target.notes]
    if not ends:
        lines.append(
            f"Warning: no token ends a text, so that every text goes on to its largest length. If you know one, {edit}."
        )
    tokenizer, named = pair.special_tokens
    if tokenizer is None:
        others = " that is supported (tekken.json is not)" if (pair.target.folder / "tekken.json").exists() else ""
        lines.append(
            f"Warning: the target has no tokenizer{others}, so that the bundle takes no text, only token ids: put the "
            "model's tokenizer.json, as transformers saves it, into its folder, and export again."
        )
    try:
        turn = end_of_turn(pair.target.folder, tokenizer, named) if tokenizer else None
    except GumihoError as error:
        cause = str(error).replace(str(pair.target.folder), pair.target.source)  # a GGUF file's is a temporary one
        return [
            *lines,
            f"Warning: the bundle completes texts but takes no conversations, because {cause}, and export again.",
        ]
    if turn is not None and turn not in ends:
        lines.append(
            f"Warning: the chat template ends an answer with {pair.spelled([turn])[0]}, at which texts do not end: "
            f"{edit}."
        )
    return lines


def _kept(recipe: "Recipe", rounding: "Rounding") -> list[str]:
    """Which matrices have the checkpoint's own codes, and how far the others are off."""
    if recipe.quantized.get("target") != AS_IS:
        return []
    coded, others, target = recipe.pair.coded(), recipe.uncoded(), recipe.pair.target
    lines = [
        f"Kept: the checkpoint's codes and scales of {len(coded)} matrices. --weights none converts them to floats."
    ]
    if not others:
        return lines
    tied = recipe.pair.target_config.tie_word_embeddings
    kinds = sorted({target.dtype("embed_tokens.weight" if tied and n == "lm_head.weight" else n) for n in others})
    named = f"{others[0]}{f' and {len(others) - 1} more' if len(others) > 1 else ''} ({', '.join(kinds)})"
    if recipe.others == "none":
        return [*lines, f"Converted to floats: {named}, which makes every pass slower."]
    off = {name: error / largest for name, (error, largest) in rounding.items() if largest}
    worst = max(off, key=lambda name: off[name], default=None)
    # An export that was resumed has not quantized all of them itself.
    known = (
        f"the largest error is {off[worst]:.2%} of the largest number of {worst}"
        if worst and len(off) == len(others)
        else ""
    )
    return [*lines, f"Rounded to int8: {named}; {known or 'no error exceeds 0.4% of the largest number of its block'}."]


def report(
    bundle: "Bundle",
    recipe: "Recipe",
    engines: Sequence["Compiled"],
    rounding: "Rounding | None" = None,
    cost: str = "",
) -> str:
    """What was made, how exact and how fast it is, and the next command. rounding: what ``bundle.write`` returned.
    cost: of quantizing, "" if it was not measured."""
    from runtime.backends.rtx_cards import CARDS
    from runtime.engines import summary
    from runtime.engines.store import read_record

    manifest = bundle.manifest
    lines = [
        f"bundle {bundle.path}",
        *(f"  {line}" for line in summary.content(bundle)),
        *(f"  {line}" for line in _remarks(recipe, rounding)),
        *([f"  {cost}"] if cost else []),
    ]
    for one in engines:
        costs = summary.measured(bundle, bundle.path / "engines" / one.folder) if one.folder else {}
        notes = summary.performance(bundle, one.name, costs)
        for plans in one.plans:
            capability = read_record(bundle.path / "engines" / plans).key["capability"]
            notes.append(f"engines/{plans} holds plans for {capability} ({CARDS[capability].cards}), not run yet")
        if one.backend is not None:
            notes += [*summary.memory(bundle, one.backend), f"engines/{one.folder} is current"]
            for check, errors in one.errors.items():
                notes += [
                    f"{check}: {line}" for line in summary.verdicts(errors, manifest.form(one.name), manifest.deepest)
                ]
        else:
            notes.append(f"not compiled here, since {one.problem}")
            if one.name == RTX and not one.plans:
                notes.append(f"plans can be built here: gumiho compile {bundle.path} --backend {RTX} --gpu CARD")
        lines += [f"  {one.name}: {note}" for note in notes]
    lines += [f"note: {line}" for line in recommendation(recipe.config)]
    return "\n".join([*lines, *_next(bundle.path, engines, recipe.config.device)])


def _next(out: Path, engines: Sequence["Compiled"], device: str) -> list[str]:
    """The commands to type, the one for this machine last."""
    where = f" --device {device}" if device else ""
    path = shlex.quote(str(out))
    lines = [
        f"next, on the device: gumiho compile {path} --backend {one.name}{where}"
        for one in engines
        if one.backend is None
    ]
    ready = [one.name for one in engines if one.backend is not None]
    return lines + [f'next: gumiho generate {path} --backend {name}{where} --prompt "..."' for name in ready[:1]]
