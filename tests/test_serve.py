"""The server as its clients see it: the official openai client, raw HTTP, a browser. Texts are those of the model by
itself."""

import asyncio
import http.client
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from pydantic import ValidationError

from runtime import Model, Stream, load
from runtime.decoding.settings import Settings
from runtime.decoding.text.encode import encode
from runtime.errors import GumihoError, UnavailableError
from runtime.serve.app import Limits
from runtime.serve.bodies import Body, ChatBody, CompletionBody
from runtime.serve.completions import Completions, Request
from runtime.serve.guard import Access
from runtime.serve.main import _Printable
from runtime.serve.metrics import Metrics
from runtime.serve.problems import FAILED
from runtime.serve.slots import Slots
from tests.conftest import examples, with_template
from tests.serving import client, logged, served

USER = [{"role": "user", "content": "def main(argv):"}]
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(chat_bundle: Path) -> Iterator[Model]:
    with load(chat_bundle, threads=1, streams=3) as model:
        yield model


@pytest.fixture(scope="module")
def alone(model: Model) -> Iterator[Model]:
    """The same bundle once more, which shows what texts should be."""
    with load(model.bundle.path, threads=1) as alone:
        yield alone


@pytest.fixture(scope="module")
def address(model: Model) -> Iterator[str]:
    with served(model) as address:
        yield address


@pytest.fixture(scope="module")
def api(address: str) -> OpenAI:
    return client(address)


def expected(alone: Model, messages: Any = USER, count: int = 30, **options: Any) -> str:
    return "".join(alone.generate(alone.chat(messages), count, **options))


def test_a_conversation(api: OpenAI, alone: Model) -> None:
    answer = api.chat.completions.create(model="demo", messages=USER, temperature=0, max_tokens=30)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == expected(alone)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(alone.chat(USER))
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30
    # The next turn reads only what is new.
    more = [
        *USER,
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "x = 1"},
    ]
    second = api.chat.completions.create(model="demo", messages=more, temperature=0, max_completion_tokens=10)  # type: ignore[arg-type]
    assert second.choices[0].message.content == expected(alone, more, 10)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > len(alone.chat(USER)) // 2


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0.9, "seed": 7, "top_p": 0.9}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}),
        ({"seed": -5}, {"temperature": 1.0, "seed": (1 << 64) - 5}),
        ({"temperature": 0, "stop": ["\n"]}, {"stop": "\n"}),
        ({"temperature": 0, "stop": "\n"}, {"stop": "\n"}),
        (
            {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
            {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        ),
        ({"temperature": 0, "logit_bias": {"10": -100, "11": 5}}, {"logit_bias": {10: float("-inf"), 11: 5}}),
        (
            {"seed": 1, "extra_body": {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3}},
            {"seed": 1, "temperature": 1.0, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3},
        ),
    ],
)
def test_settings(api: OpenAI, alone: Model, options: dict[str, Any], same: dict[str, Any]) -> None:
    text = expected(alone, **same)
    answer = api.chat.completions.create(model="demo", messages=USER, max_tokens=30, **options)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == text
    stream = api.chat.completions.create(
        model="demo", messages=USER, max_tokens=30, stream=True, stream_options={"include_usage": True}, **options
    )  # type: ignore[call-overload]
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == answer.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert chunks[-1].choices == []


def test_variables_of_the_chat_template(api: OpenAI, alone: Model) -> None:
    options = {"model": "demo", "messages": USER, "temperature": 0, "max_tokens": 12}
    answer = api.chat.completions.create(**options, extra_body={"chat_template_kwargs": {"style": "class "}})  # type: ignore[call-overload]
    plain = alone.generate(alone.chat(USER, variables={"style": "class "}), 12)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "".join(plain) != expected(alone, count=12)
    assert answer.usage.prompt_tokens > len(alone.chat(USER))  # type: ignore[arg-type]


# Parameters of the API with values that clients send, and what becomes of them: "used", "ignored" (the text is the
# same) or "refused". The names are those of openai 3.57.0: from openai.types import completion_create_params as text;
# from openai.types.chat import completion_create_params as chat
# print([*chat.CompletionCreateParamsBase.__annotations__, *text.CompletionCreateParamsBase.__annotations__]) Open
# WebUI's are those that its page sends to its own backend, and to a server directly.
BOTH: dict[str, tuple[Any, str]] = {
    "frequency_penalty": (0.5, "used"),
    "logit_bias": ({"5": 1}, "used"),
    "max_tokens": (3, "used"),
    "model": ("demo", "used"),
    "n": (2, "used"),
    "presence_penalty": (0.5, "used"),
    "seed": (1, "used"),
    "stop": (["x"], "used"),
    "stream_options": ({"include_usage": True}, "used"),
    "temperature": (0.5, "used"),
    "top_p": (0.5, "used"),
    "user": ({"id": "1", "name": "Ann", "email": "a@example.com", "role": "user"}, "ignored"),
    # Open WebUI
    "background_tasks": ({"title_generation": True}, "ignored"),
    "chat_id": ("1", "ignored"),
    "features": ({"web_search": False}, "ignored"),
    "filter_ids": ([], "ignored"),
    "id": ("1", "ignored"),
    "model_item": ({"id": "demo"}, "ignored"),
    "parent_id": (None, "ignored"),
    "parent_message": ({"id": "1"}, "ignored"),
    "session_id": ("1", "ignored"),
    "tool_ids": (["x"], "ignored"),
    "tool_servers": ([], "ignored"),
    "folder_id": ("1", "ignored"),
    "skill_ids": (["x"], "ignored"),
    "terminal_id": ("1", "ignored"),
    "user_message": ({"id": "1"}, "ignored"),
    "variables": ({"{{USER_NAME}}": "Ann"}, "ignored"),
}
CHAT: dict[str, tuple[Any, str]] = {
    "audio": ({"format": "wav", "voice": "alloy"}, "refused"),
    "function_call": ({"name": "f"}, "refused"),
    "functions": ([{"name": "f"}], "refused"),
    "logprobs": (True, "used"),
    "max_completion_tokens": (3, "used"),
    "messages": (USER, "used"),
    "metadata": ({"a": 1}, "ignored"),
    "modalities": (["text", "audio"], "refused"),
    "moderation": ({"model": "m"}, "refused"),
    "parallel_tool_calls": (False, "used"),
    "prediction": ({"type": "content", "content": "x"}, "ignored"),
    "prompt_cache_key": ("k", "ignored"),
    "prompt_cache_options": ({"mode": "explicit"}, "ignored"),
    "prompt_cache_retention": ("24h", "ignored"),
    "reasoning_effort": ("high", "used"),
    "response_format": ({"type": "text"}, "used"),
    "safety_identifier": ("s", "ignored"),
    "service_tier": ("priority", "ignored"),
    "store": (True, "ignored"),
    "tool_choice": ("auto", "used"),
    "tools": ([], "used"),
    "top_logprobs": (2, "used"),
    "verbosity": ("low", "refused"),
    "web_search_options": ({}, "refused"),
    "files": ([{"id": "f"}], "refused"),
    "params": ({"temperature": 0}, "refused"),
    "echo": (True, "refused"),
}
TEXT: dict[str, tuple[Any, str]] = {
    "best_of": (2, "refused"),
    "echo": (True, "refused"),
    "logprobs": (2, "used"),
    "prompt": ("a", "used"),
    "suffix": ("x", "refused"),
    "messages": (USER, "refused"),
}


@pytest.mark.parametrize(("path", "own"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_every_parameter_of_the_api_is_decided(address: str, path: str, own: dict[str, tuple[Any, str]]) -> None:
    asked = {
        "model": "demo",
        "temperature": 0,
        "max_tokens": 4,
        **({"prompt": "def main("} if own is TEXT else {"messages": USER}),
    }
    _, plain, _ = post(address, json.dumps(asked).encode(), path)
    docs = (Path(__file__).parent.parent / "docs" / "serving.md").read_text("utf-8")
    for name, (value, outcome) in (BOTH | own).items():
        more = {"logprobs": True} if name == "top_logprobs" else {}
        status, answer, _ = post(address, json.dumps({**asked, **more, name: value}).encode(), path)
        assert status == (400 if outcome == "refused" else 200), (name, answer)
        if outcome == "refused":
            assert name in answer["error"]["message"]
        elif outcome == "ignored":
            assert without_names(answer) == without_names(plain), name
        assert f"`{name}`" in docs


def without_names(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("id", "created", "usage")}


def test_notes_of_clients_are_no_text(api: OpenAI, alone: Model) -> None:
    """What answers have and clients send back; and what goes to templates that read it."""
    first = {
        "role": "user",
        "content": [{"type": "text", "text": USER[0]["content"], "cache_control": {"type": "ephemeral"}, "id": "1"}],
    }
    answer = {
        "role": "assistant",
        "content": [{"type": "refusal", "refusal": "no"}],
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "parsed": {"a": 1},
        "reasoning_content": "hm",
        "name": "Ann",
    }
    refusal = {"role": "assistant", "content": None, "refusal": "never"}
    asked = [first, answer, first, refusal, {"role": "user", "content": "x", "mood": "Glad."}]
    plain = [
        *USER,
        {"role": "assistant", "content": "no"},
        *USER,
        {"role": "assistant", "content": "never"},
        {"role": "user", "content": "x"},
    ]
    given: Any = {"model": "demo", "messages": asked, "temperature": 0, "max_tokens": 12, "reasoning_effort": "high"}
    text = "".join(
        alone.generate(
            alone.chat([*plain[:-1], plain[-1] | {"mood": "Glad."}], variables={"reasoning_effort": "high"}), 12
        )
    )
    assert api.chat.completions.create(**given).choices[0].message.content == text
    own = api.chat.completions.create(**given, extra_body={"chat_template_kwargs": {"reasoning_effort": "low"}})
    assert own.usage is not None
    assert own.usage.prompt_tokens == len(
        alone.chat([*plain[:-1], plain[-1] | {"mood": "Glad."}], variables={"reasoning_effort": "low"})
    )


def test_completions_of_several_prompts(api: OpenAI, alone: Model) -> None:
    prompts = ["import ", "class A:\n"]
    answer = api.completions.create(model="demo", prompt=prompts, n=2, seed=5, max_tokens=12)
    texts = ["".join(alone.generate(one, 12, temperature=1.0, seed=5 + i)) for one in prompts for i in range(2)]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(alone.encode(one)) for one in prompts)
    assert answer.usage.completion_tokens == 48
    streamed = [""] * 4
    for chunk in api.completions.create(model="demo", prompt=prompts, n=2, seed=5, max_tokens=12, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    by_ids = api.completions.create(
        model="demo", prompt=[alone.encode(one) for one in prompts], temperature=0, max_tokens=5
    )
    assert [choice.text for choice in by_ids.choices] == ["".join(alone.generate(one, 5)) for one in prompts]


def test_open_webui(address: str, alone: Model) -> None:
    """Its calls, by backend/open_webui/routers/openai.py: a list of models, then streamed answers with usage, whose
    last message may be a list of parts with a note for caches, and a title for the conversation, whole."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("GET", "/v1/models", headers={"Authorization": "Bearer ", "Content-Type": "application/json"})
    name = json.loads(connection.getresponse().read())["data"][0]["id"]
    part = {"type": "text", "text": USER[0]["content"], "cache_control": {"type": "ephemeral"}}
    asked = {
        "model": name,
        "messages": [{"role": "user", "content": [part]}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 20,
        "stop": [],
        "logit_bias": {"5": -100},
        "frequency_penalty": 0,
        "stream_options": {"include_usage": True},
    }
    connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
    lines = [line.removeprefix(b"data: ") for line in connection.getresponse().read().split(b"\n\n") if line]
    assert lines.pop() == b"[DONE]"
    chunks = [json.loads(line) for line in lines]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == expected(alone, count=20, logit_bias={5: float("-inf")})
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    title = {"model": name, "messages": USER, "stream": False, "max_completion_tokens": 30}
    connection.request("POST", "/v1/chat/completions", json.dumps(title), {"Content-Type": "application/json"})
    assert json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]
    connection.close()


def test_long_work_does_not_keep_others_waiting(model: Model, api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing megabytes, and compiling grammars: not in the thread that answers everybody."""
    seen = []

    def outside(work: Any) -> Any:
        def watched(*args: Any, **options: Any) -> Any:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            seen.append(work.__name__)
            return work(*args, **options)

        return watched

    monkeypatch.setattr("runtime.api.stream.encode", outside(encode))
    monkeypatch.setattr(Stream, "selector", outside(Stream.selector))
    api.chat.completions.create(model="demo", messages=USER, max_tokens=1)  # type: ignore[arg-type]
    api.completions.create(model="demo", prompt="a", max_tokens=1)
    assert (seen.count("encode"), seen.count("selector")) == (2, 4)


def test_logprobs(api: OpenAI, alone: Model) -> None:
    generation = alone.generate(alone.chat(USER), 12, logprobs=3)
    text = "".join(generation)
    asked: Any = {
        "model": "demo",
        "messages": USER,
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = api.chat.completions.create(**asked)
    listed = answer.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in listed).decode() == text
    np.testing.assert_allclose([one.logprob for one in listed], [one.logprob for one in generation.logprobs])
    likely = [[other.logprob for other in one.top_logprobs] for one in listed]
    np.testing.assert_allclose(likely, [[logprob for _, logprob in one.top] for one in generation.logprobs])
    streamed = [chunk.choices[0].logprobs for chunk in api.chat.completions.create(stream=True, **asked)]
    assert [one for part in streamed if part for one in part.content] == listed
    old = api.completions.create(model="demo", prompt=alone.chat(USER), temperature=0, max_tokens=12, logprobs=3)
    lists = old.choices[0].logprobs
    assert lists is not None
    assert lists.tokens is not None
    np.testing.assert_allclose(lists.token_logprobs, [one.logprob for one in generation.logprobs])
    assert lists.text_offset == [len("".join(lists.tokens[:i])) for i in range(12)]


def test_guided_texts(api: OpenAI) -> None:
    formats: tuple[Any, ...] = (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    )
    for form in formats:
        answer = api.chat.completions.create(
            model="demo",
            messages=USER,
            seed=3,
            max_tokens=60,
            response_format=form,
            temperature=0.3,  # type: ignore[arg-type]
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"age"}
    by_regex = api.completions.create(model="demo", prompt="v", max_tokens=9, extra_body={"regex": "[0-9]{2}-[0-9]{2}"})
    assert re.fullmatch("[0-9]{2}-[0-9]{2}", by_regex.choices[0].text)


def test_sources_name_what_drafted_each_token(api: OpenAI, alone: Model) -> None:
    stream = api.chat.completions.create(
        model="demo",
        messages=USER,
        temperature=0,
        max_tokens=30,
        stream=True,
        extra_body={"sources": True},  # type: ignore[arg-type]
    )
    sources = [source for chunk in stream for source in (chunk.choices[0].model_extra or {}).get("sources", ())]
    assert "".join(text for text, _ in sources) == expected(alone)
    assert {name for _, name in sources} <= {"target", "serial 1", "serial 2", "head 1", "head 2", "head 3", "lookup"}
    assert len({name for _, name in sources}) > 1
    ended = api.chat.completions.create(
        model="demo",
        messages=USER,
        max_tokens=3,
        logit_bias={str(alone.eos_token_ids[0]): 100},
        extra_body={"sources": True},  # type: ignore[arg-type]
    )
    assert ended.choices[0].finish_reason == "stop"
    assert [text for text, _ in ended.choices[0].model_extra["sources"]] == [""]  # an end of text is no text


def test_the_next_part_is_decoded_while_one_is_sent(model: Model) -> None:
    """One part, and no more: a client that does not read stops its text."""
    slots = Slots(model.streams[:1], 0)  # with several, what earlier texts left in the caches decides which decodes
    completions = Completions(model, slots, Metrics(slots))

    async def read_one() -> tuple[int, int, str]:
        texts = completions.run(Request([model.encode("def main(argv):")], [Settings(150, trace=True)]))
        _, first = await anext(texts)
        selector = model.decoder.selector
        assert selector
        assert first.sources
        sent = len(first.sources)
        for _ in range(2000):
            if len(selector.ids) > sent:
                break
            await asyncio.sleep(0.01)
        ahead = 0
        for _ in range(3):  # what has begun ends
            await slots._all[0].run(lambda: None)
            ahead = len(selector.ids)
        text = first.text + "".join([part.text async for _, part in texts])
        return sent, ahead, text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.serve.completions._TOGETHER_SECONDS", -1.0)  # parts of a piece each
        sent, ahead, text = asyncio.run(read_one())
    slots.close()
    plain = model.generate("def main(argv):", 150, speculate=False)
    assert text == "".join(plain)
    assert sent < ahead < len(plain.ids)


def test_clients_at_once_get_their_own_texts(api: OpenAI, alone: Model) -> None:
    """More than there are streams."""
    jobs = [([{"role": "user", "content": f"def f{i}(x):"}], i) for i in range(8)]
    texts = [expected(alone, messages, 16, temperature=0.7, seed=seed) for messages, seed in jobs]
    found: dict[int, str | None] = {}

    def ask(messages: Any, seed: int) -> None:
        answer = api.chat.completions.create(model="demo", messages=messages, max_tokens=16, temperature=0.7, seed=seed)
        found[seed] = answer.choices[0].message.content

    threads = [threading.Thread(target=ask, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get(seed) for _, seed in jobs] == texts


def test_a_prompt_that_another_stream_has_read_is_copied(model: Model, alone: Model) -> None:
    first, second = model.stream(), model.stream()
    prompt = np.random.default_rng(0).integers(3, 900, 120).tolist()
    list(first.generate(prompt, 8).cycles())
    assert second.adopt(first, [*prompt[:100], 5, 6, 7])
    generation = second.start([*prompt[:100], 5, 6, 7], alone.generate([1], 20).settings, resume=True)
    list(generation.cycles())
    assert generation.stats.cached_tokens >= 98
    assert generation.ids == [
        token for cycle in alone.generate([*prompt[:100], 5, 6, 7], 20).cycles() for token in cycle.tokens
    ]
    with first._locked():  # as while it reads a prompt
        found = []
        thread = threading.Thread(target=lambda: found.append(second.adopt(first, prompt)))
        thread.start()
        thread.join()
    assert found == [False]
    first.close()
    second.close()


# --- requests that are refused ----------------------------------------------------------------------------------------


def test_what_is_not_supported_is_refused_by_name(api: OpenAI) -> None:
    for body, call in ((ChatBody, api.chat.completions.create), (CompletionBody, api.completions.create)):
        asked: dict[str, Any] = {"messages": USER} if body is ChatBody else {"prompt": "a"}
        for name, neutral in body.UNSUPPORTED.items():
            with pytest.raises(openai.BadRequestError, match=f"{name} is not supported") as error:
                call(model="demo", max_tokens=1, **asked, extra_body={name: {"odd": 1}})  # type: ignore[operator]
            assert error.value.param == name
            for value in (*neutral, None):
                call(model="demo", max_tokens=1, **asked, extra_body={name: value})  # type: ignore[operator]
        with pytest.raises(openai.BadRequestError, match="there is no parameter nonsense"):
            call(model="demo", **asked, extra_body={"nonsense": 1})  # type: ignore[operator]
    for path in ("responses", "embeddings"):
        with pytest.raises(openai.NotFoundError, match="is not supported"):
            api.post(f"/{path}", cast_to=object, body={})
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        api.chat.completions.create(model="gpt-4", messages=USER)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt-4")
    assert api.models.retrieve("demo").id == api.models.list().data[0].id == "demo"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(openai.BadRequestError, match="'image_url' is not supported"):
        api.chat.completions.create(model="demo", messages=image)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n: "),
        ({"n": 17}, "ask for 1 to 16"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 500}]}, "capacity is 200"),
        ({"messages": [{"role": "clown", "content": "x"}]}, "messages.0.role"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"logit_bias": {"nobody": 1}}, "give token ids"),
        ({"logit_bias": {"99999": 1}}, "99999"),
        ({"logit_bias": {"1_0": 1}}, "give token ids"),
        ({"logit_bias": {str(i): 1 if i < 400 else "x" for i in range(900)}}, "logit_bias.400: "),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, "20001 characters, more than 200 tokens hold"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 20_000}]}]}, "20001 characters"),
        ({"messages": [{"role": "user", "content": "x"}] * 10_000}, "20000 characters"),
        ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "of type text and has a json_schema"),
        ({"response_format": {"type": "json_schema"}}, "no json_schema"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "exclude"),
        ({"grammar": "start: a\na: ("}, "the grammar is wrong (line 2"),
        ({"regex": "(a"}, "the regex is wrong (invalid regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "schema of response_format cannot",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": []}},
            "response_format.json_schema: Input should be an object",
        ),
        ({"tool_choice": 5}, "tool_choice: "),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"stop": ""}, "stop: an empty string"),
        ({"stop": ["a", ""]}, "stop: an empty string"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages.0.colour is not supported"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a valid string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}]},
            "messages.0.content.colour",
        ),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": 5}]}, "messages.1.tool_calls: "),
        (
            {
                "messages": [
                    *USER,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
                ]
            },
            "messages.1.tool_calls: this model's chat template has no calls of tools: leave it out",
        ),
        ({"unheard_of": [], "n": 0}, "n: Input should be greater than or equal to 1"),
        (
            {"messages": [*USER, {"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
            "messages.1.function_call",
        ),
        ({"stop": ["a"] * 17}, "at most 16"),
        ({"stream": "yes"}, "stream"),
        ({"chat_template_kwargs": {"messages": []}}, "messages cannot be a variable of the chat template"),
        ({"chat_template_kwargs": ["style"]}, "chat_template_kwargs"),
    ],
)
def test_wrong_values_are_named(api: OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(message)) as error:
        api.chat.completions.create(**{"model": "demo", "messages": USER, "extra_body": options})  # type: ignore[call-overload]
    assert error.value.body["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * 200_000 + ["a"], "prompt: send text or token ids"),
        ([[1], [2, None]], "prompt: send text or token ids"),
        ([True], "prompt: send text or token ids"),
        ({}, "prompt: send text or token ids"),
        (["a"] * 200_000, "200000 texts in one request: ask for 1 to 16"),
        ([], "0 texts"),
        ("x" * 20_000, "20000 characters"),
    ],
    ids=str,
)
def test_prompts_that_are_none_cost_little(model: Model, prompt: Any, message: str) -> None:
    """Nothing is encoded for them."""
    encoded = Mock(side_effect=AssertionError("encoded"))
    with patch.object(Model, "encode", encoded), served(model, Limits()) as address:
        status, answer, _ = post(address, json.dumps({"model": "demo", "prompt": prompt}).encode(), "/v1/completions")
        assert (status, message in answer["error"]["message"]) == (400, True), answer
    encoded.assert_not_called()


def test_a_long_text_has_the_same_ids(model: Model) -> None:
    """It is encoded another way, so that others need not wait."""
    text = "".join(f"line {i} of <|end_of_text|> €\n" for i in range(2000))
    assert model.encode(text) == model.bundle.tokenizer.encode(text).ids


@pytest.mark.parametrize(
    "own",
    [
        {"prompt": [*[1] * 99, *["a"] * 99]},
        {"prompt": "x", "stop": [1] * 99},
        {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(99)), "x")},
        {"messages": [{"role": "clown"}] * 99},
        {"messages": USER, "tools": [{}] * 99},
    ],
    ids=str,
)
def test_of_many_errors_the_first_is_enough(own: dict[str, Any]) -> None:
    """A list of them all takes seconds for a body of some megabytes, in which the server answers nobody."""
    with pytest.raises(ValidationError) as error:
        (CompletionBody if "prompt" in own else ChatBody).model_validate({"model": "demo", **own})
    assert error.value.error_count() <= 2, "a union has one for each of its kinds"


def post(
    address: str, body: bytes, path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content), dict(response.getheaders())


def test_bodies_that_are_no_requests(model: Model) -> None:
    with served(model, Limits(body=2000, patience=1)) as address:
        for body, status, message in (
            (b"", 400, "not JSON (line 1, column 1)"),
            (b"{", 400, "not JSON (line 1, column 2)"),
            (b"a\xff", 400, "byte 1 is not UTF-8"),
            (b"[1]", 400, "no JSON object"),
            (b'{"temperature": NaN}', 400, "NaN"),
            (b'{"temperature": 1e999}', 400, "too large"),
            (b"[" * 1500, 400, "nested too deeply"),
            (b" " * 2001, 413, "--max-body"),
        ):
            found, answer, _ = post(address, body)
            assert (found, message in answer["error"]["message"]) == (status, True), answer
        assert post(address, b"{}", **{"Content-Type": "text/plain"})[0] == 415
        assert post(address, b"{}", path="/v1/models")[0] == 405
        for odd in ({"messages": [{"role": "user", "content": "\ud800"}]}, {"messages": USER, "\ud800": 1}):
            status, answer, _ = post(address, json.dumps({"model": "demo", **odd}).encode())
            assert (status, answer["error"]["message"].partition(":")[0]) == (400, "the body is not valid Unicode")
        chunked = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        chunked.request(
            "POST",
            "/v1/completions",
            iter([b"x" * 1500] * 2),
            {"Content-Type": "application/json"},
            encode_chunked=True,
        )
        assert chunked.getresponse().status == 413
        chunked.close()
        with socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])), timeout=30) as late:
            late.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                b"application/json\r\nContent-Length: 9\r\n\r\n{"
            )
            assert b" 408 " in late.recv(1000)


def test_keys(model: Model) -> None:
    with served(model, access=Access(keys=["secret", "other"])) as address:
        for key in ("secret", "other"):
            assert client(address, key).models.list().data
        for wrong in ("", "secre", "secret2"):
            status, answer, _ = post(address, b"{}", Authorization=f"Bearer {wrong}")
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        for path, status in (("/health", 200), ("/", 200), ("/metrics", 401), ("/v1/models", 401)):
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
            connection.request("GET", path)
            assert connection.getresponse().status == status
            connection.close()


def test_other_pages_and_other_names(model: Model) -> None:
    with served(
        model, access=Access(origins=["https://good.example"], hosts=["localhost", "127.0.0.1", "[::1]"])
    ) as address:
        for host, status in (("localhost:1", 415), ("[::1]:5", 415), ("evil.example", 403), ("", 403)):
            assert post(address, b"{}", Host=host, **{"Content-Type": "x"})[0] == status
        _, _, headers = post(address, b"{}", Origin="https://good.example")
        assert headers["access-control-allow-origin"] == "https://good.example"
        _, _, headers = post(address, b"{}", Origin="https://evil.example")
        assert "access-control-allow-origin" not in headers


def test_a_full_queue_is_told(model: Model) -> None:
    """However many requests come at once, as many are taken as there are streams and places."""
    long = {"model": "demo", "prompt": "a", "stream": True, "max_tokens": 20}
    with served(model, Limits(queue=1)) as address:
        for _ in range(2):  # places become free again
            with held(model):  # no stream gets a turn
                opened = [streaming(address, long) for _ in range(12)]
                responses = [connection.getresponse() for connection in opened]
                refused = [response for response in responses if response.status == 429]
                assert len(refused) == 12 - 3 - 1
                for response in refused:
                    error = json.loads(response.read())["error"]
                    assert (error["code"], "the queue of 1 is full" in error["message"]) == ("queue_full", True)
                    assert int(response.headers["retry-after"]) >= 1
            for response in responses:
                assert response in refused or b"[DONE]" in response.read()
            for connection in opened:
                connection.close()


def held(model: Model) -> Any:
    return model._loaded.loop.exclusive()


def streaming(address: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return connection


def running(address: str) -> float:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(
        float(value) for value in re.findall(r"^vllm:num_requests_(?:running|waiting) (.*)$", text, re.MULTILINE)
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_text(model: Model, address: str, stream: bool) -> None:
    """Also while it waits for a stream, and while its prompt is read."""
    with held(model):
        opened = [
            streaming(address, {"model": "demo", "prompt": "a" * 99, "stream": stream, "max_tokens": 150})
            for _ in range(5)
        ]
        deadline = monotonic() + 30
        while running(address) < 5 and monotonic() < deadline:
            sleep(0.01)
        assert running(address) == 5
        for connection in opened:
            connection.close()
    while running(address) and monotonic() < deadline:
        sleep(0.01)
    assert running(address) == 0
    assert client(address).completions.create(model="demo", prompt="a", max_tokens=2).choices


def test_connections_that_send_nothing_are_closed(model: Model) -> None:
    with served(model, Limits(patience=0.5)) as address:
        port = int(address.rsplit(":", 1)[1])
        for sent in (
            b"",
            b"GET /health HTTP/1.1\r\nHost: x",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as idle:
                idle.sendall(sent)
                while idle.recv(1000):
                    pass


@pytest.mark.exhaustive
def test_a_client_that_does_not_read_is_left(model: Model) -> None:
    """What it is sent fills the buffers of both sides."""
    body = {"model": "demo", "prompt": ["a"] * 16, "max_tokens": 190, "logprobs": 5, "stream": True}
    with logged() as lines, served(model, Limits(patience=0.5)) as address:
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            lazy.connect(("127.0.0.1", int(address.rsplit(":", 1)[1])))
            content = json.dumps(body).encode()
            lazy.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
            )
            deadline = monotonic() + 60
            while len(lines) < 2 and monotonic() < deadline:  # the first says where the server is
                sleep(0.05)
        told = re.search(r"/v1/completions .* \+ (\d+) tokens", lines[1])
        assert told
        assert int(told[1]) < 16 * 190
        while running(address):
            assert monotonic() < deadline
            sleep(0.05)


# --- what it tells ----------------------------------------------------------------------------------------------------


def test_the_log_holds_no_prompts(model: Model) -> None:
    for told in (False, True):
        with logged() as lines, served(model, log_prompts=told) as address:
            client(address).completions.create(model="demo", prompt="hush", max_tokens=3)
        began, line = lines
        assert began == f"demo on {address}, OpenAI's API on {address}/v1"
        assert re.match(r"POST /v1/completions 200 [0-9.]+ s, \d+ \+ 3 tokens, \d cached, [0-9.]+ a pass", line)
        assert ("hush" in line) is told


def test_the_log_holds_no_control_characters(model: Model, address: str) -> None:
    with logged() as lines:
        assert post(address, b"{}", "/a%1b[31m%0aINFO" + "x" * 999)[1]["error"]["message"].startswith("/a?[31m INFOx")
    assert re.fullmatch(r"POST /a%1B%5B31m%0AINFOx+ 404 [0-9.]+ s", lines[0])
    assert len(lines[0]) < 250
    record = logging.LogRecord("x", logging.ERROR, "x", 1, "failed", (), (ValueError, ValueError("a\x1b[31mb"), None))
    assert _Printable().format(record) == "failed\nValueError: a\\x1b[31mb"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "error", [GumihoError("/srv/secret is damaged"), UnavailableError("/srv/secret"), ZeroDivisionError("/srv/secret")]
)
def test_failures_are_told_without_their_insides(model: Model, address: str, error: Exception, stream: bool) -> None:
    """They are for the log. A stream that has begun ends with an event."""

    def failing(*args: Any, **options: Any) -> Any:
        raise error

    body = {"model": "demo", "prompt": "a", "stream": stream}
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        patch.setattr(Stream, "start", failing)
        connection = streaming(address, body)
        response = connection.getresponse()
        content = response.read()
        connection.close()
    status = 503 if isinstance(error, UnavailableError) else 500
    assert response.status == (200 if stream else status)
    assert json.loads(content.removeprefix(b"data: "))["error"]["message"] == FAILED
    assert any("a request failed" in line for line in lines)


def test_a_template_that_fails_is_told_without_its_folder(chat_bundle: Path, tmp_path: Path) -> None:
    folder = with_template(chat_bundle, tmp_path / "demo", "{{ messages.nothing.at_all }}")
    with load(folder, threads=1) as model, served(model) as address:
        status, answer, _ = post(address, json.dumps({"model": "demo", "messages": USER}).encode())
        assert (status, str(tmp_path) in str(answer)) == (400, False)
        assert "the chat template in chat_template.jinja fails on this conversation" in answer["error"]["message"]


def test_metrics(model: Model) -> None:
    with served(model) as address:
        api = client(address)
        for _ in range(2):
            api.chat.completions.create(model="demo", messages=USER, temperature=0, max_tokens=20)  # type: ignore[arg-type]
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
    values = {name: float(value) for name, value in re.findall(r"^([^# ][^ ]*) (.*)$", text, re.MULTILINE)}
    assert values["vllm:generation_tokens_total"] == 40
    assert values['vllm:request_success_total{finished_reason="length"}'] == 2
    assert values["vllm:time_to_first_token_seconds_count"] == 2
    assert values["vllm:prompt_tokens_total"] == 2 * len(model.chat(USER))
    assert values["vllm:prefix_cache_hits_total"] > 0
    accepted = values["vllm:spec_decode_num_accepted_tokens_total"] + values["gumiho:looked_up_tokens_total"]
    assert accepted + values["gumiho:target_passes_total"] + 2 == pytest.approx(40, abs=2)
    assert values["gumiho:streams"] == 3
    assert values['gumiho:http_requests_total{path="/v1/chat/completions",status="200"}'] == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted(
    {
        *ChatBody.model_fields,
        *CompletionBody.model_fields,
        *ChatBody.UNSUPPORTED,
        *CompletionBody.UNSUPPORTED,
        *Body.IGNORED,
    }
    - {"model"}
)
SANE = st.fixed_dictionaries(
    {"prompt": st.text(max_size=9) | st.lists(st.integers(0, 3000), max_size=9), "messages": st.just(USER)},
    optional={
        "max_tokens": st.integers(0, 5),
        "temperature": st.floats(0, 2),
        "stop": st.text(max_size=2),
        "n": st.integers(1, 3),
        "logit_bias": st.dictionaries(st.integers(0, 2100).map(str), st.floats(-100, 100), max_size=2),
        "stream": st.booleans(),
    },
)


@given(SANE, st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2), st.booleans())
@examples(300)
def test_no_body_breaks_the_server(address: str, sane: dict[str, Any], odd: dict[str, Any], chat: bool) -> None:
    """Whatever is sent is answered, or refused with a sentence."""
    sane.pop("prompt" if chat else "messages")
    body = {"model": "demo", "max_tokens": 3, **sane, **odd}
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    assert response.status in (200, 400, 404), content
    if response.status != 200:
        assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}
    elif "event-stream" in (response.getheader("content-type") or ""):
        events = [line.removeprefix(b"data: ") for line in content.split(b"\n\n") if line]
        assert events.pop() == b"[DONE]"
        for event in events:
            assert json.loads(event)["choices"] or body.get("stream_options")
    else:
        assert json.loads(content)["choices"]


def test_page(browser: Any, address: str, alone: Model) -> None:
    tab, complaints = browser.new_page(viewport={"width": 900, "height": 700}), list[str]()
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(f"{address}/")
    tab.locator("#model", has_text="demo").wait_for()
    tab.fill("#most", "40")
    tab.fill("#text", "def main(argv):")
    tab.keyboard.press("Enter")
    tab.locator("article.assistant small", has_text="tokens").wait_for()
    shown = "".join(tab.locator("article.assistant .token").all_text_contents())
    assert shown == expected(alone, count=40)
    assert tab.locator("article.assistant .token.d1").count() > 0
    assert tab.locator("article.assistant small").text_content().startswith("40 tokens")
    tab.fill("#most", "0")
    tab.fill("#temperature", "9")
    tab.fill("#text", "<b>x</b>")
    tab.click("#send")
    tab.locator("article.bad", has_text="temperature").wait_for()
    assert tab.locator("article.user").last.text_content() == "<b>x</b>"
    tab.fill("#temperature", "0")
    tab.fill("#text", "x")
    tab.click("#send")
    tab.locator("article.assistant small", has_text=re.compile("^0 tokens, at the limit")).wait_for()
    # Emptied fields ask for the API's defaults; another conversation has nothing of an answer that it ended.
    tab.fill("#most", "")
    for text in ("while True:", "import"):
        tab.click("#new")
        tab.fill("#text", text)
        with tab.expect_request("**/v1/chat/completions") as asked:
            tab.keyboard.press("Enter")
        body = asked.value.post_data_json
        assert "max_tokens" not in body
        assert body["messages"] == [{"role": "user", "content": text}]
        tab.locator("article.assistant .token").first.wait_for(state="attached")
    tab.click("#send")
    tab.locator("article.assistant small", has_text="stopped").wait_for()
    assert [one for one in complaints if "400" not in one] == []


def test_page_asks_for_a_key(browser: Any, model: Model) -> None:
    with served(model, access=Access(keys=["secret"])) as address:
        tab = browser.new_page()
        tab.goto(f"{address}/")
        tab.locator("#model", has_text="the API key is missing").wait_for()
        tab.fill("#key", "secret")
        tab.fill("#most", "5")
        tab.fill("#text", "import")
        tab.click("#send")
        tab.locator("article.assistant small", has_text="5 tokens").wait_for()
        tab.close()
