"""Generates text from a bundle and streams it to standard output."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..api.generation import Generation
from ..api.loader import load
from ..api.model import Model
from ..decoding.checks import check
from ..decoding.settings import Settings
from ..errors import GumihoError, InputError
from .checks.comparison import SideBySide, report_differences, total
from .command import run as run_command
from .generate_options import parser, prompted, read_prompts, settings
from .stats_table import table
from .terminal_chat import TerminalChat, opening
from .trace_page import Trace


def tokens_of(model: Model, prompt: str, args: argparse.Namespace) -> list[int]:
    """The prompt's token ids, in the target's chat template if it has one and ``--raw`` is not given."""
    templated = args.chat or args.system or model.chat_template is not None
    if args.raw or not templated:
        return model.encode(prompt)
    try:
        return model.chat(
            [*opening(args.system), {"role": "user", "content": prompt}], special_tokens=args.special_tokens
        )
    except GumihoError as error:
        raise InputError(f"{error} (--raw continues the prompt without a chat template)") from None


def run(
    model: Model, prompt: Sequence[int], chosen: Settings, show: bool, trace: Path | None = None
) -> tuple[Generation, str]:
    """Runs a generation. Returns it and its text. show: print the text while it is generated. trace: file for the
    record of its cycles."""
    generation, text = model.start(prompt, chosen), ""
    about = {"bundle": model.bundle.path.name, "rows": model.bundle.manifest.rows, "speculate": chosen.speculate}
    tokenizer = model.bundle.tokenizer if model.bundle.has_tokenizer else None
    price = model.decoder.planner.plain_pass_ns if model.decoder.planner else None
    steps = model.bundle.manifest.serial_steps(generation.drafter)
    written = Trace(prompt, steps, tokenizer, about, price) if trace else None
    for piece in generation.pieces(written.add if written else None):
        text += piece
        if show:
            print(piece, end="", flush=True)
    if show:
        print(flush=True)
    if written and trace:
        written.write(trace, generation.stats.summary())
    return generation, text


def warn_if_lossy(chosen: Settings) -> None:
    if chosen.lossy:
        options = [
            f"--{name} {value}"
            for name, value in (("tree", chosen.tree), ("accept", chosen.accept))
            if value != "exact"
        ]
        print(f"note: with {' and '.join(options)} the output may differ from the target's", file=sys.stderr)


def report(
    generations: Sequence[Generation], texts: Sequence[str], compared: SideBySide | None, style: str | None
) -> None:
    stats = total(generations)
    if style == "json":
        ids = [generation.ids for generation in generations]
        one = len(texts) == 1
        content: dict[str, Any] = {"text": texts[0], "ids": ids[0]} if one else {"texts": texts, "ids": ids}
        if not one:
            content |= {
                "seeds": [g.stats.seed for g in generations],
                "finish_reasons": [g.finish_reason for g in generations],
            }
        if generations[0].settings.logprobs is not None:
            logprobs = [[asdict(token) for token in generation.logprobs] for generation in generations]
            content["logprobs"] = logprobs[0] if one else logprobs
        content["stats"] = stats.summary()
        if compared:
            content |= {
                "plain" if not generations[0].settings.lossy else "exact": compared.other.summary(),
                "compare": compared.summary(),
            }
        print(json.dumps(content))
        return
    if style or compared:
        print(table(stats), file=sys.stderr)
    if compared:
        lossy = generations[0].settings.lossy
        other = f"{'exact speculation' if lossy else 'plain decoding'} of the same prompts:\n{table(compared.other)}"
        print(f"{other}\n{compared.describe(lossy)}", file=sys.stderr)


def generate(model: Model, args: argparse.Namespace, chosen: Settings) -> int:
    warn_if_lossy(chosen)
    if args.chat and not prompted(args):
        return TerminalChat(model, chosen, args.system, bool(args.stats), args.special_tokens).run()
    prompts = [tokens_of(model, prompt, args) for prompt in read_prompts(args)]
    for i, prompt in enumerate(prompts if args.prompts else ()):
        try:
            check(model.bundle.manifest, prompt)
        except GumihoError as error:
            raise InputError(f"of {args.prompts}, prompt {i + 1}: {error}") from None
    if args.trace and len(prompts) > 1:
        raise InputError("--trace shows one text: give one prompt")
    runs = [run(model, prompt, chosen, args.stats != "json", args.trace) for prompt in prompts]
    generations, texts = [generation for generation, _ in runs], [text for _, text in runs]
    compared = None
    if args.compare:
        other = replace(chosen, trace=False, tree="exact", accept="exact", speculate=chosen.lossy)
        seeds = [generation.stats.seed for generation in generations]
        others = [
            run(model, prompt, replace(other, seed=seed), show=False)[0]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        compared = SideBySide.of(generations, others)
    report(generations, texts, compared, args.stats)
    differ = compared is not None and compared.differ and not chosen.lossy
    status = report_differences(model, generations) if args.check_lossless else 0
    return 1 if differ else status


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)

    def work() -> int:
        chosen = settings(args)
        if args.trace:
            Trace.check(args.trace)
        with load(args.bundle, args.backend, args.device, args.threads) as model:
            return generate(model, args, chosen)

    return run_command(work)
