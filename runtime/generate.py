"""Generates text from a bundle and streams it to standard output."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .backends import DEVICES, NAMES
from .bundle.files import read_regular
from .command import argument_parser
from .command import run as run_command
from .comparison import NEAR_TIE, Comparison, replay, total
from .decoding.decoder import check
from .decoding.grammar import Grammar
from .decoding.settings import Settings
from .decoding.stats import Stats
from .errors import GumihoError
from .generation import Generation
from .model import Model, load
from .terminal_chat import TerminalChat, opening
from .trace_page import Trace

_MOST = 256 << 20  # bytes of a file with prompts


def parser() -> argparse.ArgumentParser:
    parser = argument_parser("generate", __doc__)
    parser.add_argument("bundle", help="folder made by gumiho-export")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", help="text to continue (default: read standard input)")
    source.add_argument("--prompt-file", type=Path, help="file with the text to continue")
    source.add_argument("--prompts", type=Path, metavar="JSONL", help="file with several prompts: one JSON object per line, with 'prompt', or with 'turns', a list whose first element is used")  # fmt: skip
    parser.add_argument("--chat", action="store_true", help="apply the target's chat template to the prompts; without a prompt, hold a conversation over standard input")  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument("--no-speculation", action="store_true", help="plain decoding on the same engine")
    parser.add_argument("--no-lookup", action="store_true", help="verify only the drafter's proposals, without prompt lookup")
    parser.add_argument("--rows", type=int, metavar="N", help="verify N rows of every draft tree, without prompt lookup (default: chosen per cycle from the measured cost of passes and the acceptance so far)")  # fmt: skip

    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-new-tokens", "--max-tokens", type=int, default=256, metavar="N", help="generate at most N tokens (default: 256)"
    )
    limits.add_argument("--min-new-tokens", type=int, default=0, metavar="N", help="ignore ends of text and stop strings before N tokens (default: 0)")  # fmt: skip
    limits.add_argument("--max-seconds", type=float, default=float("inf"), metavar="S", help="stop after S seconds of wall clock (default: no limit)")  # fmt: skip
    limits.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this string; repeatable")
    limits.add_argument(
        "--stop-token", action="append", type=int, default=[], metavar="ID", help="stop at this token id; repeatable"
    )

    choice = parser.add_argument_group("choice of tokens")
    choice.add_argument("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature; 0 takes the most likely token (default: 0)")  # fmt: skip
    choice.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default: 0, all tokens)")  # fmt: skip
    choice.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling: smallest set with probability P (default: 1)")  # fmt: skip
    choice.add_argument("--min-p", type=float, default=0.0, metavar="P", help="sample from tokens at least P times as likely as the most likely one (default: 0)")  # fmt: skip
    choice.add_argument("--seed", type=int, metavar="N", help="seed; the same seed gives the same text (default: a new one, reported by --stats)")  # fmt: skip
    choice.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="penalty as in transformers (default: 1)"
    )
    choice.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="X", help="penalty as in OpenAI's API (default: 0)"
    )
    choice.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="penalty as in OpenAI's API (default: 0)"
    )
    choice.add_argument("--no-repeat-ngram", type=int, default=0, metavar="N", help="do not repeat any sequence of N tokens (default: 0, repeats allowed)")  # fmt: skip
    choice.add_argument("--logit-bias", action="append", default=[], metavar="ID=X", help="add X to the logit of this token id; repeatable")  # fmt: skip
    choice.add_argument(
        "--ban", action="append", type=int, default=[], metavar="ID", help="never emit this token id; repeatable"
    )
    guided = choice.add_mutually_exclusive_group()
    guided.add_argument("--json-schema", metavar="FILE", help="emit JSON that matches this schema: a file, or the schema itself ({} for any JSON)")  # fmt: skip
    guided.add_argument("--regex", metavar="PATTERN", help="emit text that matches this regular expression")
    guided.add_argument("--grammar", metavar="FILE", help="emit text that matches this grammar, in llguidance's Lark syntax")

    checks = parser.add_argument_group("checks and statistics")
    checks.add_argument("--compare", action="store_true", help="decode with and without speculation; exit status 1 if the tokens differ")  # fmt: skip
    checks.add_argument("--check-lossless", action="store_true", help=f"replay the tokens by plain decoding; exit status 1 if any differ, {NEAR_TIE} if only near-ties differ")  # fmt: skip
    checks.add_argument(
        "--trace", type=Path, metavar="FILE", help="write where every token came from, to a .html or .jsonl file"
    )
    checks.add_argument(
        "--stats", nargs="?", const="text", choices=("text", "json"),
        help="print statistics on standard error; json: print only one JSON object, with the text in it, on standard output "
        "(default: no statistics; text if no format is given)",
    )  # fmt: skip

    lossy = parser.add_argument_group("lossy: faster, but the output may differ from the target's")
    lossy.add_argument(
        "--tree", choices=("exact", "fta"), default="exact", help="fta: Gumiho's Full Tree Attention (default: exact)"
    )
    lossy.add_argument(
        "--accept", choices=("exact", "typical"), default="exact", help="typical: Medusa's typical acceptance (default: exact)"
    )

    engine = parser.add_argument_group("backend")
    engine.add_argument("--backend", default="", help=f"backend to run: {', '.join(NAMES)} (default: the bundle's first)")
    engine.add_argument("--device", default="", help=DEVICES)
    engine.add_argument(
        "--threads", type=int, default=0, metavar="N", help="CPU threads of the engines (default: one per physical core)"
    )
    return parser


def _read(file: Path, what: str) -> str:
    try:
        return read_regular(file, _MOST).decode("utf-8")
    except (OSError, ValueError) as error:
        raise GumihoError(f"{what} cannot be read ({error}): give a readable UTF-8 file") from None


def _biases(given: Sequence[str]) -> dict[int, float]:
    try:
        return {int(name): float(value) for name, value in (pair.split("=", 1) for pair in given)}
    except ValueError:
        raise GumihoError(f"--logit-bias is {' '.join(given)}: give a token id and a number, such as 42=-1.5") from None


def _grammar(args: argparse.Namespace) -> Grammar | None:
    if args.regex is not None:
        return Grammar.regex(args.regex)
    if args.json_schema is not None:
        given = args.json_schema
        return Grammar.json(given if given.lstrip().startswith("{") else _read(Path(given), "the schema"))
    return Grammar.lark(_read(Path(args.grammar), "the grammar")) if args.grammar is not None else None


def prompted(args: argparse.Namespace) -> bool:
    """Whether a prompt is among the options."""
    return args.prompt is not None or bool(args.prompt_file or args.prompts)


def settings(args: argparse.Namespace) -> Settings:
    """What the options ask for. Raises GumihoError for values that mean nothing."""
    if args.compare and args.no_speculation:
        raise GumihoError("--compare decodes both ways, so leave out --no-speculation")
    if args.compare and args.max_seconds < float("inf"):
        raise GumihoError("--compare needs texts that end alike, so leave out --max-seconds")
    if args.system and not args.chat:
        raise GumihoError("--system begins a chat: add --chat")
    for option, given in (("--compare", args.compare), ("--check-lossless", args.check_lossless), ("--trace", args.trace),
                          ("--stats json", args.stats == "json")):  # fmt: skip
        if given and args.chat and not prompted(args):
            raise GumihoError(f"{option} is for prompts, not for conversations: give --prompt, or leave it out")
    return Settings(
        args.max_new_tokens, not args.no_speculation, args.min_new_tokens, args.max_seconds, args.stop, args.stop_token,
        logit_bias=_biases(args.logit_bias), repetition_penalty=args.repetition_penalty, presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty, no_repeat_ngram=args.no_repeat_ngram, banned=args.ban, grammar=_grammar(args),
        lookup=not args.no_lookup, rows=args.rows, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed,
        tree=args.tree, accept=args.accept, trace=args.trace is not None,
    )  # fmt: skip


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts given. Raises GumihoError where they cannot be read."""
    if args.prompt is not None:
        return [args.prompt]
    if args.prompt_file:
        return [_read(args.prompt_file, "the prompt")]
    if args.prompts:
        lines = [line for line in _read(args.prompts, "the prompts").split("\n") if line.strip()]
        try:
            found = [json.loads(line) for line in lines]
            prompts = [one["prompt"] if "prompt" in one else one["turns"][0] for one in found]
            if not all(isinstance(one, dict) and isinstance(prompt, str) for one, prompt in zip(found, prompts, strict=True)):
                raise TypeError("a prompt is no text")
            if any(isinstance(one.get("turns"), str) for one in found):
                raise TypeError("turns are a text, and no list")
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise GumihoError(
                f"{args.prompts} is no list of prompts ({error}): give a JSON object a line, with a 'prompt'"
            ) from None
        if not prompts:
            raise GumihoError(f"{args.prompts} is empty: give a JSON object a line, with a 'prompt'")
        return prompts
    try:
        if sys.stdin is None:
            raise GumihoError("there is no standard input to read the prompt from: give --prompt")
        return [sys.stdin.read()]
    except UnicodeDecodeError as error:
        raise GumihoError(f"the prompt cannot be read ({error}): give UTF-8 text") from None


def tokens_of(model: Model, prompt: str, args: argparse.Namespace) -> list[int]:
    if not args.chat:
        return model.encode(prompt)
    return model.chat([*opening(args.system), {"role": "user", "content": prompt}])


def run(model: Model, prompt: Sequence[int], asked: Settings, show: bool, trace: Path | None = None) -> tuple[Generation, str]:
    """One generation, its text printed as it comes if asked to, and written down where it came from."""
    generation, text = model.start(prompt, asked), ""
    about = {"bundle": model.bundle.path.name, "rows": model.bundle.manifest.rows, "speculate": asked.speculate}
    tokenizer = model.bundle.tokenizer if model.bundle.has_tokenizer else None
    price = model.decoder.planner.plain_pass_ns if model.decoder.planner else None
    written = Trace(prompt, model.bundle.manifest.tree.serial_steps, tokenizer, about, price) if trace else None
    for piece in generation.pieces(written.add if written else None):
        text += piece
        if show:
            print(piece, end="", flush=True)
    if show:
        print(flush=True)
    if written and trace:
        written.write(trace, generation.stats.summary())
    return generation, text


def describe(stats: Stats) -> str:
    """The statistics for a reader."""
    s = stats.summary()
    cached = f" ({s['cached_tokens']} of them known)" if s["cached_tokens"] else ""
    seed = "" if s["seed"] is None else f", seed {s['seed']}"
    ended = f", finished by {s['finish_reason']}" if s["finish_reason"] else ""
    lines = [
        f"{s['tokens']} tokens after {s['prompt_tokens']}{cached}{ended}{seed}; "
        f"first token after {s['time_to_first_token_ms']} ms, then {s['tokens_per_second']} tokens/s",
        f"per cycle: tau {s['tau']} tokens, draft {s['draft_us_per_cycle']} us, target {s['target_us_per_cycle']} us, "
        f"host {s['host_us_per_cycle']} us ({s['cycles']} cycles)",
    ]
    if len(s["cycles_by_rows"]) > 1:
        lines.append("cycles by rows verified: " + "  ".join(f"{rows}: {n}" for rows, n in s["cycles_by_rows"].items()))
    if s["lookups"]:
        lines.append(f"looked up: {s['looked_up']} tokens in {s['lookups']} cycles")
    if s["acceptance_by_depth"]:
        lines.append("accepted by depth: " + "  ".join(f"{d + 1}: {a:.0%}" for d, a in enumerate(s["acceptance_by_depth"])))
    return "\n".join(lines)


def notices(model: Model, args: argparse.Namespace, asked: Settings) -> None:
    """What a user should know before the text comes."""
    if asked.lossy:
        named = [f"--{name} {value}" for name, value in (("tree", asked.tree), ("accept", asked.accept)) if value != "exact"]
        print(f"note: with {' and '.join(named)} the output may differ from the target's", file=sys.stderr)
    if not args.chat and model.chat_template is not None:
        print("note: the target is a chat model; --chat writes the prompt as its template wants", file=sys.stderr)


def report(generations: Sequence[Generation], texts: Sequence[str], compared: Comparison | None, style: str | None) -> None:
    stats = total(generations)
    if style == "json":
        ids = [generation.ids for generation in generations]
        one = len(texts) == 1
        content: dict[str, Any] = {"text": texts[0], "ids": ids[0]} if one else {"texts": texts, "ids": ids}
        if not one:
            content |= {"seeds": [g.stats.seed for g in generations], "finish_reasons": [g.finish_reason for g in generations]}
        content["stats"] = stats.summary()
        if compared:
            content |= {"plain" if not generations[0].settings.lossy else "exact": compared.other.summary(), "compare": compared.summary()}  # fmt: skip
        print(json.dumps(content))
        return
    if style or compared:
        print(describe(stats), file=sys.stderr)
    if compared:
        lossy = generations[0].settings.lossy
        other = describe(compared.other).replace("per cycle", f"{'exact' if lossy else 'plain'}, per cycle")
        print(f"{other}\n{compared.describe(lossy)}", file=sys.stderr)


def generate(model: Model, args: argparse.Namespace, asked: Settings) -> int:
    notices(model, args, asked)
    if args.chat and not prompted(args):
        return TerminalChat(model, asked, args.system, describe, bool(args.stats)).run()
    prompts = [tokens_of(model, prompt, args) for prompt in read_prompts(args)]
    for i, prompt in enumerate(prompts if args.prompts else ()):
        try:
            check(model.bundle.manifest, prompt)
        except GumihoError as error:
            raise GumihoError(f"of {args.prompts}, prompt {i + 1}: {error}") from None
    if args.trace and len(prompts) > 1:
        raise GumihoError("--trace shows one text: give one prompt")
    ended = [run(model, prompt, asked, args.stats != "json", args.trace) for prompt in prompts]
    generations, texts = [generation for generation, _ in ended], [text for _, text in ended]
    compared = None
    if args.compare:
        other = replace(asked, trace=False, tree="exact", accept="exact", speculate=asked.lossy)
        seeds = [generation.stats.seed for generation in generations]
        again = [
            run(model, prompt, replace(other, seed=seed), show=False)[0] for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        compared = Comparison.of(generations, again)
    report(generations, texts, compared, args.stats)
    differ = compared is not None and compared.differ and not asked.lossy
    replayed = replay(model, generations) if args.check_lossless else 0
    return 1 if differ else replayed


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)

    def work() -> int:
        asked = settings(args)
        if args.trace:
            Trace.check(args.trace)
        with load(args.bundle, args.backend, args.device, args.threads) as model:
            return generate(model, args, asked)

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
