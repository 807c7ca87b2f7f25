"""Responses in the API's format, complete or as chunks of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol
from uuid import uuid4

from ..decoding.logprobs import TokenLogprobs
from .spelling import Spelling
from .tools import Call, Splitter, Tools

_LOWEST = -9999.0  # the API's logprob of a probability of 0, since JSON has no infinity
_FINISH = {"stop": "stop", "length": "length", "context": "length", "time": "length", "cancelled": "stop"}


@dataclass
class Part:
    """New text of a choice. finish_reason: the runtime's, None before the last part. sources: for each token its text
    and the part that drafted it, if requested."""

    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    sources: list[tuple[str, str]] | None = None
    finish_reason: str | None = None


@dataclass
class Usage:
    """The numbers of tokens of a request."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Answer(Protocol):
    """The answer to one request."""

    def whole(self, choices: Sequence[Sequence[Part]], usage: Usage) -> dict[str, Any]:
        """The complete response. choices: the parts of each choice."""

    def openings(self, choice: int) -> list[dict[str, Any]]:
        """The chunks before a choice's first part."""

    def chunks(self, choice: int, part: Part) -> list[dict[str, Any]]:
        """The chunks of one part."""

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, if usage was requested."""


@dataclass
class _Headed:
    """model: its name. listed: whether log-probabilities were requested. counted: whether chunks have a field for
    usage."""

    model: str
    spelling: Spelling
    listed: bool = False
    counted: bool = False
    created: int = field(default_factory=lambda: int(time()))
    prefix = ""
    kinds = ("", "")

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid4().hex}"

    def _head(self, chunk: bool) -> dict[str, Any]:
        return {"id": self.id, "object": self.kinds[chunk], "created": self.created, "model": self.model}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(chunk=True), "choices": [choice], **({"usage": None} if self.counted else {})}

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**self._head(chunk=True), "choices": [], "usage": usage.body()}


@dataclass
class ChatAnswer(_Headed):
    """Responses of /v1/chat/completions. tools: those that may be called."""

    tools: Tools | None = None
    prefix, kinds = "chatcmpl", ("chat.completion", "chat.completion.chunk")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._splitters: dict[int, Splitter] = {}

    def whole(self, choices: Sequence[Sequence[Part]], usage: Usage) -> dict[str, Any]:
        return {
            **self._head(chunk=False),
            "choices": [self._choice(*one) for one in enumerate(choices)],
            "usage": usage.body(),
        }

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        reason = _FINISH[parts[-1].finish_reason or "stop"]
        calls = list[Call]()
        if self.tools:
            splitter = Splitter(self.tools)
            free = splitter.push(text)
            rest, calls = splitter.end(cut=reason == "length")
            text = free + rest
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [call.body() for call in calls]}
        listed = [one for part in parts for one in part.logprobs]
        return {
            "index": index,
            "message": message,
            "logprobs": self._listed(listed),
            "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
            **_sources(parts),
        }

    def openings(self, choice: int) -> list[dict[str, Any]]:
        return [self._delta(choice, {"role": "assistant", "content": ""})]

    def chunks(self, choice: int, part: Part) -> list[dict[str, Any]]:
        found, text, calls = [], part.text, list[Call]()
        if self.tools:
            splitter = self._splitters.setdefault(choice, Splitter(self.tools))
            text = splitter.push(text)
            if part.finish_reason:
                rest, calls = splitter.end(cut=_FINISH[part.finish_reason] == "length")
                text += rest
        if text or part.logprobs or part.sources:
            found.append(self._delta(choice, {"content": text}, self._listed(part.logprobs), **_sources([part])))
        for index, call in enumerate(calls):
            found.append(self._delta(choice, {"tool_calls": [{"index": index, **call.body()}]}))
        if part.finish_reason:
            reason = _FINISH[part.finish_reason]
            found.append(self._delta(choice, {}, finish_reason="tool_calls" if calls and reason == "stop" else reason))
        return found

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: Any = None, **more: Any
    ) -> dict[str, Any]:
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **more}
        )

    def _listed(self, listed: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.listed:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text, spelled = self.spelling(token)
            return {"token": text, "bytes": spelled, "logprob": max(logprob, _LOWEST)}

        content = [
            {**entry(one.token, one.logprob), "top_logprobs": [entry(*likely) for likely in one.top]} for one in listed
        ]
        return {"content": content, "refusal": None}


class TextAnswer(_Headed):
    """Responses of /v1/completions."""

    prefix, kinds = "cmpl", ("text_completion", "text_completion")
    offsets: dict[int, int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.offsets = {}  # by choice: characters of its tokens so far

    def whole(self, choices: Sequence[Sequence[Part]], usage: Usage) -> dict[str, Any]:
        found = [
            self._choice(
                index,
                "".join(part.text for part in parts),
                [one for part in parts for one in part.logprobs],
                parts[-1].finish_reason or "stop",
            )
            | _sources(parts)
            for index, parts in enumerate(choices)
        ]
        return {**self._head(chunk=False), "choices": found, "usage": usage.body()}

    def openings(self, choice: int) -> list[dict[str, Any]]:
        return []

    def chunks(self, choice: int, part: Part) -> list[dict[str, Any]]:
        return [self._chunk(self._choice(choice, part.text, part.logprobs, part.finish_reason) | _sources([part]))]

    def _choice(self, index: int, text: str, listed: Sequence[TokenLogprobs], finish: str | None) -> dict[str, Any]:
        reason = _FINISH[finish] if finish else None
        return {"index": index, "text": text, "logprobs": self._listed(index, listed), "finish_reason": reason}

    def _listed(self, index: int, listed: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.listed:
            return None
        tokens, offsets, at = [], [], self.offsets.get(index, 0)
        for one in listed:
            tokens.append(self.spelling(one.token)[0])
            offsets.append(at)
            at += len(tokens[-1])
        self.offsets[index] = at
        likely = [
            {self.spelling(token)[0]: max(logprob, _LOWEST) for token, logprob in reversed(one.top)} for one in listed
        ]
        logprobs = [max(one.logprob, _LOWEST) for one in listed]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likely, "text_offset": offsets}


def _sources(parts: Sequence[Part]) -> dict[str, Any]:
    listed = [source for part in parts for source in part.sources or ()]
    return {"sources": listed} if any(part.sources is not None for part in parts) else {}
