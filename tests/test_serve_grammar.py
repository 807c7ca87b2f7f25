"""Grammars that crash a parser, take hours or fill memory: what is left of them, and what others notice."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from select import select
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import pytest

from runtime import Model, load
from runtime.decoding.grammar import Grammar
from runtime.decoding.grammar_matcher import GrammarMatcher
from runtime.decoding.settings import Settings
from runtime.errors import InputError
from runtime.serve.app import Limits
from runtime.serve.completions import Completions, Request
from runtime.serve.metrics import Metrics
from runtime.serve.slots import Slots
from tests.serving import client, served
from tests.test_grammar import END, SPELLED, TEXT, TINY, TURN, allowed

A, B, C = TEXT[0], TEXT[1], TEXT[2]
ENDS = {END, TURN}


def chain(n: int, name: str = "r") -> Grammar:
    return Grammar.lark(
        f"start: {name}0\n" + "".join(f'{name}{i}: "a" {name}{i + 1}\n' for i in range(n)) + f'{name}{n}: "b"'
    )


def references(n: int) -> Grammar:
    definitions: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(n)}
    return Grammar.json({"$ref": "#/$defs/0", "$defs": {**definitions, str(n): {"const": 1}}})


def properties(n: int) -> Grammar:
    return Grammar.json({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}})


SLOW = properties(10_000)  # compiling it takes 7 to 19 s
REFUSED = {
    "compile, or is chained or nested too deeply: simplify it": chain(40_000),
    "takes more than 10 s or 256 MiB to compile": Grammar.lark(
        "start: " + " ".join(f"a{i}" for i in range(9000)) + "\n" + "".join(f"a{i}: %json {{}}\n" for i in range(9000))
    ),
    "has 1200000 characters and may have 1048576: shorten it": Grammar.regex("ab" * 600_000),
    "nested too deeply: make it flatter": Grammar.json('{"items":' * 3000 + "true" + "}" * 3000),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_end_the_process_is_refused(message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        TINY.start(REFUSED[message])
    assert "\n" not in str(caught.value)
    assert allowed(TINY.start(Grammar.regex("a"))) == {A}


@pytest.mark.exhaustive  # it takes the 10 s that a grammar may
def test_what_takes_too_long_is_refused() -> None:
    said = ""
    try:
        TINY.start(SLOW)
    except InputError as error:
        said = str(error)
    if not said:
        pytest.skip("this processor compiles it within 10 s")
    assert "takes more than 10 s" in said


def test_a_trial_takes_little() -> None:
    large = TINY.prepared(properties(2_000))  # 0.4 s
    assert not large.try_to_prepare()
    TINY.start(large)


def test_what_passed_a_trial_may_take_as_much_as_others() -> None:
    others, tried, compiled = processes(), *(TINY.prepared(Grammar.regex("a")) for _ in range(2))
    assert tried.try_to_prepare()
    compiled.prepare()
    lines = [
        Path(f"/proc/{process}/limits").read_text().partition("Max data size")[2] for process in processes() - others
    ]
    first, second = (int(line.split()[0]) for line in lines)
    assert abs(first - second) < 1 << 20


def test_a_chain_is_followed_to_its_end() -> None:
    """Longer ones than a thread's usual stack takes: it holds 1,000 references of a schema, 2,000 rules."""
    matcher = TINY.start(chain(4000))
    for _ in range(4000):
        matcher.accept(A)
    assert allowed(matcher) == {B}
    matcher.accept(B)
    assert matcher.done
    assert allowed(TINY.start(references(3000))) == {TEXT[SPELLED.index(b"1")]}


def test_a_token_that_takes_too_long_ends_the_text() -> None:
    matcher = TINY.start(Grammar.lark(f'start: s\ns: s s{" s" * 30_000} | "a" | ""'))
    with pytest.raises(InputError, match="cannot be followed further .*a token takes more than 1 s"):
        allowed(matcher)


# ---- grammars that are compiled once ----


def test_texts_of_one_grammar_are_independent() -> None:
    grammar = TINY.prepared(Grammar.regex("(ab|ba)c"))
    first, second = TINY.start(grammar), TINY.start(grammar)
    first.accept(A)
    second.accept(B)
    assert (allowed(first), allowed(second)) == ({B}, {A})
    first.accept(B)
    first.accept(C)
    assert allowed(first) == ENDS
    second.rewind(1)
    assert allowed(TINY.start(grammar)) == allowed(second)
    assert A in allowed(second)


def test_closing_ends_texts_and_a_compilation() -> None:
    grammar = TINY.prepared(Grammar.regex("a*"))
    matcher = TINY.start(grammar)
    grammar.close()
    with pytest.raises(InputError, match="cannot be followed further"):
        matcher.accept(A)
    with pytest.raises(InputError, match="this grammar is closed"):
        TINY.start(grammar)

    slow, errors = TINY.prepared(SLOW), list[str]()
    others = processes()

    def compile() -> None:
        try:
            slow.prepare()
        except InputError as error:
            errors.append(str(error))

    thread = threading.Thread(target=compile)
    thread.start()
    wait_for(lambda: processes() - others)
    slow.close()
    thread.join()
    assert errors == ["this grammar is closed: prepare another"]
    wait_for(lambda: not processes() - others)


def test_a_grammar_ends_with_its_matcher() -> None:
    others = processes()
    matcher: GrammarMatcher | None = TINY.start(Grammar.regex("a*"))
    assert matcher
    assert len(processes() - others) == 1
    matcher = None
    wait_for(lambda: not processes() - others)


def processes() -> set[int]:
    """Of grammars: in the session of a process that this one has started for a vocabulary."""
    found: dict[int, list[str]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            found[int(name)] = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
    return {
        process
        for process, (state, _, _, session, *_) in found.items()
        if process != int(session) and state != "Z" and found.get(int(session), ["", ""])[1] == str(os.getpid())
    }


def wait_for(fact: Callable[[], object]) -> None:
    end = monotonic() + 8  # less than compiling takes
    while not fact():
        assert monotonic() < end
        sleep(0.01)


# ---- the server ----


@pytest.fixture(scope="module")
def model(chat_bundle: Path) -> Iterator[Model]:
    with load(chat_bundle, threads=1, streams=3) as model:
        yield model


def test_others_are_answered_while_grammars_are_compiled_and_these_end_with_their_clients(model: Model) -> None:
    with served(model, Limits(queue=1)) as address, ExitStack() as clients:
        api, others = client(address), processes()
        body = json.dumps({"model": "demo", "prompt": "x", "grammar": f"start: %json {SLOW.text}"})
        slow = [
            clients.enter_context(closing(HTTPConnection(urlsplit(address).netloc, timeout=60))) for _ in model.streams
        ]
        for connection in slow:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        wait_for(lambda: processes() - others)
        for _ in range(3):
            assert api.completions.create(model="demo", prompt="x", max_tokens=3).usage.completion_tokens == 3  # type: ignore[union-attr]
            guided = api.completions.create(model="demo", prompt="x", max_tokens=20, extra_body={"regex": "(ab|c){2}"})
            assert guided.choices[0].text in ("abab", "abc", "cab", "cc")
        assert not select([connection.sock for connection in slow], [], [], 0)[0]  # none has an answer yet
        clients.close()
        wait_for(lambda: not processes() - others)
        # And the next grammar has its turn, once for several texts.
        answer = api.completions.create(model="demo", prompt="x", n=4, max_tokens=20, extra_body={"regex": "(ab|c){2}"})
        assert all(choice.text in ("abab", "abc", "cab", "cc") for choice in answer.choices)
        wait_for(lambda: not processes() - others)


def test_texts_with_grammars_leave_a_stream_to_others(model: Model) -> None:
    slots = Slots(model.streams, 10)

    async def run() -> None:
        async with slots.lease([1], True), slots.lease([1], True):
            third = asyncio.ensure_future(slots.lease([1], True).__aenter__())
            for _ in range(3):
                async with slots.lease([1], False):
                    assert not third.done()
        await third

    asyncio.run(run())
    slots.close()


def test_a_grammar_that_takes_long_gives_way_to_texts_that_wait(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that gave way end as they would have by themselves, and one that leaves meanwhile leaves its place."""
    monkeypatch.setattr("runtime.serve.completions._Fair.used_up", True)
    monkeypatch.setattr("runtime.serve.completions._TOGETHER_SECONDS", -1.0)
    slow = Settings(120, grammar=model.matchers.prepared(Grammar.regex("(?s).*")), min_new_tokens=120)
    quick = Settings(3, grammar=model.matchers.prepared(Grammar.regex("[a-z]+")))
    alone = ["".join(model.start(prompt, slow)) for prompt in ("def main(", "class A:")]
    answered = threading.Event()
    # Any of them alone takes longer than a quick text beside two of them.
    slow = replace(slow, callback=lambda *_: answered.wait(0.05) and False)
    slots, order = Slots(model.streams, 10), list[str]()
    completions = Completions(model, slots, Metrics(slots))

    async def text(name: str, prompt: str, settings: Settings) -> str:
        parts = [part.text async for _, part in completions.run(Request([model.encode(prompt)], [settings]))]
        order.append(name)
        return "".join(parts)

    async def run() -> list[str]:
        hogs = [asyncio.ensure_future(text("slow", prompt, slow)) for prompt in ("def main(", "class A:")]
        while slots.busy < 2:
            await asyncio.sleep(0)
        gone = asyncio.ensure_future(text("gone", "x", slow))
        assert await text("quick", "x", quick)
        assert order == ["quick"]
        gone.cancel()
        answered.set()
        found = await asyncio.gather(*hogs)
        while slots.busy:
            await asyncio.sleep(0.01)
        assert not slots.queued
        return found

    assert asyncio.run(run()) == alone
    slots.close()
