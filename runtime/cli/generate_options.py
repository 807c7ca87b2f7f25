"""The options of ``generate``, and the settings and prompts that they specify."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..decoding.grammar import Grammar
from ..decoding.settings import Settings
from ..errors import InputError, json_line, reason
from . import command
from .checks.comparison import NEAR_TIE
from .command import argument_parser, read_text
from .engine_options import add_engine_options


def parser() -> argparse.ArgumentParser:
    about = "Generates text from a bundle and streams it to standard output."
    if command.through_gumiho == "chat":
        about = "Holds a conversation with a bundle's target, in its chat template, over standard input and output."
    parser = argument_parser("generate", about)
    parser.add_argument("bundle", help="folder made by gumiho-export")
    _prompts_and_drafts(parser)
    _limits(parser.add_argument_group("limits"))
    _choice(parser.add_argument_group("choice of tokens"))
    _checks(parser.add_argument_group("checks and statistics"))
    _lossy(parser.add_argument_group("lossy: faster, but the output may differ from the target's"))
    _engine(parser.add_argument_group("backend"))
    return parser


def _prompts_and_drafts(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", help="text to continue (default: read standard input)")
    source.add_argument("--prompt-file", type=Path, help="file with the text to continue")
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="JSONL",
        help="file with several prompts: one JSON object per line, with 'prompt', or with 'turns', a list whose first "
        "element is used",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue the prompts as they are (default: write them in the target's chat template, if it has one)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="without a prompt, hold a conversation over standard input; with one, fail if the target has no chat "
        "template",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message in front of the prompt (default: none)")
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="special tokens that messages spell out, such as <|im_end|>, keep their meaning (default: they are text)",
    )
    parser.add_argument("--no-speculation", action="store_true", help="plain decoding on the same engine")
    parser.add_argument(
        "--no-lookup", action="store_true", help="verify only the drafter's proposals, without prompt lookup"
    )
    parser.add_argument(
        "--drafter",
        metavar="NAME",
        help="draft with this one of the bundle's drafters (default: the one that has been fastest)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="verify N rows of every draft tree, without prompt lookup (default: chosen per cycle from the measured "
        "cost of passes and the acceptance so far)",
    )


def _limits(limits: argparse._ArgumentGroup) -> None:
    limits.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=int,
        default=256,
        metavar="N",
        help="generate at most N tokens (default: 256)",
    )
    limits.add_argument(
        "--min-new-tokens",
        type=int,
        default=0,
        metavar="N",
        help="ignore ends of text and stop strings before N tokens (default: 0)",
    )
    limits.add_argument(
        "--max-seconds",
        type=float,
        default=float("inf"),
        metavar="S",
        help="stop after S seconds of wall clock (default: no limit)",
    )
    limits.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before this string; repeatable"
    )
    limits.add_argument(
        "--stop-token", action="append", type=int, default=[], metavar="ID", help="stop at this token id; repeatable"
    )


def _choice(choice: argparse._ArgumentGroup) -> None:
    choice.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 takes the most likely token (default: 0)",
    )
    choice.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens (default: 0, all tokens)",
    )
    choice.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="nucleus sampling: smallest set with probability P (default: 1)",
    )
    choice.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample from tokens at least P times as likely as the most likely one (default: 0)",
    )
    choice.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed; the same seed gives the same text (default: a new one, reported by --stats)",
    )
    _adjustments(choice)
    _guides(choice.add_mutually_exclusive_group())


def _adjustments(choice: argparse._ArgumentGroup) -> None:
    choice.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="penalty as in transformers (default: 1)"
    )
    choice.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="X", help="penalty as in OpenAI's API (default: 0)"
    )
    choice.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="penalty as in OpenAI's API (default: 0)"
    )
    choice.add_argument(
        "--no-repeat-ngram",
        type=int,
        default=0,
        metavar="N",
        help="do not repeat any sequence of N tokens (default: 0, repeats allowed)",
    )
    choice.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to the logit of this token id; repeatable",
    )
    choice.add_argument(
        "--ban", action="append", type=int, default=[], metavar="ID", help="never emit this token id; repeatable"
    )


def _guides(guided: argparse._MutuallyExclusiveGroup) -> None:
    guided.add_argument(
        "--json-schema",
        metavar="FILE",
        help="emit JSON that matches this schema: a file, or the schema itself ({} for any JSON)",
    )
    guided.add_argument("--regex", metavar="PATTERN", help="emit text that matches this regular expression")
    guided.add_argument(
        "--grammar", type=Path, metavar="FILE", help="emit text that matches this grammar, in llguidance's Lark syntax"
    )


def _checks(checks: argparse._ArgumentGroup) -> None:
    checks.add_argument(
        "--compare", action="store_true", help="decode with and without speculation; exit status 1 if the tokens differ"
    )
    checks.add_argument(
        "--check-lossless",
        action="store_true",
        help=f"replay the tokens by plain decoding; exit status 1 if any differ, {NEAR_TIE} if only near-ties differ",
    )
    checks.add_argument(
        "--trace", type=Path, metavar="FILE", help="write where every token came from, to a .html or .jsonl file"
    )
    checks.add_argument(
        "--stats",
        nargs="?",
        const="text",
        choices=("text", "json"),
        help="print statistics on standard error; json: print only one JSON object, with the text in it, on standard "
        "output (default: no statistics; text if no format is given)",
    )
    checks.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --stats json: the target's log-probability of every token and of its N most likely alternatives "
        "(default: off)",
    )


def _lossy(lossy: argparse._ArgumentGroup) -> None:
    lossy.add_argument(
        "--tree", choices=("exact", "fta"), default="exact", help="fta: Gumiho's Full Tree Attention (default: exact)"
    )
    lossy.add_argument(
        "--accept",
        choices=("exact", "typical"),
        default="exact",
        help="typical: Medusa's typical acceptance (default: exact)",
    )


def _engine(engine: argparse._ArgumentGroup) -> None:
    add_engine_options(engine)


def _written(file: Path, what: str) -> str:
    """Like ``read_text``, but raises InputError for an empty file too."""
    text = read_text(file, what)
    if not text.strip():
        raise InputError(f"'{file}' is empty: write {what} in it, or name another file")
    return text


def _biases(given: Sequence[str]) -> dict[int, float]:
    try:
        return {int(name): float(value) for name, value in (pair.split("=", 1) for pair in given)}
    except ValueError:
        raise InputError(
            f"--logit-bias is '{' '.join(given)}': give a token id and a number, such as 42=-1.5"
        ) from None


def _grammar(args: argparse.Namespace) -> Grammar | None:
    if args.regex is not None:
        return Grammar.regex(args.regex)
    if args.json_schema is not None:
        given = args.json_schema
        if not given.strip():
            raise InputError("--json-schema is empty: give a file, or the schema itself ({} for any JSON)")
        return Grammar.json(given if given.lstrip().startswith("{") else _written(Path(given), "the schema"))
    return Grammar.lark(_written(args.grammar, "the grammar")) if args.grammar else None


def prompted(args: argparse.Namespace) -> bool:
    """Whether the options give a prompt."""
    return args.prompt is not None or bool(args.prompt_file or args.prompts)


def settings(args: argparse.Namespace) -> Settings:
    """The settings that the options give. Raises InputError for values that are not valid or exclude each other."""
    if args.compare and args.no_speculation:
        raise InputError("--compare decodes both ways: leave out --no-speculation")
    if args.compare and args.max_seconds < float("inf"):
        raise InputError("--compare needs both texts to end at the same token: leave out --max-seconds")
    for option, given in (("--chat", args.chat), ("--system", args.system), ("--special-tokens", args.special_tokens)):
        if args.raw and given:
            raise InputError(f"--raw uses no chat template: leave out {option}")
    if args.logprobs is not None and args.stats != "json":
        raise InputError("--logprobs are printed as JSON: add --stats json")
    for option, given in (
        ("--compare", args.compare),
        ("--check-lossless", args.check_lossless),
        ("--trace", args.trace),
        ("--stats json", args.stats == "json"),
    ):
        if given and args.chat and not prompted(args):
            raise InputError(f"{option} is for prompts, not for conversations: give --prompt, or leave it out")
    return Settings(
        args.max_new_tokens,
        not args.no_speculation,
        args.min_new_tokens,
        args.max_seconds,
        args.stop,
        args.stop_token,
        logit_bias=_biases(args.logit_bias),
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        no_repeat_ngram=args.no_repeat_ngram,
        banned=args.ban,
        grammar=_grammar(args),
        lookup=not args.no_lookup,
        rows=args.rows,
        drafter=args.drafter,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        tree=args.tree,
        accept=args.accept,
        trace=args.trace is not None,
        logprobs=args.logprobs,
    )


def _prompts(file: Path) -> list[str]:
    """The prompts of a .jsonl file."""
    prompts = list[str]()
    remedy = "give one JSON object per line, with a 'prompt'"
    for number, line in enumerate(_written(file, "the prompts").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json_line(line, number)
        except (ValueError, RecursionError) as error:
            raise InputError(f"'{file}' is not a file of prompts ({reason(error)}): {remedy}") from None
        record = record if isinstance(record, dict) else {}
        turns = record.get("turns")
        prompt = record.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
        if not isinstance(prompt, str):
            raise InputError(
                f"'{file}' is not a file of prompts (line {number} has no prompt that is a string): {remedy}"
            )
        prompts.append(prompt)
    return prompts


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts that the options specify. Raises InputError if they cannot be read."""
    if args.prompt is not None:
        return [args.prompt]
    if args.prompt_file:
        return [_written(args.prompt_file, "the prompt")]
    if args.prompts:
        return _prompts(args.prompts)
    try:
        if sys.stdin is None:
            raise InputError("there is no standard input to read the prompt from: give --prompt")
        if sys.stdin.isatty():
            print("type the prompt; Ctrl-D on a line of its own ends it", file=sys.stderr)
        if not (typed := sys.stdin.read()):
            raise InputError(
                "the prompt on standard input is empty: write one, or give --prompt '' to continue nothing"
            )
        return [typed]
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt cannot be read ({reason(error)}): give UTF-8 text") from None
