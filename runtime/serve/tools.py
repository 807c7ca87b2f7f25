"""Tools: functions that the model may call. It writes calls as its chat template shows them, and a grammar binds their arguments.

Formats are recognized by what the template contains: Hermes' ``<tool_call>`` (Qwen 2.5, Qwen 3, Hermes), Llama 3's JSON object, and Mistral's
``[TOOL_CALLS]`` before a JSON list (tokenizers v3 and v7).
"""

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from ..decoding.grammar import Grammar
from .problems import Problem

# Spaces as in the JSON that templates show.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class Call:
    """arguments: JSON."""

    name: str
    arguments: str

    def body(self) -> dict[str, Any]:
        # Mistral's template wants nine letters and digits.
        identity = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return {"id": identity, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Format:
    """How a family of models writes calls. ARGUMENTS: the key of their arguments. BEGIN: what text that may be a call begins with; ANYWHERE:
    whether after other text too."""

    ARGUMENTS: ClassVar[str] = "arguments"
    BEGIN: ClassVar[str]
    ANYWHERE: ClassVar[bool] = False

    def call(self, functions: Sequence[Function]) -> dict[str, Any]:
        """The schema of one call."""
        return {"anyOf": [self._one(function) for function in functions]}

    def _one(self, function: Function) -> dict[str, Any]:
        properties = {"name": {"const": function.name}, self.ARGUMENTS: function.parameters or {"type": "object"}}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    def grammar(self, functions: Sequence[Function], required: bool, several: bool) -> str | None:
        """What the whole text must match, in llguidance's Lark; None if it cannot be bound."""
        raise NotImplementedError

    def written(self, text: str) -> list[Any]:
        """The calls in a text that begins like one, as JSON. Raises ValueError."""
        raise NotImplementedError


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACES})}"


class Hermes(Format):
    BEGIN, ANYWHERE = "<tool_call>", True

    def grammar(self, functions: Sequence[Function], required: bool, several: bool) -> str | None:
        more = ' ("\\n<tool_call>\\n" object "\\n</tool_call>")*' if several else ""
        calls = f'object "\\n</tool_call>"{more}\nobject: {_json(self.call(functions))}\n'
        if required:
            return f'start: "<tool_call>\\n" {calls}'
        return (
            f'start: PROSE | lead {calls}lead[suffix="<tool_call>\\n"]: /(?s:.*)/\nPROSE: /(?s:.*)/ & ~/(?s:.*<tool_call>.*)/\n'
        )

    def written(self, text: str) -> list[Any]:
        found = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
        if re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL).strip() or not found:
            raise ValueError("a call is not complete")
        return [json.loads(one) for one in found]


class Llama(Format):
    ARGUMENTS, BEGIN = "parameters", "{"

    def grammar(self, functions: Sequence[Function], required: bool, several: bool) -> str | None:
        start = "start: object\n" if required else "start: PROSE? | object\nPROSE: /[^{](?s:.*)/\n"
        return f"{start}object: {_json(self.call(functions))}\n"

    def written(self, text: str) -> list[Any]:
        return [json.loads(text)]


class Mistral(Format):
    """Its mark is a special token, which no grammar can hold: it is put behind the prompt if a call is required."""

    BEGIN, MARK = "[", "[TOOL_CALLS]"

    def grammar(self, functions: Sequence[Function], required: bool, several: bool) -> str | None:
        listed = {"type": "array", "items": self.call(functions), "minItems": 1, **({} if several else {"maxItems": 1})}
        return f"start: {_json(listed)}\n" if required else None

    def written(self, text: str) -> list[Any]:
        found = json.loads(text)
        if not isinstance(found, list) or not found:
            raise ValueError("no list of calls")
        return found


def recognized(template: str) -> Format | None:
    """The format of a chat template, None if it has none that is known."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else Mistral()
    if "<tool_call>" in template:
        return None if "<function=" in template else Hermes()
    return Llama() if "<|start_header_id|>" in template and "parameters" in template else None


@dataclass(frozen=True)
class Tools:
    """The tools of one request. required: whether the text must be a call. several: whether it may be several."""

    format: Format
    functions: Sequence[Function]
    required: bool
    several: bool

    @staticmethod
    def of(tools: Sequence[Tool], choice: Choice | None, several: bool, template: str | None) -> "Tools | None":
        """None if there are none, or none may be called. Raises Problem if the model cannot have tools, or the choice is none of them."""
        if not tools or choice == "none":
            return None
        if template is None or (form := recognized(template)) is None:
            raise Problem(
                400, "this model's chat template has no tools, or calls them in a form that is not supported: leave tools out", "tools",
                "unsupported_parameter",
            )  # fmt: skip
        functions = [tool.function for tool in tools]
        if isinstance(choice, NamedTool):
            functions = [function for function in functions if function.name == choice.function.name]
            if not functions:
                raise Problem(
                    400, f"there is no tool {choice.function.name!r}: tool_choice must name one of tools", "tool_choice"
                )
        return Tools(form, functions, isinstance(choice, NamedTool) or choice == "required", several)

    @property
    def mark(self) -> str:
        """A special token that the answer must begin with, "" for none."""
        return self.format.MARK if self.required and isinstance(self.format, Mistral) else ""

    def guide(self) -> Grammar | None:
        grammar = self.format.grammar(self.functions, self.required, self.several)
        return Grammar.lark(grammar) if grammar else None

    def calls(self, text: str) -> list[Call]:
        """The calls that a text is. Raises ValueError if it is none, or one of another function."""
        names, key = {function.name for function in self.functions}, self.format.ARGUMENTS
        found = []
        for one in self.format.written(text):
            if not isinstance(one, dict) or one.get("name") not in names or not isinstance(one.get(key), dict):
                raise ValueError("no call of a function that was given")
            found.append(Call(one["name"], json.dumps(one[key], ensure_ascii=False)))
        return found


class Splitter:
    """Tells calls from other text while it comes."""

    def __init__(self, tools: Tools) -> None:
        self._tools, self._held, self._said = tools, "", False

    def push(self, text: str) -> str:
        """Adds text. Returns what is certainly no call."""
        self._held += text
        begin = self._tools.format.BEGIN
        if self._tools.format.ANYWHERE:
            end = self._held.find(begin)
            if end < 0:
                tails = (len(self._held) - n for n in range(min(len(begin) - 1, len(self._held)), 0, -1))
                end = next((at for at in tails if begin.startswith(self._held[at:])), len(self._held))
        else:
            start = self._held.lstrip()
            end = 0 if not self._said and (not start or start.startswith(begin)) else len(self._held)
        free, self._held = self._held[:end], self._held[end:]
        self._said = self._said or bool(free)
        return free

    def end(self) -> tuple[str, list[Call]]:
        """What is left: text, or calls."""
        try:
            return "", self._tools.calls(self._held) if self._held.strip() else []
        except ValueError:
            return self._held, []
