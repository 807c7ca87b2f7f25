"""Compares every backend that runs on this machine with the CPU in fp32, in one table.

    python tools/parity.py REFERENCE [BUNDLE ...] [--prompts FILE.jsonl]

REFERENCE is a bundle with fp32 graphs for the CPU. Each backend and device of the bundles gets a row: the largest error
of the target's logits (relative to the largest logit) over the first and the last quarter of a full context, which
shows errors that grow with position; the number of positions with the same choice, and the widest margin in the
reference between two different choices; tau; the number of greedy continuations that differ, and the first difference
with its margin. Missing engines are compiled first.
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
from runtime.cli.command import run
from runtime.engines.store import compile_engines, find_engines
from runtime.errors import InputError, reason

DEVICES = {"migraphx": ("", "ref")}  # devices to compare; "" is the backend's default


def read(file: Path) -> list[str]:
    """The first turn of every line of JSONL, or the whole text of a ``.txt``. Raises InputError for other files."""
    try:
        text = file.read_text("utf-8")
        if file.suffix == ".txt":
            return [text]
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [str(line["turns"][0] if "turns" in line else line.get("text") or line["prompt"]) for line in lines]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file} cannot be read as prompts ({reason(error)}): give a .txt, or JSONL with a field 'text', 'turns' "
            "or 'prompt'"
        ) from None


def contexts(model: Model, texts: list[str], count: int) -> list[list[int]]:
    """``count`` token sequences that fill the capacity, made by repeating the texts."""
    ids = [token for text in texts for token in model.encode(text)]
    capacity = model.bundle.manifest.capacity
    whole = (ids * (1 + count * capacity // len(ids)))[: count * capacity]
    return [whole[i : i + capacity] for i in range(0, count * capacity, capacity)]


def logits(model: Model, context: list[int]) -> Iterator[tuple[int, np.ndarray]]:
    """The target's logits over a text, pass by pass: the first position and fp32 [n, V]."""
    decoder = model.decoder
    decoder.clear()
    for start in range(0, len(context), decoder.form.chunk):
        part = context[start : start + decoder.form.chunk]
        decoder.feed(part)
        yield start, decoder.device.read(decoder.target.logits[: len(part)]).astype(np.float32)


def reference(model: Model, context: list[int]) -> np.ndarray:
    return np.concatenate([rows for _, rows in logits(model, context)])


def margin(row: np.ndarray, token: int) -> float:
    """The difference between the best logit and that of a token, relative to the largest magnitude."""
    return float((row.max() - row[token]) / np.abs(row).max())


def compare_logits(model: Model, texts: list[list[int]], expected: list[np.ndarray]) -> dict[str, str]:
    """The columns of the table about logits. expected: the reference's logits of each text, fp32 [n, V]."""
    capacity, errors, same, widest = model.bundle.manifest.capacity, np.zeros(2), 0, 0.0
    for context, reference_logits in zip(texts, expected, strict=True):
        for start, found in logits(model, context):
            rows = reference_logits[start : start + len(found)]
            error = np.abs(found - rows).max(1) / np.abs(rows).max()
            positions = np.arange(start, start + len(found))
            for i, quarter in enumerate((positions < capacity // 4, positions >= capacity - capacity // 4)):
                errors[i] = max(errors[i], error[quarter].max(initial=0.0))
            chosen = found.argmax(1)
            same += int((chosen == rows.argmax(1)).sum())
            widest = max(widest, *(margin(row, token) for row, token in zip(rows, chosen, strict=True)))
    count = sum(map(len, texts))
    return {
        "logits, first quarter": f"{errors[0]:.1e}",
        "last quarter": f"{errors[1]:.1e}",
        "same choice": f"{same} of {count}",
        "widest margin": f"{widest:.1e}",
    }


def compare_tokens(model: Model, judge: Model, prompts: list[list[int]], count: int) -> dict[str, str]:
    """The columns of the table about tau and greedy continuations. judge: the reference; count: tokens per
    continuation."""
    differing, first, passes, tokens = 0, "", 0, 0
    for prompt in prompts:
        generation, reference_generation = model.generate(prompt, count), judge.generate(prompt, count)
        list(generation.cycles()), list(reference_generation.cycles())
        passes, tokens = passes + generation.stats.cycles, tokens + generation.stats.cycle_tokens
        position = next(
            (i for i, (a, b) in enumerate(zip(generation.ids, reference_generation.ids, strict=False)) if a != b), None
        )
        if position is None:
            continue
        differing += 1
        row = reference(judge, [*prompt, *reference_generation.ids[:position]])[-1]
        first = first or f"token {position}, margin {margin(row, generation.ids[position]):.1e}"
    return {
        "tau": f"{tokens / max(1, passes):.2f}",
        "texts that differ": f"{differing} of {len(prompts)}",
        "the first": first or "-",
    }


def opened(path: Path, name: str, device: str) -> Model:
    """Loads a bundle for a backend and device; compiles its engines first if there are none."""
    instance, bundle = backend(name, device), Bundle(path)
    try:
        find_engines(bundle, instance)
    except GumihoError:
        compile_engines(bundle, instance)
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
    parser.add_argument(
        "--contexts", type=int, default=2, help="full contexts over which logits are compared (default: 2)"
    )
    parser.add_argument("--texts", type=int, default=8, help="continuations to compare (default: 8)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per continuation (default: 48)")
    args = parser.parse_args(argv)
    return run(lambda: compare(args))


def compare(args: argparse.Namespace) -> int:
    """Prints a row of the table for every backend and device that runs here."""
    # Python source, because the demo pair was trained on it.
    texts = read(args.prompts) if args.prompts else [Path(argparse.__file__).read_text("utf-8")]
    with load(args.reference, "cpu") as judge:
        if judge.bundle.manifest.dtype != "float32":
            raise InputError(
                f"{args.reference} is {judge.bundle.manifest.dtype}, but the reference must be fp32: export it in fp32"
            )
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
