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
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from runtime import Model, Stream, load
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


class Results:
    """The results of texts, a line of a file each. Threads may share it."""

    def __init__(self, file: Path, wanted: int) -> None:
        """wanted: tokens to compare, those in the file included."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
        known = {line["number"] for line in self.lines}
        self._numbers = (number for number in count() if number not in known)
        self._file, self._lock = file.open("a", encoding="utf-8"), threading.Lock()
        self._wanted, self._decoded = wanted, sum(line["tokens"] for line in self.lines)

    def close(self) -> None:
        self._file.close()

    def next_number(self) -> int | None:
        """A text's number, None if enough is decoded."""
        with self._lock:
            return next(self._numbers) if self._decoded < self._wanted else None

    def decoded(self, tokens: int) -> None:
        with self._lock:
            self._decoded += tokens

    def add(self, number: int, verdict: Verdict) -> None:
        line = {
            "number": number,
            "tokens": verdict.tokens,
            "near": list(verdict.margins),
            "differs": list(verdict.differs),
        }
        with self._lock:
            self.lines.append(line)
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def total(self) -> Verdict:
        return sum((Verdict(line["tokens"], line["near"], line["differs"]) for line in self.lines), Verdict(0))


def compare(args: argparse.Namespace) -> int:
    failures = list[BaseException]()
    prompts = read_prompts(args.prompts, 80)
    with (
        load(args.bundle, streams=args.streams) as model,
        closing(Results(args.out, args.tokens)) as results,
        Checks(args.bundle) as checks,
    ):

        def work(stream: Stream) -> None:
            try:
                while not failures and (number := results.next_number()) is not None:
                    asked = request(model, prompts, number, args.new_tokens)
                    generation = start(stream, asked)
                    for _ in generation:
                        pass
                    results.decoded(len(generation.ids))
                    checks.add(asked, generation.ids, partial(results.add, number))
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
    total = results.total()
    ties = (
        f"{len(total.margins)} near-ties, the widest {max(total.margins):.1e} of the largest logit"
        if total.margins
        else "no near-ties"
    )
    print(f"{total.tokens} tokens in {len(results.lines)} texts: {ties}, {len(total.differs)} other differences")
    print("\n".join(total.differs), end="")
    return int(bool(total.differs))


if __name__ == "__main__":
    sys.exit(main())
