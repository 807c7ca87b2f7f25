"""Pieces of ``runtime.device_check``: tokens against those of plain decoding and of the CPU, and the speed at which they come."""

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from .. import selftest
from ..backends import backend
from ..decoding.stats import Stats
from ..engines import golden_replay as golden
from ..engines.store import compile_engines, find_engines
from ..errors import GumihoError
from ..lossless import NEAR, Difference, differences
from ..model import Model, load
from .pieces import Check, Found, Skip
from .prompts import prompts

GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
_TOKENS, _CPU_TOKENS = 64, 32  # of each prompt
_SHOWN = 20  # differences that the report lists
_SLOW = 0.8  # of plain decoding's speed: the planner rests long before drafting costs so much


def tokens(check: Check, settings: Mapping[str, Any]) -> Found:
    """Speculative decoding against plain decoding on the device, and the speed of both."""
    model, given = check.model, prompts(check.model)
    tally, speculative, plain = _Tally(len(given)), Stats(texts=0), Stats(texts=0)
    for i, prompt in enumerate(given):
        if i and check.late:
            break
        made = selftest.compare(model, prompt, _TOKENS, settings)
        tally.add(i, len(made.speculative.ids), made.alike, made.differences, made.defects)
        speculative.add(made.speculative.stats)
        plain.add(made.plain.stats)
        if i % 8 == 7:
            check.say(f"{i + 1} of {len(given)} prompts")
    found = tally.found("plain decoding")
    speeds = {"speculative": _speed(speculative), "plain": _speed(plain)}
    found.facts |= speeds
    wrong, notes = slower(
        speeds["speculative"]["tokens_per_second"], speeds["plain"]["tokens_per_second"], model.decoder.planner is not None
    )
    found.wrong += wrong
    found.notes += notes
    return found


def greedy(check: Check) -> Found:
    return tokens(check, GREEDY)


def sampled(check: Check) -> Found:
    return tokens(check, SAMPLED)


def against_cpu(check: Check) -> Found:
    """The texts of the CPU's engines, replayed by plain decoding on the device. Forms of different precision differ at near-ties."""
    if check.name == "cpu":
        raise Skip("the backend is the CPU")
    try:
        cpu = backend("cpu", "", check.threads)
        check.bundle.manifest.form("cpu")
        try:
            find_engines(check.bundle, cpu)
        except GumihoError:
            compile_engines(check.bundle, cpu, progress=check.say)
        reference = load(check.bundle.path, "cpu", "", check.threads)
    except GumihoError as error:
        raise Skip(f"the CPU cannot run this bundle: {error}") from None
    model, given = check.model, prompts(check.model)
    tally, near = _Tally(len(given)), _near_of(model, reference)
    with reference:
        for i, prompt in enumerate(given):
            if i and check.late:
                break
            for settings in (GREEDY, SAMPLED):
                text = selftest.generated(reference, prompt, _CPU_TOKENS, False, settings)
                places = [_judged(place, near) for place in differences(model, text)]
                tally.add(i, len(text.ids), not places, places, sum(not place.near for place in places))
            if i % 8 == 7:
                check.say(f"{i + 1} of {len(given)} prompts")
    return tally.found("the CPU")


def _near_of(*models: Model) -> float:
    """The margin within which rounding may decide between two forms: that of the coarser one."""
    precisions = [model.decoder.passes.graphs["target"].precision for model in models]
    return max(NEAR[precision] or golden.TOLERANCE[precision] for precision in precisions)


def _judged(place: Difference, near: float) -> Difference:
    return replace(place, near=place.margin <= near)


class _Tally:
    """Differences of tokens, prompt by prompt."""

    def __init__(self, planned: int) -> None:
        self.facts: dict[str, Any] = {"prompts": 0, "planned": planned, "texts": 0, "alike": 0, "tokens": 0, "near_ties": 0,
                                      "widest_near_tie": 0.0, "defects": 0, "places": []}  # fmt: skip

    def add(self, prompt: int, count: int, alike: bool, places: list[Difference], defects: int) -> None:
        """One text of so many tokens. defects: differences that rounding does not explain."""
        facts, near = self.facts, [place.margin for place in places if place.near]
        facts["prompts"] = prompt + 1
        for name, more in (("texts", 1), ("alike", alike), ("tokens", count), ("near_ties", len(near)), ("defects", defects)):
            facts[name] += int(more)
        facts["widest_near_tie"] = max(facts["widest_near_tie"], *near, 0.0)
        facts["places"] += [
            {"prompt": prompt, "index": place.index, "token": place.token, "choice": place.choice,
             "margin": place.margin if isfinite(place.margin) else "infinite", "near": place.near}
            for place in places
        ]  # fmt: skip

    def found(self, reference: str) -> Found:
        """reference: whose tokens they were compared with, for messages."""
        facts, found = self.facts, Found(self.facts)
        facts["places"] = sorted(facts["places"], key=lambda place: place["near"])[:_SHOWN]  # defects first
        if not facts["tokens"]:
            found.wrong.append("no token was compared: every text ended at once")
        if facts["defects"]:
            first = next((place for place in facts["places"] if not place["near"]), None)
            where = (
                f"the first in prompt {first['prompt']}, token {first['index']}: {first['token']} instead of {first['choice']}, "
                f"margin {first['margin'] if isinstance(first['margin'], str) else format(first['margin'], '.2g')}"
                if first
                else "and the replay does not show where"
            )
            found.wrong.append(
                f"{facts['defects']} of {facts['tokens']} tokens differ from {reference} by more than rounding does; {where}"
            )
        if facts["prompts"] < facts["planned"]:
            found.notes.append(f"time allowed {facts['prompts']} of {facts['planned']} prompts")
        return found


def _speed(stats: Stats) -> dict[str, Any]:
    names = ("tokens_per_second", "tau", "time_to_first_token_ms", "cycles_by_rows", "acceptance_by_depth", "lookups")
    return {name: stats.summary()[name] for name in names}


def slower(speculative: float, plain: float, planned: bool) -> tuple[list[str], list[str]]:
    """Failures and notes about tokens per second. planned: whether passes were measured, so that drafting is to rest where it does
    not pay."""
    if speculative >= plain:
        return [], []
    line = f"speculative decoding makes {speculative} tokens/s and plain decoding {plain}"
    if planned and speculative < _SLOW * plain:
        return [f"{line}: drafting should rest where it does not pay"], []
    return [], [line]
