"""Pieces of ``runtime.device_check`` that compare tokens with plain decoding and with the CPU, and measure speed."""

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from ..api.loader import load
from ..api.model import Model
from ..backends import backend
from ..cli.checks import selftest
from ..cli.checks.lossless import NEAR, Difference, differences
from ..decoding.stats import Stats
from ..engines import golden_replay as golden
from ..engines.store import compile_engines, find_engines
from ..errors import GumihoError
from .pieces import Check, Findings, Skip
from .prompts import prompts

GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
_TOKENS, _CPU_TOKENS = 64, 32  # per prompt
_SHOWN = 20  # most differences that the report lists
_SLOW = 0.8  # of plain decoding's speed: the planner stops drafting well above it


def tokens(check: Check, settings: Mapping[str, Any]) -> Findings:
    """Compares speculative with plain decoding on the device, and measures the speed of both."""
    model, all_prompts = check.model, prompts(check.model)
    tally, speculative, plain = _Tally(len(all_prompts)), Stats(texts=0), Stats(texts=0)
    for i, prompt in enumerate(all_prompts):
        if i and check.late:
            break
        comparison = selftest.compare(model, prompt, _TOKENS, settings)
        tally.add(i, len(comparison.speculative.ids), comparison.alike, comparison.differences, comparison.defects)
        speculative.add(comparison.speculative.stats)
        plain.add(comparison.plain.stats)
        if i % 8 == 7:
            check.say(f"{i + 1} of {len(all_prompts)} prompts")
    findings = tally.findings("plain decoding")
    speeds = {"speculative": _speed(speculative), "plain": _speed(plain)}
    findings.facts |= speeds
    wrong, notes = slower(
        speeds["speculative"]["tokens_per_second"],
        speeds["plain"]["tokens_per_second"],
        model.decoder.planner is not None,
    )
    findings.wrong += wrong
    findings.notes += notes
    return findings


def greedy(check: Check) -> Findings:
    return tokens(check, GREEDY)


def sampled(check: Check) -> Findings:
    return tokens(check, SAMPLED)


def against_cpu(check: Check) -> Findings:
    """Replays texts of the CPU's engines by plain decoding on the device; different precisions may differ at
    near-ties."""
    if check.name == "cpu":
        raise Skip("the backend is the CPU")
    try:
        cpu = backend("cpu")
        check.bundle.manifest.form("cpu")
        try:
            find_engines(check.bundle, cpu)
        except GumihoError:
            compile_engines(check.bundle, cpu, progress=check.say)
        reference = load(check.bundle.path, "cpu", "", check.threads)
    except GumihoError as error:
        raise Skip(f"the CPU cannot run this bundle: {error}") from None
    model, all_prompts = check.model, prompts(check.model)
    tally, near_margin = _Tally(len(all_prompts)), _near_margin(model, reference)
    with reference:
        for i, prompt in enumerate(all_prompts):
            if i and check.late:
                break
            for settings in (GREEDY, SAMPLED):
                text = selftest.generated(reference, prompt, _CPU_TOKENS, False, settings)
                places = [replace(place, near=place.margin <= near_margin) for place in differences(model, text)]
                tally.add(i, len(text.ids), not places, places, sum(not place.near for place in places))
            if i % 8 == 7:
                check.say(f"{i + 1} of {len(all_prompts)} prompts")
    return tally.findings("the CPU")


def _near_margin(*models: Model) -> float:
    """The margin of a near-tie between models of different precision: that of the coarser one."""
    precisions = [model.decoder.target.graphs["target"].precision for model in models]
    return max(NEAR[precision] or golden.TOLERANCE[precision] for precision in precisions)


class _Tally:
    """Counts differences of tokens over all prompts."""

    def __init__(self, planned: int) -> None:
        self.facts: dict[str, Any] = {
            "prompts": 0,
            "planned": planned,
            "texts": 0,
            "alike": 0,
            "tokens": 0,
            "near_ties": 0,
            "widest_near_tie": 0.0,
            "defects": 0,
            "places": [],
        }

    def add(self, prompt: int, count: int, alike: bool, places: list[Difference], defects: int) -> None:
        """Adds a text. count: its tokens; defects: differences that rounding does not explain."""
        facts, near = self.facts, [place.margin for place in places if place.near]
        facts["prompts"] = prompt + 1
        for name, increment in (
            ("texts", 1),
            ("alike", alike),
            ("tokens", count),
            ("near_ties", len(near)),
            ("defects", defects),
        ):
            facts[name] += int(increment)
        facts["widest_near_tie"] = max(facts["widest_near_tie"], *near, 0.0)
        facts["places"] += [
            {
                "prompt": prompt,
                "index": place.index,
                "token": place.token,
                "choice": place.choice,
                "margin": place.margin if isfinite(place.margin) else "infinite",
                "near": place.near,
            }
            for place in places
        ]

    def findings(self, reference: str) -> Findings:
        """The result. reference: what the tokens were compared with, for messages."""
        facts, findings = self.facts, Findings(self.facts)
        facts["places"] = sorted(facts["places"], key=lambda place: place["near"])[:_SHOWN]  # defects first
        if not facts["tokens"]:
            findings.wrong.append("no token was compared, since every text was empty")
        if facts["defects"]:
            first = next((place for place in facts["places"] if not place["near"]), None)
            place = "the replay does not show them"
            if first:
                margin = first["margin"] if isinstance(first["margin"], str) else format(first["margin"], ".2g")
                position = f"prompt {first['prompt']}, token {first['index']}"
                place = f"the first is in {position}: {first['token']} instead of {first['choice']}, margin {margin}"
            count = f"{facts['defects']} of {facts['tokens']} tokens"
            findings.wrong.append(f"{count} differ from {reference} by more than rounding explains; {place}")
        if facts["prompts"] < facts["planned"]:
            findings.notes.append(
                f"checked only {facts['prompts']} of {facts['planned']} prompts before the time limit"
            )
        return findings


def _speed(stats: Stats) -> dict[str, Any]:
    names = ("tokens_per_second", "tau", "time_to_first_token_ms", "cycles_by_rows", "acceptance_by_depth", "lookups")
    return {name: stats.summary()[name] for name in names}


def slower(speculative: float, plain: float, planned: bool) -> tuple[list[str], list[str]]:
    """Failures and notes about tokens per second. planned: whether pass times were measured, so that the planner should
    stop drafting when it is not worthwhile.
    """
    if speculative >= plain:
        return [], []
    line = f"speculative decoding makes {speculative} tokens/s and plain decoding {plain}"
    if planned and speculative < _SLOW * plain:
        return [f"{line}: the planner should stop drafting when it is slower"], []
    return [], [line]
