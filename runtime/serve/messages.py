"""Messages of a conversation, in the API's format and in that of chat templates."""

import json
import re
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from .problems import Problem

# Metadata that clients attach to messages and parts or send back from earlier responses; none of it is text.
NOTES = {"annotations", "cache_control", "id", "index", "parsed", "prompt_cache_breakpoint", "provider_specific_fields"}


class Message(BaseModel):
    """A message. Other keys are passed to the chat template if it mentions them."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    # The assistant's reasoning. Servers have different names for it; templates get it under each of them.
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None

    @property
    def characters(self) -> int:
        """The number of characters of its content."""
        parts = [self.content] if isinstance(self.content, str) else [part.get("text") for part in self.content or ()]
        return sum(len(part) for part in parts if isinstance(part, str))

    def plain(self, place: str, template: str) -> dict[str, Any]:
        """The message in the format of chat templates. Raises Problem for content that is not text, and for keys
        without effect. place: the message's place in the body, such as ``messages.0``; template: the chat template's
        text."""
        for name, value in (self.model_extra or {}).items():
            if value not in (None, []) and name not in NOTES and not re.search(rf"\b{re.escape(name)}\b", template):
                raise Problem(
                    400, f"{place}.{name} is not supported: leave it out", "messages", "unsupported_parameter"
                )
        if self.tool_calls and "tool_calls" not in template:
            raise Problem(
                400,
                f"{place}.tool_calls: this model's chat template has no calls of tools: leave it out",
                "messages",
                "unsupported_parameter",
            )
        message = self.model_dump(exclude_none=True, exclude=NOTES | {"refusal"})
        message["role"] = "system" if self.role == "developer" else self.role
        given = (self.refusal or "") if self.content is None else self.content
        message["content"] = (
            given if isinstance(given, str) else [{"type": "text", "text": _text(part, place)} for part in given]
        )
        for call in self.tool_calls or ():
            _with_arguments(call)
        return message | ({"tool_calls": self.tool_calls} if self.tool_calls else {})


def _text(part: dict[str, Any], place: str) -> str:
    kind = part.get("type")
    text = part.get(kind, "") if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise Problem(400, f"content of type {kind or 'text'!r} is not supported: send text", "messages")
    if odd := next(
        (name for name, value in part.items() if name not in {"type", kind, *NOTES} and value not in (None, [])), None
    ):
        raise Problem(400, f"{place}.content.{odd} is not supported: leave it out", "messages", "unsupported_parameter")
    return text


def _with_arguments(call: dict[str, Any]) -> None:
    """Parses a call's arguments in place. The API sends them as JSON text, which may be empty; templates expect
    objects."""
    if isinstance(function := call.get("function"), dict):
        given = function.get("arguments")
        if given is None or (isinstance(given, str) and not given.strip()):
            given = {}
        if isinstance(given, str):
            with suppress(ValueError, RecursionError):
                given = {} if (parsed := json.loads(given)) is None else parsed
        function["arguments"] = given
