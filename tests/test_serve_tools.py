"""Tools: what the model is told, what it may write, and what clients are told of it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openai import OpenAI

from runtime import Model, load
from runtime.decoding.grammar import GrammarMatchers
from runtime.errors import InputError
from runtime.serve.answers import ChatAnswer, Part, Usage
from runtime.serve.tools import (
    Allowance,
    Call,
    Function,
    Hermes,
    Llama,
    Mistral,
    NamedTool,
    Splitter,
    Tool,
    Tools,
    recognized,
)
from tests.conftest import with_template
from tests.serving import TEMPLATE, client, served

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NOTHING: list[dict[str, Any]] = [
    {"arguments": ""},
    {"arguments": " "},
    {"arguments": None},
    {"arguments": "null"},
    {"arguments": "{}"},
    {},
]
UNHELD = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
SECRET = {"type": "object", "properties": {"word": {"type": "string", "format": "password"}}}
# Written like the templates of Qwen 2.5, Llama 3.2 and Mistral 7B v0.3, as far as the format of calls goes.
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools> answer "
    "<tool_call>\n{...}\n</tool_call>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% '
    "endfor %}<assistant>"
)
LLAMA = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}parameters{% endif %}{% for m in messages "
    "%}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}{% endfor %}<|start_header_id|>assistant"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}[INST]{{ m.content }}{% "
    "endfor %}{# [TOOL_CALLS] #}"
)
USER = [{"role": "user", "content": "Paris?"}]


def function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


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
    one = {"tools": [WEATHER], "parallel_tool_calls": False} if choice == "required" else {"tools": [CLOCK, WEATHER]}
    for seed in range(2):
        asked: Any = {"model": "demo", "messages": USER, "tool_choice": choice, "max_tokens": 120, "seed": seed, **one}
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
    _, api = servers["hermes"]
    told: list[str] = []

    def watched(bundle: Any, text: str, *args: Any, **options: Any) -> list[int]:
        told.append(text)
        return [1]

    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
    clocks = [{"id": "b", "type": "function", "function": {"name": "clock", **given}} for given in NOTHING]
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call, *clocks]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.api.stream.encode", watched)
        api.chat.completions.create(model="demo", messages=messages, tools=[WEATHER], max_tokens=1)  # type: ignore[arg-type]
        api.chat.completions.create(model="demo", messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=1)  # type: ignore[arg-type]
    assert json.loads(told[0].split("<tools>")[1].split("</tools>")[0]) == WEATHER
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>' in told[0]
    assert told[0].count('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>') == len(NOTHING)
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
        streamed = "".join(
            chunk.choices[0].delta.content or "" for chunk in api.chat.completions.create(stream=True, **asked)
        )
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
        ({"tools": [CLOCK, function("f", {"type": "nonsense"})]}, "tool 'f' are of type \"nonsense\""),
        (
            {"tools": [CLOCK, function("f", {"properties": {"x": {"type": "nonsense"}}})]},
            "'f' cannot be enforced .*nonsense.*: correct",
        ),
        ({"tools": [CLOCK, function("f", UNHELD)], "tool_choice": "required"}, "'f' cannot be enforced .*uniqueItems"),
        (
            {"tools": [CLOCK, function("f", UNHELD, strict=True)]},
            "'f' cannot be enforced .*uniqueItems.*leave strict out",
        ),
        ({"tools": [CLOCK, function("f", SECRET)], "tool_choice": named("f")}, "'f' cannot be enforced .*password"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tools": [], "tool_choice": named("f")}, "there are no tools"),
    ):
        asked: Any = {"model": "demo", "messages": USER, "tools": [WEATHER], "max_tokens": 5, **more}
        with pytest.raises(openai.BadRequestError, match=message):
            api.chat.completions.create(**asked)
    # If the model chooses, they are notes for it.
    answer = api.chat.completions.create(
        model="demo", messages=USER, tools=[function("f", UNHELD), function("g", SECRET)], max_tokens=5
    )  # type: ignore[arg-type, list-item]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_formats_are_recognized() -> None:
    assert isinstance(recognized(HERMES), Hermes)
    assert isinstance(recognized(LLAMA), Llama)
    assert isinstance(recognized(MISTRAL.replace("tools", "tools ")), Mistral)
    for unknown in (
        TEMPLATE,
        HERMES + "<function=f>",
        MISTRAL + "[ARGS]",
        "{{ tools }}",
        HERMES.replace("tools", "toys"),
    ):
        assert recognized(unknown) is None


CALL = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
HERMES_CALL = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.fixture(scope="module")
def matchers(demo_bundle: Path) -> GrammarMatchers:
    with load(demo_bundle) as model:
        manifest = model.bundle.manifest
        return GrammarMatchers(model.bundle.tokenizer.to_str(), manifest.vocabulary, manifest.eos_token_ids)


def complete(matchers: GrammarMatchers, guide: Any, ids: Sequence[int]) -> bool:
    """Whether a grammar takes tokens as a whole text."""
    matcher = matchers.start(guide)
    try:
        for token in ids:
            matcher.accept(token)
    except InputError:
        return False
    return matcher._may_end()


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
        (Hermes(), True, True, CLOCK_CALL, True),
        (Hermes(), True, True, CLOCK_CALL.replace("{}", '{"a": 1}'), False),
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
    with load(demo_bundle) as model:
        assert complete(matchers, guide, model.encode(text, special=False)) is allowed
    if allowed and text.rstrip("]").endswith(("}}", "</tool_call>")):
        splitter = Splitter(tools)
        splitter.push(text)
        _, calls = splitter.end(cut=False)
        assert calls
        expected = ("clock", "{}") if "clock" in text else ("weather", '{"city": "Rome", "days": 2}')
        assert {(call.name, call.arguments) for call in calls} == {expected}


class Wheel(pydantic.BaseModel):
    spokes: Literal[24, 36]


class Engine(pydantic.BaseModel):
    electric: bool
    parts: "list[Engine | Wheel]"


class Car(pydantic.BaseModel):
    engine: Engine
    wheel: Wheel | None


NUMBER, WORD = {"type": "integer"}, {"enum": ["a"]}
ENGINE = {"electric": True, "parts": [{"spokes": 24}, {"electric": False, "parts": []}]}
# Two tools whose references have the same text, and arguments for either: each means its own schema.
PAIRS: list[tuple[dict[str, Any], dict[str, Any], list[Any]]] = [
    *(
        (
            {"properties": {"x": {"$ref": f"#/{place}/{pointer}"}}, place: {name: NUMBER, "y": WORD}},
            {"properties": {"x": {"$ref": f"#/{place}/{pointer}"}}, place: {name: WORD, "y": NUMBER}},
            [{"x": 1}, {"x": "a"}],
        )
        for place in ("$defs", "definitions")
        for name, pointer in (("y", "y"), ("a/b~c", "a~1b~0c"), ("Page[int] é", "Page%5Bint%5D%20%C3%A9"))
    ),
    (
        {"properties": {"x": {"$ref": "#/properties/y"}, "y": NUMBER}},
        {"properties": {"x": {"$ref": "#/properties/y"}, "y": WORD}},
        [{"x": 1}, {"x": "a"}],
    ),
    (
        {"properties": {"x": {"$ref": "#"}}},
        {"properties": {"x": {"$ref": "#"}, "y": NUMBER}},
        [{"x": {}}, {"x": {"x": {"x": {}}}}, {"x": {"y": 1}}, {"x": 1}, {"y": 1}],
    ),
    (
        {
            "$ref": "#/$defs/T",
            "$defs": {
                "T": {"type": "object", "properties": {"x": NUMBER}, "required": ["x"], "additionalProperties": False}
            },
        },
        {
            "$ref": "#/$defs/T",
            "$defs": {
                "T": {"type": "object", "properties": {"x": WORD}, "required": ["x"], "additionalProperties": False}
            },
        },
        [{"x": 1}, {"x": "a"}, {}],
    ),
    (
        openai.pydantic_function_tool(Car)["function"]["parameters"],
        openai.pydantic_function_tool(Engine)["function"]["parameters"],
        [
            {"engine": ENGINE, "wheel": None},
            {"engine": ENGINE, "wheel": {"spokes": 36}},
            {"engine": {"spokes": 24}, "wheel": None},
            ENGINE,
            {"electric": True, "parts": [{"spokes": 1}]},
        ],
    ),
]


@pytest.mark.parametrize("required", [True, False])
def test_references_mean_what_they_mean_alone(matchers: GrammarMatchers, demo_bundle: Path, required: bool) -> None:
    """By jsonschema, and for models of the API's own client."""
    with load(demo_bundle) as model:
        for *schemas, candidates in PAIRS:
            # A root that is a reference closes itself.
            closed = [
                schema if "$ref" in schema else {"additionalProperties": False, "type": "object", **schema}
                for schema in schemas
            ]
            guide = Tools(
                Llama(), [Function(name=f"f{i}", parameters=one) for i, one in enumerate(closed)], required, False
            ).guide()
            assert guide is not None
            verdicts = set()
            for i, schema in enumerate(closed):
                for arguments in candidates:
                    text = f'{{"name": "f{i}", "parameters": {json.dumps(arguments)}}}'
                    allowed = complete(matchers, guide, model.encode(text, special=False))
                    assert allowed is Draft202012Validator(schema).is_valid(arguments), (schema, arguments)
                    verdicts.add(allowed)
            assert verdicts == {True, False}


@pytest.mark.parametrize(
    ("form", "text", "arguments", "rest"),
    [
        (Hermes(), HERMES_CALL + '\n<tool_call>\n{"name": "wea', 1, '\n<tool_call>\n{"name": "wea'),
        (Hermes(), f"{HERMES_CALL}\n{HERMES_CALL}", 2, ""),
        (Hermes(), HERMES_CALL[:-3], 0, HERMES_CALL[:-3]),
        (Hermes(), HERMES_CALL.replace("Rome", "</tool_call>"), 1, ""),
        (Hermes(), HERMES_CALL.replace("Rome", r"\ud800"), 1, ""),
        (Hermes(), HERMES_CALL.replace("2", "1e999"), 0, HERMES_CALL.replace("2", "1e999")),
        (Hermes(), HERMES_CALL.replace("2", "[" * 200_000), 0, HERMES_CALL.replace("2", "[" * 200_000)),
        (Hermes(), f"{HERMES_CALL} It rains.", 1, " It rains."),
        (Llama(), CALL.replace("arguments", "parameters"), 1, ""),
        (Llama(), '{"name": "weather", "param', 0, '{"name": "weather", "param'),
        (Mistral(), f"[{CALL}, {CALL}]", 2, ""),
        (Mistral(), f"[{CALL}, {CALL[:-5]}", 1, f", {CALL[:-5]}"),
        (Mistral(), "[1] It rains", 0, "[1] It rains"),
    ],
)
def test_complete_calls_are_kept(demo_bundle: Path, form: Any, text: str, arguments: int, rest: str) -> None:
    """Also at the limit of tokens, where the piece of another call is left out, whole and streamed alike."""
    tools = Tools(form, [Function(**WEATHER["function"])], True, True)  # type: ignore[arg-type]
    calls, left = tools.calls(text)
    assert (len(calls), left) == (arguments, rest)
    for call in calls:
        call.arguments.encode()
        assert set(json.loads(call.arguments)) == {"city", "days"}
    for reason in ("length", "stop"):
        answer = ChatAnswer("demo", None, tools=tools)  # type: ignore[arg-type]
        whole = answer.whole([[Part(text, finish_reason=reason)]], Usage())["choices"][0]
        deltas = [chunk["choices"][0] for chunk in answer.chunks(0, Part(text, finish_reason=reason))]
        assert len(whole["message"].get("tool_calls", ())) == arguments
        assert (
            whole["finish_reason"]
            == deltas[-1]["finish_reason"]
            == ("tool_calls" if calls and reason == "stop" else reason)
        )
        said = "" if calls and reason == "length" else rest
        assert (whole["message"]["content"] or "") == "".join(one["delta"].get("content", "") for one in deltas) == said


@given(st.data())
def test_a_stream_is_split_like_the_whole(data: st.DataObject) -> None:
    """However a text is cut into pieces, calls and other text are those of the whole, and nothing of a call is
    shown."""
    form: Any = data.draw(st.sampled_from([Hermes(), Llama(), Mistral()]))
    call = CALL.replace("arguments", form.ARGUMENTS)
    whole = {"Hermes": f"<tool_call>\n{call}\n</tool_call>", "Llama": call, "Mistral": f"[{call}]"}[type(form).__name__]
    parts = data.draw(
        st.lists(
            st.sampled_from([whole, "It rains. ", "<tool", "<", "{", "[", "\n", call[:9], "</tool_call>"]), max_size=3
        )
    )
    text = "".join(parts)
    tools = Tools(form, [Function(**WEATHER["function"])], False, True)  # type: ignore[arg-type]
    at_once, in_pieces = Splitter(tools), Splitter(tools)
    expected = at_once.push(text), at_once.end(cut=False)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    free = "".join(in_pieces.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))
    rest, calls = in_pieces.end(cut=False)
    assert (free + rest, calls) == (expected[0] + expected[1][0], expected[1][1])
    if calls:
        assert calls == [Call("weather", '{"city": "Rome", "days": 2}')] * len(calls)
        assert text.count(whole) >= len(calls)
        assert set(text) - set(whole) <= set(free + rest + "\n")
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
    assert Tools.of([], "auto", True, HERMES) is None
    named_one = Tools.of(tools, NamedTool(**named("clock")), True, HERMES)
    assert named_one is not None
    assert ([one.name for one in named_one.functions], named_one.required, named_one.several) == (
        ["clock"],
        True,
        False,
    )
    allowed = {"mode": "required", "tools": [named("clock")]}
    listed = Tools.of(tools, Allowance(type="allowed_tools", allowed_tools=allowed), True, HERMES)  # type: ignore[arg-type]
    assert listed is not None
    assert ([one.name for one in listed.functions], listed.required, listed.several) == (["clock"], True, True)
    required = Tools.of(tools, "required", True, MISTRAL)
    assert required is not None
    assert required.mark == "[TOOL_CALLS]"
