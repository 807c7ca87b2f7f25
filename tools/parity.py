"""Every backend that can run on this machine against the CPU in fp32: one table.

    python tools/parity.py REFERENCE [BUNDLE ...] [--prompts FILE.jsonl]

REFERENCE is a bundle with fp32 engines for the CPU. Each backend and device of it, and of the bundles behind it, gets a row:
the largest error of the target's logits (relative to the largest logit) over the first and over the last quarter of a full
context, so that an error that grows with position shows; the share of positions where both choose the same token, and of the
others the one with the widest margin between the two tokens in the reference; tau; and over greedy continuations how many
differ, and the first place where one does, with its margin. Engines that are missing are compiled first.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from runtime import GumihoError, Model, load
from runtime.backends import backend
from runtime.bundle.reader import Bundle
from runtime.command import run
from runtime.engines.store import compile_engines, find_engines

DEVICES = {"migraphx": ("", "ref")}  # besides the first device


def read(file: Path) -> list[str]:
    """The first turn of every line, or all of a ``.txt``. Raises GumihoError for a file that is not such a set."""
    try:
        text = file.read_text("utf-8")
        if file.suffix == ".txt":
            return [text]
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [str(line["turns"][0] if "turns" in line else line.get("text") or line["prompt"]) for line in lines]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise GumihoError(
            f"{file} cannot be read as prompts ({error}): give a .txt, or JSONL with a field 'text', 'turns' or 'prompt'"
        ) from None


def contexts(model: Model, texts: list[str], count: int) -> list[list[int]]:
    """Token sequences that fill the capacity: the texts one after another, again and again."""
    ids = [token for text in texts for token in model.encode(text)]
    capacity = model.bundle.manifest.capacity
    whole = (ids * (1 + count * capacity // len(ids)))[: count * capacity]
    return [whole[i : i + capacity] for i in range(0, count * capacity, capacity)]


def logits(model: Model, context: list[int]) -> Iterator[tuple[int, np.ndarray]]:
    """The target's logits over a given text, pass by pass: first position, fp32 [n, V]."""
    decoder = model.decoder
    decoder.clear()
    for start in range(0, len(context), decoder.form.chunk):
        part = context[start : start + decoder.form.chunk]
        decoder.feed(part)
        yield start, decoder.device.read(decoder.passes.logits[: len(part)]).astype(np.float32)


def reference(model: Model, context: list[int]) -> np.ndarray:
    return np.concatenate([rows for _, rows in logits(model, context)])


def margin(row: np.ndarray, token: int) -> float:
    """How far a token is behind the best one, relative to the largest logit."""
    return float((row.max() - row[token]) / np.abs(row).max())


def compare_logits(model: Model, texts: list[list[int]], expected: list[np.ndarray]) -> dict[str, str]:
    capacity, errors, same, widest = model.bundle.manifest.capacity, np.zeros(2), 0, 0.0
    for context, wanted in zip(texts, expected, strict=True):
        for start, found in logits(model, context):
            rows = wanted[start : start + len(found)]
            error = np.abs(found - rows).max(1) / np.abs(rows).max()
            at = np.arange(start, start + len(found))
            for i, quarter in enumerate((at < capacity // 4, at >= capacity - capacity // 4)):
                errors[i] = max(errors[i], error[quarter].max(initial=0.0))
            chosen = found.argmax(1)
            same += int((chosen == rows.argmax(1)).sum())
            widest = max(widest, *(margin(row, token) for row, token in zip(rows, chosen, strict=True)))
    count = sum(map(len, texts))
    return {
        "logits, first quarter": f"{errors[0]:.1e}", "last quarter": f"{errors[1]:.1e}",
        "same choice": f"{same} of {count}", "widest margin": f"{widest:.1e}",
    }  # fmt: skip


def compare_tokens(model: Model, judge: Model, prompts: list[list[int]], count: int) -> dict[str, str]:
    differing, first, passes, tokens = 0, "", 0, 0
    for prompt in prompts:
        found, wanted = model.generate(prompt, count), judge.generate(prompt, count)
        list(found.cycles()), list(wanted.cycles())
        passes, tokens = passes + found.stats.cycles, tokens + found.stats.cycle_tokens
        at = next((i for i, (a, b) in enumerate(zip(found.ids, wanted.ids, strict=False)) if a != b), None)
        if at is None:
            continue
        differing += 1
        row = reference(judge, [*prompt, *wanted.ids[:at]])[-1]
        first = first or f"token {at}, margin {margin(row, found.ids[at]):.1e}"
    return {
        "tau": f"{tokens / max(1, passes):.2f}",
        "texts that differ": f"{differing} of {len(prompts)}",
        "the first": first or "-",
    }


def opened(path: Path, name: str, device: str) -> Model:
    made, bundle = backend(name, device), Bundle(path)
    try:
        find_engines(bundle, made)
    except GumihoError:
        compile_engines(bundle, made)
    return load(path, name, device)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path, help="bundle with fp32 graphs for the CPU")
    parser.add_argument("bundles", type=Path, nargs="*", help="more bundles of the same pair")
    parser.add_argument(
        "--prompts",
        type=Path,
        help="texts: .txt, or JSONL with 'turns', 'text' or 'prompt' (default: a module of Python's standard library)",
    )
    parser.add_argument("--contexts", type=int, default=2, help="full contexts over which logits are compared (default: 2)")
    parser.add_argument("--texts", type=int, default=8, help="continuations to compare (default: 8)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per continuation (default: 48)")
    args = parser.parse_args(argv)
    return run(lambda: compare(args))


def compare(args: argparse.Namespace) -> int:
    """Prints a row of the table for every backend and device that runs here."""
    # The demo pair writes Python.
    texts = read(args.prompts) if args.prompts else [Path(argparse.__file__).read_text("utf-8")]
    with load(args.reference, "cpu") as judge:
        if judge.bundle.manifest.dtype != "float32":
            raise GumihoError(f"{args.reference} is {judge.bundle.manifest.dtype}: the reference must be fp32")
        long = contexts(judge, texts, args.contexts)
        expected = [reference(judge, context) for context in long]
        prompts = [long[0][i * 16 : i * 16 + 8 + i] for i in range(args.texts)]
        header = False
        for path in (args.reference, *args.bundles):
            manifest = Bundle(path).manifest
            for name in manifest.forms:
                for device in DEVICES.get(name, ("",)):
                    label = f"{name} {device}".strip() + f", {manifest.dtype}"
                    try:
                        model = opened(path, name, device)
                    except GumihoError as error:
                        print(f"{label}: {error}", file=sys.stderr)
                        continue
                    with model:
                        row = compare_logits(model, long, expected) | compare_tokens(model, judge, prompts, args.tokens)
                    if not header:
                        print("| " + " | ".join(("backend", *row)) + " |\n|" + "---|" * (len(row) + 1))
                        header = True
                    print("| " + " | ".join((label, *row.values())) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
