"""Tools: what the model is told, what it may write, and what clients are told of it."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from runtime import Model, load
from runtime.decoding.grammar import GrammarMatchers
from runtime.errors import InputError
from runtime.serve.tools import Call, Function, Hermes, Llama, Mistral, Splitter, Tool, Tools, recognized
from tests.conftest import with_template
from tests.serving import TEMPLATE, client, served

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
# Written like the templates of Qwen 2.5, Llama 3.2 and Mistral 7B v0.3, as far as the format of calls goes.
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools> answer <tool_call>\n{...}\n</tool_call>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}<assistant>'
)
LLAMA = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}parameters{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}{% endfor %}<|start_header_id|>assistant"
)
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}[INST]{{ m.content }}{% endfor %}{# [TOOL_CALLS] #}"
USER = [{"role": "user", "content": "Paris?"}]


@pytest.fixture(scope="module")
def servers(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Model, OpenAI]]]:
    templates = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "none": TEMPLATE}
    with ExitStack() as stack:
        found = {}
        for name, template in templates.items():
            folder = with_template(demo_bundle, tmp_path_factory.mktemp(name) / "demo", template)
            model = stack.enter_context(load(folder, threads=1, streams=2))
            found[name] = model, client(stack.enter_context(served(model)))
        yield found


def arguments_hold(call: Any) -> None:
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9
    assert len(arguments) == 2


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_is_one_that_the_schema_allows(
    servers: dict[str, tuple[Model, OpenAI]], name: str, choice: Any
) -> None:
    """The demo model knows no tools: only the grammar makes it write a call."""
    _, api = servers[name]
    tools = [WEATHER] if choice == "required" else [CLOCK, WEATHER]
    for seed in range(2):
        asked: Any = {
            "model": "demo", "messages": USER, "tools": tools, "tool_choice": choice, "max_tokens": 120, "seed": seed,
            "parallel_tool_calls": False,
        }  # fmt: skip
        answer = api.chat.completions.create(**asked).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls
        arguments_hold(call)
        assert len(call.id) == 9
        deltas = [chunk.choices[0] for chunk in api.chat.completions.create(stream=True, **asked)]
        (streamed,) = [one for delta in deltas for one in delta.delta.tool_calls or ()]
        assert (streamed.index, streamed.function) == (0, type(streamed.function)(**call.function.model_dump()))
        assert deltas[-1].finish_reason == "tool_calls"
        assert not "".join(delta.delta.content or "" for delta in deltas)


def test_the_template_is_told_of_tools_and_results(servers: dict[str, tuple[Model, OpenAI]]) -> None:
    model, api = servers["hermes"]
    told: list[str] = []
    encode = model.encode

    def watched(text: str, special: bool = True) -> list[int]:
        told.append(text)
        return encode("x", special)

    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "encode", watched)
        api.chat.completions.create(model="demo", messages=messages, tools=[WEATHER], max_tokens=1)  # type: ignore[arg-type]
        api.chat.completions.create(model="demo", messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=1)  # type: ignore[arg-type]
    assert json.loads(told[0].split("<tools>")[1].split("</tools>")[0]) == WEATHER
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>' in told[0]
    assert "<tool>sunny" in told[0]
    assert "<tools>" not in told[1]


def test_text_without_a_call_stays_text(servers: dict[str, tuple[Model, OpenAI]]) -> None:
    for name in ("hermes", "llama", "mistral"):
        model, api = servers[name]
        prompt = model.chat(USER, [WEATHER])
        text = "".join(model.stream().generate(prompt, 20))
        asked: Any = {"model": "demo", "messages": USER, "tools": [WEATHER], "max_tokens": 20, "temperature": 0}
        answer = api.chat.completions.create(**asked).choices[0]
        assert answer.message.content == text
        assert answer.message.tool_calls is None
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in api.chat.completions.create(stream=True, **asked))
        assert streamed == text


def test_what_cannot_be_called_is_refused(servers: dict[str, tuple[Model, OpenAI]]) -> None:
    _, api = servers["none"]
    with pytest.raises(openai.BadRequestError, match="chat template has no tools"):
        api.chat.completions.create(model="demo", messages=USER, tools=[WEATHER])  # type: ignore[arg-type, list-item]
    _, api = servers["hermes"]
    for more, message in (
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "no tool 'nobody'"),
        ({"response_format": {"type": "json_object"}}, "tools exclude"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]}, "grammar is wrong"),
    ):
        asked: Any = {"model": "demo", "messages": USER, "tools": [WEATHER], "max_tokens": 5, **more}
        with pytest.raises(openai.BadRequestError, match=message):
            api.chat.completions.create(**asked)


def test_formats_are_recognized() -> None:
    assert isinstance(recognized(HERMES), Hermes)
    assert isinstance(recognized(LLAMA), Llama)
    assert isinstance(recognized(MISTRAL.replace("tools", "tools ")), Mistral)
    for unknown in (TEMPLATE, HERMES + "<function=f>", MISTRAL + "[ARGS]", "{{ tools }}", HERMES.replace("tools", "toys")):
        assert recognized(unknown) is None


CALL = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
HERMES_CALL = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.fixture(scope="module")
def matchers(demo_bundle: Path) -> GrammarMatchers:
    with load(demo_bundle) as model:
        manifest = model.bundle.manifest
        return GrammarMatchers(model.bundle.tokenizer.to_str(), manifest.vocabulary, manifest.eos_token_ids)


@pytest.mark.parametrize(
    ("form", "required", "several", "text", "allowed"),
    [
        (Hermes(), False, True, "", True),
        (Hermes(), False, True, "It rains <tool", True),
        (Hermes(), False, True, HERMES_CALL, True),
        (Hermes(), False, True, f"Let me see. {HERMES_CALL}\n{HERMES_CALL}", True),
        (Hermes(), False, False, f"{HERMES_CALL}\n{HERMES_CALL}", False),
        (Hermes(), False, True, "<tool_call>\nno", False),
        (Hermes(), False, True, HERMES_CALL.replace("weather", "crime"), False),
        (Hermes(), False, True, HERMES_CALL.replace("2", "12"), False),
        (Hermes(), True, True, "It rains", False),
        (Hermes(), True, True, HERMES_CALL, True),
        (Llama(), False, True, "", True),
        (Llama(), False, True, "It rains {", True),
        (Llama(), False, True, CALL.replace("arguments", "parameters"), True),
        (Llama(), False, True, CALL, False),
        (Llama(), True, True, "It rains", False),
        (Mistral(), True, True, f"[{CALL}, {CALL}]", True),
        (Mistral(), True, False, f"[{CALL}, {CALL}]", False),
        (Mistral(), True, True, "[]", False),
    ],
)
def test_what_the_grammar_allows(
    matchers: GrammarMatchers, demo_bundle: Path, form: Any, required: bool, several: bool, text: str, allowed: bool
) -> None:
    tools = Tools(form, [Function(**WEATHER["function"]), Function(name="clock")], required, several)  # type: ignore[arg-type]
    guide = tools.guide()
    assert guide is not None
    matcher = matchers.start(guide)
    with load(demo_bundle) as model:
        try:
            for token in model.encode(text, special=False):
                matcher.accept(token)
            complete = matcher._may_end()
        except InputError:
            complete = False
    assert complete is allowed
    if allowed and text.rstrip("]").endswith(("}}", "</tool_call>")):
        splitter = Splitter(tools)
        splitter.push(text)
        _, calls = splitter.end()
        assert calls
        assert {(call.name, call.arguments) for call in calls} == {("weather", '{"city": "Rome", "days": 2}')}


@given(st.data())
def test_a_stream_is_split_like_the_whole(data: st.DataObject) -> None:
    """However a text is cut into pieces, calls and other text are those of the whole, and nothing of a call is shown."""
    form: Any = data.draw(st.sampled_from([Hermes(), Llama(), Mistral()]))
    call = CALL.replace("arguments", form.ARGUMENTS)
    whole = {"Hermes": f"<tool_call>\n{call}\n</tool_call>", "Llama": call, "Mistral": f"[{call}]"}[type(form).__name__]
    parts = data.draw(
        st.lists(st.sampled_from([whole, "It rains. ", "<tool", "<", "{", "[", "\n", call[:9], "</tool_call>"]), max_size=3)
    )
    text = "".join(parts)
    tools = Tools(form, [Function(**WEATHER["function"])], False, True)  # type: ignore[arg-type]
    at_once, in_pieces = Splitter(tools), Splitter(tools)
    expected = at_once.push(text), at_once.end()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    free = "".join(in_pieces.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))
    rest, calls = in_pieces.end()
    assert (free + rest, calls) == (expected[0] + expected[1][0], expected[1][1])
    if calls:
        assert calls == [Call("weather", '{"city": "Rome", "days": 2}')] * len(calls)
        assert free + rest + whole * len(calls) == text.rstrip("\n") or whole in text
    else:
        assert free + rest == text or not (free + rest).strip()


def test_tools_of_a_request() -> None:
    tools = [Tool(**WEATHER), Tool(**CLOCK)]  # type: ignore[arg-type]
    assert Tools.of(tools, "none", True, HERMES) is None
    assert Tools.of([], None, True, TEMPLATE) is None
    auto = Tools.of(tools, None, True, MISTRAL)
    assert auto is not None
    assert auto.mark == ""
    assert auto.guide() is None
    required = Tools.of(tools, "required", True, MISTRAL)
    assert required is not None
    assert required.mark == "[TOOL_CALLS]"
