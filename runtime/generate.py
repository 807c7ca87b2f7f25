"""``python -m runtime.generate BUNDLE --prompt "..."``: text from a bundle, streamed to standard output."""

import argparse
import json
import sys
from pathlib import Path
from typing import NoReturn

from .backends import DEVICES, NAMES
from .errors import GumihoError
from .model import Generation, Model, load


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime.generate", description=__doc__)
    parser.add_argument("bundle", help="folder made by gumiho-export")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue; standard input if neither this nor --prompt-file is given")
    source.add_argument("--prompt-file", type=Path, help="file with the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="tokens to generate at most (256)")
    parser.add_argument("--no-speculation", action="store_true", help="plain decoding on the same engine")
    parser.add_argument("--compare", action="store_true", help="decode both ways; exit status 1 if the tokens differ")
    parser.add_argument(
        "--stats", nargs="?", const="text", choices=("text", "json"),
        help="report on standard error; `json` prints only one JSON object, with the text in it, on standard output",
    )  # fmt: skip
    parser.add_argument("--backend", default="", help=f"whose engines to run: {', '.join(NAMES)} (the bundle's first)")
    parser.add_argument("--device", default="", help=DEVICES)
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads of the engines (one per physical core)")
    return parser


def read_prompt(args: argparse.Namespace) -> str:
    try:
        if args.prompt is not None:
            return str(args.prompt)
        return args.prompt_file.read_text("utf-8") if args.prompt_file else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise GumihoError(f"the prompt cannot be read ({error}): give a readable UTF-8 file or --prompt") from None


def run(model: Model, prompt: str, args: argparse.Namespace, speculate: bool, show: bool) -> tuple[Generation, str]:
    """One generation, its text printed as it comes if asked to."""
    generation, text = model.generate(prompt, args.max_new_tokens, speculate), ""
    for piece in generation:
        text += piece
        if show:
            print(piece, end="", flush=True)
    if show:
        print(flush=True)
    return generation, text


def describe(generation: Generation) -> str:
    """The statistics for a reader."""
    s = generation.stats.summary()
    lines = [
        f"{s['tokens']} tokens after {s['prompt_tokens']}, finished by {s['finish_reason']}; "
        f"first token after {s['time_to_first_token_ms']} ms, then {s['tokens_per_second']} tokens/s",
        f"per cycle: tau {s['tau']} tokens, draft {s['draft_us_per_cycle']} us, target {s['target_us_per_cycle']} us, "
        f"host {s['host_us_per_cycle']} us ({s['cycles']} cycles)",
    ]
    if s["acceptance_by_depth"]:
        lines.append("accepted by depth: " + "  ".join(f"{d + 1}: {a:.0%}" for d, a in enumerate(s["acceptance_by_depth"])))
    return "\n".join(lines)


def comparison(speculative: Generation, plain: Generation) -> dict[str, object]:
    """Whether both ways gave the same tokens, where they first differ, and the ratio of their decoding speeds."""
    a, b = speculative.ids, plain.ids
    differs = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return {
        "identical": a == b,
        "first_difference": None if a == b else differs,
        "speed_ratio": round(speculative.stats.tokens_per_second / (plain.stats.tokens_per_second or 1.0), 3),
    }


def report(generation: Generation, text: str, other: Generation | None, style: str | None) -> None:
    outcome = comparison(generation, other) if other else None
    if style == "json":
        content: dict[str, object] = {"text": text, "ids": generation.ids, "stats": generation.stats.summary()}
        if other:
            content |= {"plain": other.stats.summary(), "compare": outcome}
        print(json.dumps(content))
        return
    if style or other:
        print(describe(generation), file=sys.stderr)
    if other and outcome:
        print(describe(other).replace("per cycle", "plain, per cycle"), file=sys.stderr)
        same = "identical tokens" if outcome["identical"] else f"tokens differ from the {outcome['first_difference']}th on"
        print(f"{same}; speculative decoding runs at {outcome['speed_ratio']} times the speed of plain", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.compare and args.no_speculation:
            raise GumihoError("--compare decodes both ways, so leave out --no-speculation")
        with load(args.bundle, args.backend, args.device, args.threads) as model:
            prompt = read_prompt(args)
            generation, text = run(model, prompt, args, not args.no_speculation, show=args.stats != "json")
            other = run(model, prompt, args, speculate=False, show=False)[0] if args.compare else None
            report(generation, text, other, args.stats)
            return 1 if other and other.ids != generation.ids else 0
    except GumihoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone; what is left in the buffer has nowhere to go either.
        sys.stdout = None
        return 141


def _exit() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _exit()
