"""Writes the report of ``runtime.device_check`` as Markdown, only from device_check.json."""

from collections.abc import Mapping
from typing import Any

_RESULT = {"ok": "ok", "failed": "FAILED", "skipped": "skipped", "running": "not finished"}


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report. report: the content of device_check.json."""
    about, pieces = report["about"], report["pieces"]
    failed = [name for name, outcome in pieces.items() if outcome["state"] == "failed"]
    verdict = f"Failed: {', '.join(failed)}." if failed else "Nothing failed."
    parts = [
        f"# Device check: {about['bundle']['name']}, {about['backend']}",
        f"{verdict} Speeds are of this machine; near-ties are places where rounding decided between two tokens.",
        _table(*summary(report)),
        "## Pieces",
        _table(
            ["piece", "result", "seconds", "found"],
            [[name, _RESULT[o["state"]], f"{o['seconds']:.1f}", findings(name, o)] for name, o in pieces.items()],
        ),
    ]
    for title, section in (
        ("Time", _times(pieces)),
        ("Memory", _memory(pieces)),
        ("Differences", _differences(pieces)),
    ):
        if section:
            parts += [f"## {title}", section]
    for name in failed:
        parts += [f"## Failure: {name}", f"```\n{failure(name, pieces[name], about)}\n{pieces[name]['trace']}```"]
    parts += ["## Machine and bundle", f"```\n{_machine(about)}\n```"]
    return "\n\n".join(parts) + "\n"


def summary(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The heading and the only row of the summary table."""
    about, pieces = report["about"], report["pieces"]
    greedy, sampled, golden = (pieces.get(name, {}).get("facts", {}) for name in ("greedy", "sampled", "golden"))
    runs = [facts for facts in (greedy, sampled) if facts]

    def of(part: str, mode: str) -> str:
        return " / ".join(str(facts[mode][part]) for facts in runs) or "-"

    columns = {
        "device": about["facts"].get("device") or about["facts"].get("machine") or about["device"] or "-",
        "backend": about["backend"],
        "bundle": f"{about['bundle']['name']}, {_weights(about['bundle'])}",
        "golden run, largest error": ", ".join(f"{name} {part['error']:.1e}" for name, part in golden.items()) or "-",
        "texts as in plain decoding, greedy / sampled": " / ".join(
            f"{facts['alike']} of {facts['texts']}" for facts in runs
        )
        or "-",
        "near-ties": " / ".join(str(facts["near_ties"]) for facts in runs) or "-",
        "defects": " / ".join(str(facts["defects"]) for facts in runs) or "-",
        "plain, tokens/s": of("tokens_per_second", "plain"),
        "speculative, tokens/s": of("tokens_per_second", "speculative"),
        "tau": of("tau", "speculative"),
        "self-test": _RESULT[pieces["selftest"]["state"]] if "selftest" in pieces else "-",
    }
    return list(columns), [list(columns.values())]


def line(name: str, outcome: Mapping[str, Any]) -> str:
    """A piece's line on the terminal."""
    return f"{_RESULT[outcome['state']]:<8}{name}: {findings(name, outcome)}"


def failure(name: str, outcome: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """The facts about a failed piece that an issue report needs."""
    return "\n".join(
        [
            f"piece:     {name}",
            *(f"error:     {wrong}" for wrong in outcome["wrong"]),
            f"again:     {outcome['again']}",
            _machine(about),
        ]
    )


def findings(name: str, outcome: Mapping[str, Any]) -> str:
    """The findings of a piece in one line."""
    facts = _DESCRIBE[name](outcome["facts"]) if outcome["facts"] else ""
    return "; ".join(filter(None, [*outcome["wrong"], facts, *outcome["notes"]])) or "-"


def _tokens(facts: Mapping[str, Any]) -> str:
    speeds = (
        f", {facts['speculative']['tokens_per_second']} tokens/s, {facts['plain']['tokens_per_second']} with plain "
        f"decoding, tau {facts['speculative']['tau']}"
        if "plain" in facts
        else ""
    )
    widest = f" (widest margin {facts['widest_near_tie']:.1e})" if facts["near_ties"] else ""
    return (
        f"{facts['alike']} of {facts['texts']} texts alike, {facts['tokens']} tokens, {facts['near_ties']} "
        f"near-ties{widest}, {facts['defects']} defects{speeds}"
    )


def _plain_time(facts: Mapping[str, Any]) -> str:
    return "plain pass " + ", ".join(f"{at['plain'][0]:.3g} ms at context {at['context']}" for at in facts["contexts"])


_DESCRIBE = {
    "doctor": lambda facts: f"{facts['backend']}; engines {facts.get('engines', 'not looked for')}",
    "compile": lambda facts: (
        f"compiled in {facts['compile_seconds']:.1f} s, {_bytes(facts['host_peak'])} of host memory at most: "
        f"{facts['engines']}"
        if facts["compiled"]
        else f"{facts['engines']} is current"
    ),
    "golden": lambda facts: ", ".join(
        f"{name} {part['error']:.1e} of {part['tolerance']:.1e} allowed" for name, part in facts.items()
    ),
    "memory": lambda facts: (
        f"the process holds {_bytes(facts['before']['host'])} before loading, {_bytes(facts['loaded']['host'])} after "
        f"it, {_bytes(facts['used']['host'])} after some texts; weights are {_bytes(facts['weights'])}"
    ),
    "greedy": _tokens,
    "sampled": _tokens,
    "cpu": _tokens,
    "times": _plain_time,
    "selftest": lambda facts: f"{sum(r['holds'] for r in facts['results'])} of {len(facts['results'])} properties hold",
}


def _times(pieces: Mapping[str, Any]) -> str:
    """A table of pass times, fastest and median, in milliseconds."""
    contexts = pieces.get("times", {}).get("facts", {}).get("contexts", [])
    if not contexts:
        return ""

    def cell(pair: Any) -> str:
        return f"{pair[0]:.3g} ({pair[1]:.3g})" if pair else "-"

    rows = list(contexts[0]["target"])
    heading = [
        "context",
        "plain pass",
        *(f"target, {n} rows" for n in rows),
        "draft",
        "draft and verification",
        "prefill",
    ]
    table = [
        [
            str(at["context"]),
            cell(at["plain"]),
            *(cell(at["target"].get(n)) for n in rows),
            cell(at.get("draft")),
            cell(at.get("cycle")),
            f"{cell(at['prefill']['times'])}, {at['prefill']['rows'] / at['prefill']['times'][0] * 1e3:.0f} tokens/s",
        ]
        for at in contexts
    ]
    static = "All passes have one size here. " if pieces["times"]["facts"]["static"] else ""
    return f"{static}Milliseconds: the fastest, and the median in brackets.\n\n{_table(heading, table)}"


def _memory(pieces: Mapping[str, Any]) -> str:
    facts = pieces.get("memory", {}).get("facts", {})
    table = [
        [name, _bytes(facts[name]["host"]), _bytes(facts[name]["host_peak"]), facts[name]["device"] or "-"]
        for name in ("before", "loaded", "used")
        if name in facts
    ]
    return _table(["when", "process", "its peak so far", "device"], table) if table else ""


def _differences(pieces: Mapping[str, Any]) -> str:
    table = [
        [
            name,
            str(place["prompt"]),
            str(place["index"]),
            str(place["token"]),
            str(place["choice"]),
            place["margin"] if isinstance(place["margin"], str) else f"{place['margin']:.1e}",
            "near-tie" if place["near"] else "DEFECT",
        ]
        for name in ("greedy", "sampled", "cpu")
        for place in pieces.get(name, {}).get("facts", {}).get("places", [])
    ]
    return _table(["piece", "prompt", "token", "is", "plain decoding's", "margin", ""], table) if table else ""


def _machine(about: Mapping[str, Any]) -> str:
    bundle, facts = about["bundle"], ", ".join(f"{name} {value}" for name, value in about["facts"].items())
    return "\n".join(
        [
            f"backend:   {about['backend']} {about['device']}: {facts or 'does not run here'}",
            f"packages:  {about['packages']}",
            f"system:    {about['platform']}",
            f"bundle:    {bundle['name']} {bundle['hash']}, {_weights(bundle)}, {bundle['rows']} rows, "
            f"{bundle['capacity']} positions",
            f"command:   {about['command']}",
        ]
    )


def _weights(bundle: Mapping[str, Any]) -> str:
    quantized = ", ".join(f"{part} {kind}" for part, kind in bundle["weights"].items())
    return f"{bundle['dtype']}{f' ({quantized})' if quantized else ''}"


def _bytes(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / 1e9:.2f} GB"


def _table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)
