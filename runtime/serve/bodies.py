"""Bodies of requests: the parameters of the API, and a few of our own (``Extensions``).

What cannot change the text is ignored, by name; everything else that is not supported is refused. Parameters that ask for nothing (null, or the
API's default) pass.
"""

import json
from collections.abc import Mapping, Set
from contextlib import suppress
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..decoding.grammar import Grammar, GrammarError
from ..decoding.settings import Settings
from ..errors import InputError
from .messages import Message
from .problems import Problem
from .tools import Choice, Tool, Tools

_MOST_STOPS = 16
_BIAS_BANS = -100.0  # the API's bias that excludes a token, and at 100 the one that forces it
_COMPACT = {"whitespace_flexible": False}  # small models otherwise write blanks without end
_OBJECTS = ("dict_type", "model_type", "model_attributes_type")  # pydantic's names of errors whose messages name Python's types
_B = TypeVar("_B", bound="Body")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers who see lengths; never added here


class JsonSchema(_Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(_Strict):
    """What both endpoints take. ``of`` parses one."""

    # Name -> the values that ask for nothing.
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # Who asks, what shall be kept or cached, how soon an answer is wanted, and what Open WebUI keeps for itself: nothing that changes the text.
    IGNORED: ClassVar[Set[str]] = {
        "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "store", "user",
        "background_tasks", "chat_id", "features", "filter_ids", "id", "model_item", "parent_id", "parent_message", "session_id", "tool_ids",
        "tool_servers", "variables",
    }  # fmt: skip

    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1)
    stop: str | list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)

    # Extensions: names that llama.cpp's server and vLLM have for the same, ``sources``: what drafted each token,
    # and ``drafter``: the one to draft with, if the bundle has several.
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    grammar: str | None = None
    regex: str | None = None
    sources: bool = False
    drafter: str | None = None

    @classmethod
    def of(cls: type[_B], raw: Any) -> _B:
        """Raises Problem for what is not valid, or not supported."""
        if not isinstance(raw, dict):
            raise Problem(400, "the body is no JSON object: send {...}")
        given = {name: value for name, value in raw.items() if value is not None and name not in cls.IGNORED}
        for name, neutral in cls.UNSUPPORTED.items():
            if name in given and given.pop(name) not in neutral:
                raise Problem(400, f"{name} is not supported: leave it out", name, "unsupported_parameter")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _problem(error, given) from None

    @field_validator("stop")
    @classmethod
    def _few(cls, stop: str | list[str]) -> str | list[str]:
        if isinstance(stop, list) and len(stop) > _MOST_STOPS:
            raise ValueError(f"at most {_MOST_STOPS} strings")
        if "" in stop or stop == "":
            raise ValueError("an empty string would stop every text: leave it out")
        return stop

    @property
    def streams_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def guide(self) -> Grammar | None:
        """The grammar that the text must match, if any. Raises Problem if several are given."""
        if self.grammar is not None and self.regex is not None:
            raise Problem(400, "grammar and regex exclude each other: leave one of them out", "regex")
        if self.grammar is not None:
            return Grammar.lark(self.grammar)
        return None if self.regex is None else Grammar.regex(self.regex)

    def refused(self, error: GrammarError) -> Problem:
        """The library's refusal of ``guide``, by the parameter that it is about."""
        name = "grammar" if self.grammar is not None else "regex"
        where = f"line {error.line}: " if error.line and name == "grammar" else ""
        return Problem(400, f"the {name} is wrong ({where}{error.reason}): correct it", name, "invalid_value")

    def settings(self, most: int, seconds: float, guide: Grammar | None, choice: int = 0) -> Settings:
        """most: new tokens. seconds: of the generation. choice: the index among ``n``, each with a seed of its own."""
        seed = None if self.seed is None else (self.seed + choice) % (1 << 64)
        biases = {_token(name): float("-inf") if bias <= _BIAS_BANS else bias for name, bias in self.logit_bias.items()}
        return Settings(
            most, max_seconds=seconds, stop=self.stop, logit_bias=biases, repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty, temperature=self.temperature,
            top_k=max(0, self.top_k), top_p=self.top_p, min_p=self.min_p, seed=seed, grammar=guide, trace=self.sources,
            logprobs=self.alternatives, drafter=self.drafter,
        )  # fmt: skip

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens to list with each token; None for no log-probabilities."""
        raise NotImplementedError


class ChatBody(Body):
    """POST /v1/chat/completions."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (), "files": ([],), "function_call": ("none", "auto"), "functions": ([],), "modalities": (["text"],), "moderation": (),
        "params": ({},), "verbosity": ("medium",), "web_search_options": (),
    }  # fmt: skip

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # an extension, named as in vLLM
    special_tokens: bool = False  # an extension: whether those that messages spell out keep their meaning

    @property
    def alternatives(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise Problem(400, "top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """New tokens that the request allows."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def variables(self) -> dict[str, Any]:
        """Of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    def conversation(self, template: str) -> list[dict[str, Any]]:
        """The messages as the chat template takes them. Raises Problem."""
        return [message.plain(f"messages.{i}", template) for i, message in enumerate(self.messages)]

    def offered(self, template: str | None) -> Tools | None:
        """The tools that the text may call, if any. Raises Problem. template: the model's chat template."""
        found = Tools.of(self.tools, self.tool_choice, self.parallel_tool_calls, template)
        if found and self.guide():
            raise Problem(400, "tools exclude response_format, grammar and regex: leave one of them out", "tools")
        return found

    def guide(self) -> Grammar | None:
        own, asked = super().guide(), self.response_format
        if asked is None or asked.type == "text":
            return own
        if own is not None:
            raise Problem(400, "response_format excludes grammar and regex: leave one of them out", "response_format")
        if asked.type == "json_object":
            return Grammar.json({"type": "object", "x-guidance": _COMPACT})
        if asked.json_schema is None:
            raise Problem(400, "response_format has no json_schema", "response_format")
        return Grammar.json({"x-guidance": _COMPACT, **asked.json_schema.schema_})

    def refused(self, error: GrammarError) -> Problem:
        if self.response_format is None or self.response_format.json_schema is None:
            return super().refused(error)
        return Problem(
            400,
            f"the schema of response_format cannot be enforced ({error.reason}): change it",
            "response_format",
            "invalid_value",
        )


class CompletionBody(Body):
    """POST /v1/completions."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """Text or token ids, one or several."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)  # type: ignore[arg-type]


def decoded(content: bytes) -> Any:
    """JSON, in UTF-8. Raises Problem."""

    def constant(name: str) -> float:
        raise ValueError(f"{name} is no number of JSON")

    try:
        found = json.loads(content.decode("utf-8"), parse_constant=constant, parse_float=_finite)
        if b"\\ud" in content.lower():  # the escape of half a character
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:
        raise Problem(400, "the body is not valid Unicode: send text without lone surrogates") from None
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}, column {error.colno}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise Problem(400, f"the body is not JSON ({reason}): send a JSON object in UTF-8")


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text} is too large")
    return value


def _token(name: str) -> int:
    try:
        return int(name)
    except ValueError:
        raise InputError(f"logit_bias names token {name!r}: give token ids") from None


def _problem(error: ValidationError, given: Mapping[str, Any]) -> Problem:
    first = error.errors(include_url=False, include_input=False)[0]
    # Of the place, what is in the body: the library also names the alternatives that it tried.
    place, value = list[str](), cast(Any, given)
    for part in first["loc"]:
        with suppress(LookupError, TypeError):
            value = value[part]
            place.append(str(part))
    name = place[0] if place else None
    if first["type"] == "extra_forbidden":
        return Problem(400, f"there is no parameter {'.'.join(place)}: leave it out", name, "unknown_parameter")
    if first["type"] == "missing":
        place.append(str(first["loc"][-1]))
        return Problem(400, f"{'.'.join(place)} is missing: it is required", place[0], "missing_required_parameter")
    says = "Input should be an object" if first["type"] in _OBJECTS else first["msg"].removeprefix("Value error, ")
    return Problem(400, f"{'.'.join(place)}: {says}", name, "invalid_value")
