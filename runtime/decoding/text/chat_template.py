"""Renders a conversation with the target's chat template, like transformers' ``apply_chat_template``.

Templates are programs from a checkpoint, so they run in Jinja's sandbox. Their environment (filters, functions, the
``generation`` tag, the form of messages) is that of transformers 5.23, ``utils/chat_template_utils.py``.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from ...errors import DamageError, GumihoError, InputError
from .special_tokens import MARKS
from .template_files import special_tokens, templates
from .template_sandbox import Sandbox

# Converts an instance of a subclass to the plain type, even if the subclass overrides the conversion.
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)
# But for the marks, which stand for characters of special tokens.
_NOT_ASCII = re.compile(f"[^\0-~{chr(MARKS[0])}-{chr(MARKS[-1])}]+")
_PROBE, _NO_KEY = "a probe", "no key of parts"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template, and the one for conversations with tools if that is another one. Safe to use from any
    thread."""

    def __init__(
        self, text: str, variables: Mapping[str, str], source: str, with_tools: "ChatTemplate | None" = None
    ) -> None:
        """text: the template; variables: more variables that it can use; source: its file, for messages.

        Raises DamageError if the template does not parse.
        """
        self.text, self._variables, self._source = text, dict(variables), source
        self.with_tools = with_tools or self
        try:
            self._template = _environment().compiled(text)
        except TemplateSyntaxError as error:
            raise DamageError(
                f"{self._name()} does not parse (line {error.lineno}: {error.message}): correct it"
            ) from None
        except Exception as error:  # Jinja accepts some templates whose generated code Python's compiler refuses
            raise DamageError(f"{self._name()} does not parse ({_described(error)}): correct it") from None

    @staticmethod
    def of(folder: Path, named: Mapping[str, str] | None = None) -> "ChatTemplate | None":
        """The template of a bundle or a target, as transformers chooses it; None without any. named: special tokens by
        name, by default those that its files name. Raises DamageError for damaged files and a template that does not
        parse, and InputError for templates that are no texts."""
        found = templates(folder)
        if not found:
            return None
        variables = special_tokens(folder) if named is None else named
        with_tools = (
            ChatTemplate(found["tool_use"][0], variables, found["tool_use"][1]) if "tool_use" in found else None
        )
        if "default" in found:
            return ChatTemplate(*found["default"][:1], variables, found["default"][1], with_tools)
        only = f"there are only templates named {', '.join(sorted(found))}: write the one to use to chat_template.jinja"
        return ChatTemplate(
            f"{{{{ raise_exception({json.dumps(only)}) }}}}", variables, next(iter(found.values()))[1], with_tools
        )

    @property
    def all_text(self) -> str:
        """Of both templates."""
        return self.text if self.with_tools is self else f"{self.text}\0{self.with_tools.text}"

    @cached_property
    def takes_parts(self) -> bool:
        """Whether a message's content can be a list of parts, ``{"type": "text", "text": ...}``."""

        messages = [{"role": "user", "content": [{"type": "text", "text": _PROBE, _NO_KEY: ""}]}]
        with suppress(GumihoError):
            shown = self.render(messages, add_generation_prompt=False)
            return _PROBE in shown and _NO_KEY not in shown  # which is in lists that are written as they are
        return False

    def joined(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages with parts of text joined by newlines, as llama.cpp's server and vLLM do, unless the template
        takes them as they are."""
        parts = [
            isinstance(message, Mapping)
            and isinstance(content := message.get("content"), list)
            and all(map(_is_text, content))
            for message in messages
        ]
        if not any(parts) or self.takes_parts:
            return messages
        return [
            {**message, "content": "\n".join(part["text"] for part in message["content"])} if joins else message
            for message, joins in zip(messages, parts, strict=True)
        ]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        written: Callable[[str, bool], str] | None = None,
    ) -> str:
        """The conversation as text that includes special tokens: encode it with ``add_special_tokens=False``.

        messages: each with a ``role``, a ``content`` and other keys that the template reads, in JSON's types.
        add_generation_prompt: whether to add the beginning of the assistant's next message, if the template supports
        it. tools: JSON schemas of functions, for templates that know tools. variables: others that the template knows,
        such as Qwen3's ``enable_thinking``, in JSON's types. written: gives the text that stands for one of the
        caller's, and is told whether an assistant's message holds it.

        Raises InputError if there is no message, if one is not a mapping of JSON's types, for a variable that is not of
        these types or has a name of its own here, and if the template refuses the conversation (with its own message)
        or fails on it.
        """
        if tools is not None and self.with_tools is not self:
            return self.with_tools.render(messages, add_generation_prompt, tools, variables, written)
        by_user, by_assistant = (
            (lambda text, own=own: written(text, own)) if written else None for own in (False, True)
        )
        prepared = [
            _prepared(message, index, by_assistant if _role(message) == "assistant" else by_user)
            for index, message in enumerate(messages)
        ]
        if not prepared:
            raise InputError("the conversation is empty: give at least one message")
        listed = None if tools is None else [_plain(tool, f"tool {index}", by_user) for index, tool in enumerate(tools)]
        more = {
            str(name): _plain(value, f"the template's variable {name!r}", by_user)
            for name, value in (variables or {}).items()
        }
        conversation = {
            "messages": prepared,
            "tools": listed,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if taken := more.keys() & conversation.keys():
            raise InputError(f"{min(taken)} cannot be a variable of the chat template: it is set by the conversation")
        try:
            return Sandbox.render(self._template, self._variables | more | conversation)
        except GumihoError:
            raise
        except Exception as error:  # a template is a program that can raise any exception
            raise InputError(
                f"the chat template in {Path(self._source).name} fails on this conversation ({_described(error)}): "
                "change the messages, or give the prompt as text or token ids"
            ) from None

    def _name(self) -> str:
        return f"the chat template in {self._source}"


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _prepared(message: Any, index: int, written: Callable[[str], str] | None) -> dict[str, Any]:
    """A message as templates expect it: without values of None, and with the assistant's reasoning under each of its
    names."""
    if not isinstance(message, Mapping):
        raise InputError(f"message {index} is {_type_name(message)}: give a mapping with a role and a content")
    place = f"message {index}"
    plain = {
        key: _plain(value, place, None if key == "role" else written)
        for key, value in message.items()
        if value is not None
    }
    reasoning = next((plain[name] for name in _REASONING if plain.get(name) is not None), None)
    return plain if reasoning is None else {"thinking": reasoning} | plain | {"reasoning_content": reasoning}


def _plain(value: Any, holder: str, written: Callable[[str], str] | None = None) -> Any:
    """A copy in JSON's types, since methods of other objects are outside the sandbox's control. holder: of the value,
    for messages. written: what stands for its strings."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, holder, written): _plain(entry, holder, written) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(_plain(entry, holder, written) for entry in value)
    for kind, convert in _SCALARS:
        if isinstance(value, kind):
            return written(convert(value)) if written and kind is str else convert(value)
    raise InputError(f"{holder} holds {_type_name(value)}: give text, numbers, lists and mappings")


def _type_name(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


# --- a template's environment -----------------------------------------------------------------------------------------


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks the assistant's text for training. It renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not just its content, so that variables set in it are local to it.
        return nodes.CallBlock(self.call_method("_rendered"), [], [], content).set_lineno(line)

    @staticmethod
    def _rendered(caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict``'s constructors, without the type's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, some of which have a meaning for Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a template may not set the attribute {name!r} of a namespace")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    namespace = _Namespace()
    for name, value in dict(*args, **kwargs).items():
        namespace[name] = value
    return namespace


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    text = json.dumps(x, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _raise_exception(message: object) -> None:
    raise InputError(f"the target's chat template refuses this conversation: {message}")


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "dict": _Dict(),
        "namespace": _namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.guard()
    return environment
