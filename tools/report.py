"""The table and the plots of a run of ``tools/bench.py``, made only from its ``bench.json``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from runtime.errors import InputError

COLUMNS = (
    "way",
    "weights",
    "tokens/s",
    "of reference",
    "of plain",
    "tau",
    "first token, ms",
    "peak, MiB",
    "texts as plain",
    "as reference",
)
NOTES = """\
tokens/s: all tokens after each text's first step, per second after it. of reference, of plain: this speed relative to the
reference ({reference}), and to plain decoding of the same weights by the same peer; median over prompts. tau: tokens per target
pass, without the first step. first token: median. peak: peak resident memory of the process (VmHWM), mapped files included;
ways in one process share it. texts as: how many are token for token those of the same peer's plain decoding, and those of the
reference; in parentheses the first difference, as prompt:token from 0."""

Text = Mapping[str, Any]
ALL = "all sets"


def sets(run: Mapping[str, Any]) -> dict[str, int]:
    """Prompts by set, and of all together if there are several sets that are not lengths."""
    found: dict[str, int] = run["prompts"]
    return found if len(found) == 1 or run.get("lengths") else {**found, ALL: sum(found.values())}


def of_length(positions: int) -> str:
    """The name of the set of prompts of that many tokens."""
    return f"{positions} positions"


def difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """The first index at which two texts differ, or the length of the shorter one if it is a prefix; None if they are
    equal."""
    if tokens == others:
        return None
    return next(
        (i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), min(len(tokens), len(others))
    )


def gained(texts: Sequence[Text]) -> int:
    """Number of tokens after the first step of each text."""
    return sum(len(text["tokens"]) - text["first_tokens"] for text in texts)


def speed(*texts: Text) -> float | None:
    """Tokens per second after the first step; None if there are none."""
    spent = sum(text["seconds"] - text["first_seconds"] for text in texts)
    return gained(texts) / spent if gained(texts) and spent > 0 else None


def tau(texts: Sequence[Text]) -> float | None:
    """Tokens per target pass after the first step; None if the number of passes is unknown or 0."""
    passes = [text["passes"] for text in texts]
    return gained(texts) / sum(passes) if None not in passes and sum(passes) else None


def _pairs(texts: Sequence[Text], others: Sequence[Text]) -> Iterator[tuple[int, Text, Text]]:
    """Pairs of texts with the same prompt, and the prompt's number."""
    by_prompt = {(other["set"], other["prompt"]): other for other in others}
    return (
        (text["prompt"], text, other)
        for text in texts
        if (other := by_prompt.get((text["set"], text["prompt"]))) is not None
    )


def ratio(texts: Sequence[Text], others: Sequence[Text]) -> float | None:
    """The median over prompts of the ratio of two ways' speeds."""
    speeds = ((speed(text), speed(other)) for _, text, other in _pairs(texts, others))
    ratios = [ours / theirs for ours, theirs in speeds if ours and theirs]
    return median(ratios) if ratios else None


def equal(texts: Sequence[Text], others: Sequence[Text]) -> str:
    """How many texts are equal to those of another way, and the first difference."""
    places = [(prompt, difference(text["tokens"], other["tokens"])) for prompt, text, other in _pairs(texts, others)]
    if not places:
        return "-"
    differing = [f"{prompt}:{place}" for prompt, place in places if place is not None]
    return f"{len(places) - len(differing)} of {len(places)}" + (f" ({differing[0]})" if differing else "")


def rows(run: Mapping[str, Any], prompts: str) -> list[dict[str, Any]]:
    """The table for one set of prompts, or for ``ALL``: a row per way, by ``COLUMNS``; numbers are not formatted,
    unknown ones None.

    A way that failed has only its name, weights, and the reason as ``failed``.
    """
    texts = {
        way["name"]: [text for text in way["texts"] if prompts in (text["set"], ALL)]
        for way in run["ways"]
        if not way["failed"]
    }
    table = []
    for way in run["ways"]:
        row = {"way": way["name"], "weights": way["weights"]}
        table.append(row)
        if way["failed"]:
            row["failed"] = way["failed"]
        elif own_texts := texts[way["name"]]:
            plain, reference = (texts.get(name, []) for name in (way["plain"], run["reference"]))
            numbers = (
                speed(*own_texts),
                ratio(own_texts, reference),
                ratio(own_texts, plain),
                tau(own_texts),
                median(text["first_seconds"] for text in own_texts) * 1e3,
                way["peak_mb"],
            )
            row |= dict(zip(COLUMNS[2:], (*numbers, equal(own_texts, plain), equal(own_texts, reference)), strict=True))
    return table


FORMATS = {
    "tokens/s": ".1f",
    "of reference": ".2f",
    "of plain": ".2f",
    "tau": ".2f",
    "first token, ms": ".1f",
    "peak, MiB": ".0f",
}


def markdown(run: Mapping[str, Any]) -> str:
    """The report of a run: its setup, a table for every set of prompts, and the settings that were tried."""
    about = run["about"]
    lines = [f"{name}: {value}  " for name, value in about.items()]
    for prompts, count in sets(run).items():
        lines += [
            "",
            f"## {prompts}, {count} prompts",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + "---|" * len(COLUMNS),
        ]
        for row in rows(run, prompts):
            cells = [f"failed: {row['failed'].replace('|', '/')}"] if "failed" in row else []
            for name in COLUMNS[2 + len(cells) :]:
                value = row.get(name)
                cells.append("-" if value is None or "failed" in row else format(value, FORMATS.get(name, "")))
            lines.append("| " + " | ".join((row["way"], row["weights"], *cells)) + " |")
    lines += ["", NOTES.format(reference=run["reference"])]
    lines += ["", "Settings, by their speed over prompts outside the measurement; the first was used:", ""]
    for way in run["ways"]:
        if way["tried"]:
            tried = sorted(way["tried"], key=lambda trial: -trial["speed"])
            listed = "; ".join(
                " ".join(f"{name}={value}" for name, value in trial["setting"].items()) + f" ({trial['speed']:.1f}/s)"
                for trial in tried
            )
            lines.append(f"- {way['name']}: {listed}")
    versions = {name: version for way in run["ways"] for name, version in way["versions"].items()}
    lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))]
    return "\n".join(lines) + "\n"


def plot(run: Mapping[str, Any], folder: Path) -> None:
    """Writes bar charts for every set of prompts, ``bench-SET.png`` and ``.svg``, and one of lines if the sets are
    lengths."""
    from matplotlib.figure import Figure

    if run.get("lengths"):
        _plot_lengths(run, Figure(figsize=(15, 7), layout="constrained"), folder)
    names = "tokens/s", "tau", "first token, ms", "peak, MiB"
    peers = list(dict.fromkeys(way["peer"] for way in run["ways"]))
    colours = {way["name"]: f"C{peers.index(way['peer'])}" for way in run["ways"]}
    for prompts, count in sets(run).items():
        table = [row for row in rows(run, prompts) if "tokens/s" in row]
        figure = Figure(figsize=(15, 1 + 0.3 * len(table)), layout="constrained")
        for name, axes in zip(names, figure.subplots(1, len(names), sharey=True), strict=True):
            values = [row[name] or 0 for row in table]
            bars = axes.barh([row["way"] for row in table], values, color=[colours[row["way"]] for row in table])
            axes.bar_label(
                bars, [format(value, FORMATS[name]) if value else "" for value in values], padding=2, fontsize=8
            )
            axes.set_title(name)
            axes.margins(x=0.15)
        axes.invert_yaxis()
        figure.suptitle(f"{prompts}, {count} prompts, {run['about']['new tokens']} new tokens")
        for kind in ("png", "svg"):
            figure.savefig(folder / f"bench-{prompts.replace(' ', '-')}.{kind}")


def _plot_lengths(run: Mapping[str, Any], figure: Any, folder: Path) -> None:
    from matplotlib import colormaps

    twenty = [colormaps["tab20"](i) for i in range(20)]  # more ways than the usual ten colours
    lengths = run["lengths"]
    tables = [{row["way"]: row for row in rows(run, of_length(length))} for length in lengths]
    left, right = figure.subplots(1, 2)
    for name, axes in (("tokens/s", left), ("first token, ms", right)):
        for i, way in enumerate(run["ways"]):
            values = [table[way["name"]].get(name) for table in tables]
            if None not in values:
                axes.plot(lengths, values, "o--" if way["plain"] else "o-", color=twenty[i % 20], label=way["name"])
        axes.set(
            title=name,
            xlabel="positions of the prompt",
            xscale="log",
            yscale="log",
            xticks=lengths,
            xticklabels=lengths,
        )
        axes.tick_params(axis="x", which="minor", labelbottom=False)
    right.legend(bbox_to_anchor=(1, 1), loc="upper left", fontsize=8)
    for kind in ("png", "svg"):
        figure.savefig(folder / f"bench-lengths.{kind}")


def render(folder: Path) -> int:
    """Writes the table and the plots of a run's ``bench.json`` next to it and prints the table. Returns the exit
    status."""
    file = folder / "bench.json"
    if not file.is_file():
        raise InputError(f"{file} does not exist: run without --again first")
    results = json.loads(file.read_text("utf-8"))
    text = markdown(results)
    (folder / "bench.md").write_text(text, "utf-8")
    plot(results, folder)
    print(text)
    return 0
