"""Tools: functions that the model may call. The model writes calls in its chat template's format, and a grammar
constrains their arguments.

Formats are recognized by strings in the template: Hermes' ``<tool_call>`` (Qwen 2.5, Qwen 3, Hermes), Llama 3's JSON
object, and Mistral's ``[TOOL_CALLS]`` before a JSON list (tokenizers v3 and v7).
"""

import json
import re
import secrets
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..decoding.grammar import Grammar, GrammarError
from .problems import Problem

# The spaces of the JSON in templates.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Function(_Strict):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def bound(self, enforced: bool) -> dict[str, Any]:
        """The schema of the function's arguments. enforced: whether a constraint that the grammar cannot express is an
        error; otherwise only the model sees it. Raises Problem if the parameters are not an object."""
        given, spaces = self.parameters or {}, _SPACES if enforced or self.strict else {**_SPACES, "lenient": True}
        nothing = {"type": ("object",), "properties": ({},), "required": ([],)}
        if all(value in nothing.get(name, ()) for name, value in given.items()):
            given = {"properties": {}, "additionalProperties": False}
        kinds = given.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise Problem(
                400,
                f'the parameters of tool {self.name!r} are of type {json.dumps(kinds)}: give "type": "object"',
                "tools",
                "invalid_value",
            )
        return {**given, "type": "object", "x-guidance": spaces}


class Tool(_Strict):
    type: Literal["function"]
    function: Function
    cache_control: Any = Field(None, exclude=True)  # meant for other servers


class NamedFunction(_Strict):
    name: str


class NamedTool(_Strict):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(_Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class Allowance(_Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"] | NamedTool | Allowance


@dataclass(frozen=True)
class Call:
    """A call of a tool. arguments: JSON text."""

    name: str
    arguments: str

    def body(self) -> dict[str, Any]:
        # Mistral's template requires nine letters and digits.
        identity = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return {"id": identity, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Format:
    """How a family of models writes calls.

    ARGUMENTS: the key of a call's arguments. BEGIN: the beginning of text that may be a call. ANYWHERE: whether calls
    may follow other text. OPEN, CLOSE: patterns before and after each call. END: the pattern after the last one.
    """

    ARGUMENTS: ClassVar[str] = "arguments"
    BEGIN: ClassVar[str]
    ANYWHERE: ClassVar[bool] = False
    OPEN: ClassVar[str]
    CLOSE: ClassVar[str] = ""
    END: ClassVar[str] = ""

    def grammar(self, functions: Sequence[Function], required: bool, several: bool) -> str | None:
        """The grammar of the whole text, in llguidance's Lark; None if it cannot be constrained. Line i, from 1, has
        the schema of function i. Schemas are separate, so that references resolve within each."""
        if (start := self.start(required, several)) is None:
            return None
        begins = [f'{{"name": {json.dumps(one.name, ensure_ascii=False)}, "{self.ARGUMENTS}": ' for one in functions]
        calls = [f'{json.dumps(begin, ensure_ascii=False)} args_{i} "}}"' for i, begin in enumerate(begins)]
        schemas = [f"args_{i}: %json {json.dumps(one.bound(required))}" for i, one in enumerate(functions)]
        return "\n".join([*schemas, f"call: {' | '.join(calls)}", start]) + "\n"

    def start(self, required: bool, several: bool) -> str | None:
        """The start rule and its helpers; they refer to the rule ``call``, one call as JSON."""
        raise NotImplementedError

    def written(self, text: str) -> Iterator[tuple[Any, str]]:
        """Yields the calls at the beginning of a text, parsed from JSON, each with the text after it."""
        while begin := re.match(rf"\s*{self.OPEN}\s*", text):
            try:
                one, at = json.JSONDecoder().raw_decode(text, begin.end())
            except (ValueError, RecursionError):
                return
            if not (end := re.compile(rf"\s*{self.CLOSE}").match(text, at)):
                return
            text = text[end.end() :]
            yield one, re.sub(rf"^\s*{self.END}\s*$", "", text)


class Hermes(Format):
    BEGIN, ANYWHERE, OPEN, CLOSE = "<tool_call>", True, "<tool_call>", "</tool_call>"

    def start(self, required: bool, several: bool) -> str | None:
        more = ' ("\\n<tool_call>\\n" call "\\n</tool_call>")*' if several else ""
        calls = f'call "\\n</tool_call>"{more}'
        if required:
            return f'start: "<tool_call>\\n" {calls}'
        return (
            f'start: PROSE | lead {calls}\nlead[suffix="<tool_call>\\n"]: /(?s:.*)/\nPROSE: /(?s:.*)/ & '
            "~/(?s:.*<tool_call>.*)/"
        )


class Llama(Format):
    ARGUMENTS, BEGIN, OPEN = "parameters", "{", r"(?=\{)"

    def start(self, required: bool, several: bool) -> str | None:
        return "start: call" if required else "start: PROSE? | call\nPROSE: /[^{](?s:.*)/"


class Mistral(Format):
    """MARK is a special token, which no grammar can express. If a call is required, it is appended to the prompt."""

    BEGIN, MARK, OPEN, END = "[", "[TOOL_CALLS]", r"[\[,]", r"\]"

    def start(self, required: bool, several: bool) -> str | None:
        more = ' (", " call)*' if several else ""
        return f'start: "[" call{more} "]"' if required else None


def recognized(template: str) -> Format | None:
    """The format of a chat template, None if it is unknown."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else Mistral()
    if "<tool_call>" in template:
        return None if "<function=" in template else Hermes()
    return Llama() if "<|start_header_id|>" in template and "parameters" in template else None


@dataclass(frozen=True)
class Tools:
    """The tools of a request. required: whether the text must be a call. several: whether it may have several calls."""

    format: Format
    functions: Sequence[Function]
    required: bool
    several: bool

    @staticmethod
    def of(tools: Sequence[Tool], choice: Choice | None, several: bool, template: str | None) -> "Tools | None":
        """The tools that may be called, None if there are none. Raises Problem if the model does not support tools, or
        if the choice is not one of them."""
        if not tools and choice not in (None, "none", "auto"):
            raise Problem(
                400, "tool_choice asks for a call and there are no tools: give tools, or leave it out", "tool_choice"
            )
        if not tools or choice == "none":
            return None
        if template is None or (known := recognized(template)) is None:
            raise Problem(
                400,
                "this model's chat template has no tools, or calls them in a form that is not supported: leave tools "
                "out",
                "tools",
                "unsupported_parameter",
            )
        given = {tool.function.name: tool.function for tool in tools}
        if len(given) < len(tools):
            raise Problem(400, "two tools have one name: give each a name of its own", "tools", "invalid_value")
        names, required = list(given), choice == "required"
        if isinstance(choice, NamedTool):
            names, required, several = [choice.function.name], True, False
        elif isinstance(choice, Allowance):
            names = [tool.function.name for tool in choice.allowed_tools.tools]
            required = choice.allowed_tools.mode == "required"
            if required and not names:
                raise Problem(
                    400, "tool_choice asks for a call and allows no tool: allow one, or leave it out", "tool_choice"
                )
        if unknown := [name for name in names if name not in given]:
            raise Problem(400, f"there is no tool {unknown[0]!r}: tool_choice must name one of tools", "tool_choice")
        return Tools(known, [given[name] for name in names], required, several) if names else None

    @property
    def mark(self) -> str:
        """A special token that the answer must begin with, "" for none."""
        return self.format.MARK if self.required and isinstance(self.format, Mistral) else ""

    def guide(self) -> Grammar | None:
        grammar = self.format.grammar(self.functions, self.required, self.several)
        return Grammar.lark(grammar) if grammar else None

    def refused(self, error: GrammarError) -> Problem:
        """The problem for an error in the grammar, with the tool at fault."""
        if not 0 < error.line <= len(self.functions):
            return Problem(
                400,
                f"the tools cannot be enforced ({error.reason}): simplify their parameters",
                "tools",
                "invalid_value",
            )
        function = self.functions[error.line - 1]
        way_out = (
            "change them, or leave strict out and the choice to the model"
            if self.required or function.strict
            else "correct them"
        )
        return Problem(
            400,
            f"the parameters of tool {function.name!r} cannot be enforced ({error.reason}): {way_out}",
            "tools",
            "invalid_value",
        )

    def calls(self, text: str) -> tuple[list[Call], str]:
        """The calls of known functions at the beginning of a text, and the rest of the text."""
        names, key = {function.name for function in self.functions}, self.format.ARGUMENTS
        found, rest = list[Call](), text
        for one, after in self.format.written(text):
            if not isinstance(one, dict) or one.get("name") not in names or not isinstance(one.get(key), dict):
                break
            try:
                arguments = json.dumps(one[key], ensure_ascii=False, allow_nan=False)
            except ValueError:  # a number that became infinite
                break
            # UTF-8 cannot encode lone surrogates, so they are sent as escapes.
            arguments = re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", arguments)
            found.append(Call(one["name"], arguments))
            rest = after
        return found, rest if rest.strip() else ""


class Splitter:
    """Separates calls from other text while it is generated."""

    def __init__(self, tools: Tools) -> None:
        self._tools, self._held, self._said = tools, "", False

    def push(self, text: str) -> str:
        """Adds text. Returns the text that cannot be part of a call."""
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

    def end(self, cut: bool) -> tuple[str, list[Call]]:
        """The remaining text, and the calls. cut: whether the text ended at a limit; text after complete calls is then
        an incomplete call and dropped."""
        calls, rest = self._tools.calls(self._held)
        return "" if calls and cut else rest, calls
