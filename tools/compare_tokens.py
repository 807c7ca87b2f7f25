"""Compares speculative with plain decoding, token by token, for a given number of tokens.

    python -m tools.compare_tokens BUNDLE --prompts FILE ... --tokens 100000

Decodes prompts of random lengths with random settings and seeds on several concurrent streams, and again by plain
decoding, one at a time, in other processes. Each text's result is a line of OUT; running the same command again
continues after them. Prints the numbers of tokens, texts and differences: near-ties, which rounding explains, with the
largest margin, and defects. Exits with 1 if there are defects.
"""

import argparse
import json
import random
import sys
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from runtime import Model, load
from runtime.cli.command import run
from tools.load import read_prompts
from tools.replay import Checks, Verdict, start

_LENGTHS = 1, 8, 40, 200, 1000  # most tokens of a prompt
_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"lookup": False},
    {"rows": 2},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.3, "min_p": 0.05},
    {"repetition_penalty": 1.2},
    {"temperature": 0.7, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"logit_bias": {17: -2.0}},
)


def request(model: Model, prompts: Sequence[str], number: int, most: int) -> dict[str, Any]:
    """A random request, the same one for the same number."""
    draw = random.Random(number)
    ids = model.encode(draw.choice(prompts))[: draw.choice(_LENGTHS)]
    room = model.capacity - len(ids)
    return {
        "prompt": ids[: model.capacity],
        "max_tokens": draw.randint(1, max(1, min(most, room))),
        "seed": number,
        **draw.choice(_SETTINGS),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL with 'turns' or 'prompt'")
    parser.add_argument(
        "--tokens", type=int, default=100_000, help="to compare, those in OUT included (default: 100000)"
    )
    parser.add_argument("--streams", type=int, default=4, help="texts decoded at once (default: 4)")
    parser.add_argument("--new-tokens", type=int, default=300, help="tokens of a text at most (default: 300)")
    parser.add_argument("--out", type=Path, default=Path("build/tokens.jsonl"), help="(default: build/tokens.jsonl)")
    args = parser.parse_args(argv)
    return run(lambda: compare(args))


def compare(args: argparse.Namespace) -> int:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in args.out.read_text("utf-8").splitlines()] if args.out.exists() else []
    known, tokens = {line["number"] for line in lines}, sum(line["tokens"] for line in lines)
    numbers = (number for number in count() if number not in known)
    lock = threading.Lock()
    failures = list[BaseException]()
    prompts = read_prompts(args.prompts, 80)
    with (
        load(args.bundle, streams=args.streams) as model,
        args.out.open("a", encoding="utf-8") as out,
        Checks(args.bundle) as checks,
    ):

        def write(number: int, verdict: Verdict) -> None:
            with lock:
                lines.append(
                    {
                        "number": number,
                        "tokens": verdict.tokens,
                        "near": list(verdict.margins),
                        "differs": list(verdict.differs),
                    }
                )
                out.write(json.dumps(lines[-1]) + "\n")
                out.flush()

        def work(stream: Model) -> None:
            nonlocal tokens
            try:
                while not failures:
                    with lock:
                        if tokens >= args.tokens:
                            return
                        number = next(numbers)
                    asked = request(model, prompts, number, args.new_tokens)
                    generation = start(stream, asked)
                    for _ in generation:
                        pass
                    with lock:
                        tokens += len(generation.ids)
                    checks.add(asked, generation.ids, lambda verdict, number=number: write(number, verdict))  # type: ignore[misc]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(stream,)) for stream in model.streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        checks.verdict()
    total = sum((Verdict(line["tokens"], line["near"], line["differs"]) for line in lines), Verdict(0))
    ties = (
        f"{len(total.margins)} near-ties, the widest {max(total.margins):.1e} of the largest logit"
        if total.margins
        else "no near-ties"
    )
    print(f"{total.tokens} tokens in {len(lines)} texts: {ties}, {len(total.differs)} other differences")
    print("\n".join(total.differs), end="")
    return int(bool(total.differs))


if __name__ == "__main__":
    sys.exit(main())
