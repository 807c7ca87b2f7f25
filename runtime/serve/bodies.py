"""Bodies of requests: the parameters of the API, and a few of our own (``Extensions``).

Known parameters that cannot change the text are ignored. Others that are not supported are refused, unless their value
has no effect (null, or the API's default).
"""

from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, field_validator

from ..decoding.grammar import Grammar, GrammarError
from ..decoding.settings import Settings
from ..errors import InputError
from .messages import Message
from .problems import Problem
from .tools import Choice, Tool, Tools

_MOST_STOPS = 16
_BIAS_BANS = -100.0  # the API's bias that excludes a token; 100 forces one
_COMPACT = {"whitespace_flexible": False}  # otherwise small models can write blanks forever
_OBJECTS = ("dict_type", "model_type", "model_attributes_type")  # pydantic's errors whose messages mention Python types
_B = TypeVar("_B", bound="Body")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


def _first_odd(given: Any) -> Any:
    """The first invalid item of a long list or mapping. pydantic would validate and list all of them before refusing
    any."""
    if isinstance(given, list):
        return next(([one] for one in given if not isinstance(one, str)), given)
    entries = given.items() if isinstance(given, dict) else ()
    return next(
        ({name: one} for name, one in entries if type(one) not in (int, float) or not -100 <= one <= 100), given
    )


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding that hides lengths from eavesdroppers; never added here


class JsonSchema(_Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(_Strict):
    """The parameters of both endpoints. ``of`` parses a body."""

    # Name -> values without effect.
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # None of these changes the text: identity, storing, caching, priority, and Open WebUI's own fields.
    IGNORED: ClassVar[Set[str]] = {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "background_tasks",
        "chat_id",
        "features",
        "filter_ids",
        "folder_id",
        "id",
        "model_item",
        "parent_id",
        "parent_message",
        "session_id",
        "skill_ids",
        "terminal_id",
        "tool_ids",
        "tool_servers",
        "user_message",
        "variables",
    }

    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1)
    stop: Annotated[str | list[str], BeforeValidator(_first_odd)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_first_odd)] = Field(
        default_factory=dict
    )

    # Extensions, named as in llama.cpp's server and vLLM. Ours are ``sources``, the part that drafted each token, and
    # ``drafter``, the one to draft with if the bundle has several.
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    grammar: str | None = None
    regex: str | None = None
    sources: bool = False
    drafter: str | None = None

    @classmethod
    def of(cls: type[_B], raw: Any) -> _B:
        """Parses a body. Raises Problem for anything that is invalid or not supported."""
        if not isinstance(raw, dict):
            raise Problem(400, "the body is no JSON object: send {...}")
        given = {name: value for name, value in raw.items() if value is not None and name not in cls.IGNORED}
        for name, neutral in cls.UNSUPPORTED.items():
            if name in given and given.pop(name) not in neutral:
                raise Problem(400, f"{name} is not supported: leave it out", name, "unsupported_parameter")
        given = {name: value for name, value in given.items() if name in cls.model_fields or value not in ([], {})}
        if unknown := next((name for name in given if name not in cls.model_fields), None):
            raise Problem(400, f"there is no parameter {unknown}: leave it out", unknown, "unknown_parameter")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _problem(error, given) from None

    @field_validator("stop")
    @classmethod
    def _few(cls, stop: str | list[str]) -> str | list[str]:
        if isinstance(stop, list) and len(stop) > _MOST_STOPS:
            raise ValueError(f"at most {_MOST_STOPS} strings")
        if "" in ([stop] if isinstance(stop, str) else stop):
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
        """The problem for an error in ``guide``, with the parameter at fault."""
        name = "grammar" if self.grammar is not None else "regex"
        where = f"line {error.line}: " if error.line and name == "grammar" else ""
        return Problem(400, f"the {name} is wrong ({where}{error.reason}): correct it", name, "invalid_value")

    def settings(self, most: int, seconds: float, guide: Grammar | None, choice: int = 0) -> Settings:
        """most: new tokens. seconds: limit of the generation. choice: index among the ``n`` choices, which have
        different seeds."""
        seed = None if self.seed is None else (self.seed + choice) % (1 << 64)
        biases = {_token(name): float("-inf") if bias <= _BIAS_BANS else bias for name, bias in self.logit_bias.items()}
        return Settings(
            most,
            max_seconds=seconds,
            stop=self.stop,
            logit_bias=biases,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed,
            grammar=guide,
            trace=self.sources,
            logprobs=self.alternatives,
            drafter=self.drafter,
        )

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens to list with each token; None for no log-probabilities."""
        raise NotImplementedError


class ChatBody(Body):
    """POST /v1/chat/completions."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "files": ([],),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "params": ({},),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], FailFast()]
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], FailFast()] = Field(default_factory=list)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # an extension, named as in vLLM
    special_tokens: bool = False  # an extension: whether special tokens in messages keep their meaning

    @property
    def alternatives(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise Problem(400, "top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """The most new tokens that the request allows, None for no limit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    @field_validator("messages")
    @classmethod
    def _some(cls, messages: list[Message]) -> list[Message]:
        if messages:
            return messages
        raise ValueError("send one message at least")

    @property
    def written(self) -> int:
        """The number of characters of all messages' contents, plus one per message."""
        return sum(message.characters + 1 for message in self.messages)

    def conversation(self, template: str) -> list[dict[str, Any]]:
        """The messages in the format of chat templates. Raises Problem."""
        return [message.plain(f"messages.{i}", template) for i, message in enumerate(self.messages)]

    def offered(self, template: str | None) -> Tools | None:
        """The tools that the text may call, if any. Raises Problem. template: the model's chat template."""
        found = Tools.of(self.tools, self.tool_choice, self.parallel_tool_calls, template)
        if found and self.guide():
            raise Problem(400, "tools exclude response_format, grammar and regex: leave one of them out", "tools")
        return found

    def guide(self) -> Grammar | None:
        own, asked = super().guide(), self.response_format
        if asked is not None and asked.json_schema is not None and asked.type != "json_schema":
            raise Problem(
                400,
                f"response_format is of type {asked.type} and has a json_schema: give one of the two",
                "response_format",
            )
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

    prompt: Any  # text or token ids, or a list of either; for a union pydantic would list every wrong element
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)

    @field_validator("prompt")
    @classmethod
    def _texts(cls, prompt: Any) -> Any:
        texts = isinstance(prompt, list) and (all(isinstance(one, str) for one in prompt) or all(map(_are_ids, prompt)))
        if isinstance(prompt, str) or texts or _are_ids(prompt):
            return prompt
        raise ValueError("send text or token ids, or a list of texts or of lists of token ids")

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
        return list(given)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise InputError(f"logit_bias names token {name[:40]!r}: give token ids")
    return int(name)


def _problem(error: ValidationError, given: Mapping[str, Any]) -> Problem:
    first = error.errors(include_url=False, include_input=False)[0]
    # Keep only the part of the location that is in the body: pydantic's also names the alternatives it tried.
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
