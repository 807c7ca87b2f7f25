"""Renders a conversation with the target's own chat template: the text that transformers' ``apply_chat_template`` renders.

Templates are programs that came with a checkpoint, so they run in Jinja's sandbox. What they find there (filters, functions,
the ``generation`` tag, how messages are prepared) is that of transformers 5.23, ``utils/chat_template_utils.py``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from ..errors import GumihoError
from .template_sandbox import Sandbox

_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
# By what makes the bare value of a subclass's, whatever that does to its own str().
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = ((str, str.__str__), (int, int.__int__), (float, float.__float__))
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template. Safe to use from any thread."""

    def __init__(self, text: str, variables: Mapping[str, str], source: str) -> None:
        """text: the template; variables: what it may name besides the conversation; source: where it is from, for messages.

        Raises GumihoError where the template does not parse.
        """
        self._variables, self._source = dict(variables), source
        try:
            self._template = _environment().compiled(text)
        except TemplateSyntaxError as error:
            raise GumihoError(f"{self._said()} does not parse (line {error.lineno}: {error.message}): correct it") from None
        except Exception as error:  # what Jinja let pass, Python's compiler may refuse
            raise GumihoError(f"{self._said()} does not parse ({_what(error)}): correct it") from None

    @staticmethod
    def of(folder: Path) -> "ChatTemplate | None":
        """The template of a bundle: ``chat_template.jinja``, else the one in ``tokenizer_config.json``; None without either.

        Raises GumihoError for damaged files, several templates without a default, and one that does not parse.
        """
        file, config = folder / "chat_template.jinja", _read_json(folder / _CONFIG)
        if file.is_file():
            return ChatTemplate(_read(file), _special_tokens(folder, config), str(file))
        file, found = folder / _CONFIG, config.get("chat_template")
        if isinstance(found, list):
            found = _default(found, file)
        if found is None:
            return None
        if not isinstance(found, str):
            raise GumihoError(f"{file} is damaged (its chat_template is no text): copy the bundle again")
        return ChatTemplate(found, _special_tokens(folder, config), str(file))

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as text, special tokens spelled out: encode it with ``add_special_tokens=False``.

        messages: each with a ``role`` and a ``content``, and what else the template reads, in JSON's types.
        add_generation_prompt: whether to end where the assistant's next message begins, if the template can. Raises
        GumihoError where there is no message, where one is no mapping or holds another type, and where the template refuses
        the conversation (with its own words) or fails on it.
        """
        said = [_prepared(message, at) for at, message in enumerate(messages)]
        if not said:
            raise GumihoError("the conversation is empty: give at least one message")
        given = {"messages": said, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return Sandbox.render(self._template, self._variables | given)
        except GumihoError:
            raise
        except Exception as error:  # a template is a program: it may raise whatever Python can
            raise GumihoError(
                f"{self._said()} fails on this conversation ({_what(error)}): "
                "change the messages, or give the prompt as text or token ids"
            ) from None

    def _said(self) -> str:
        return f"the chat template in {self._source}"


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GumihoError(f"{file} cannot be read ({error}): copy the bundle again") from None


def _read_json(file: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise GumihoError(f"{file} is damaged ({error}): copy the bundle again") from None
    if not isinstance(content, dict):
        raise GumihoError(f"{file} is damaged (it holds no JSON object): copy the bundle again")
    return content


def _default(templates: list[Any], file: Path) -> Any:
    try:
        named = {entry["name"]: entry["template"] for entry in templates}
    except (KeyError, TypeError):
        raise GumihoError(
            f"{file} is damaged (its chat_template is a list of other things than names and templates): copy the bundle again"
        ) from None
    if "default" not in named:
        raise GumihoError(
            f"{file} has the chat templates {', '.join(map(str, named)) or '(none)'} and none of them is the default: "
            "put the one to use into chat_template.jinja"
        )
    return named["default"]


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Variables like ``bos_token``. The map, which the exporter writes, knows what transformers adds to the configuration."""
    named = {name: value for name, value in config.items() if name.endswith("_token")} | _read_json(folder / _SPECIAL)
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _prepared(message: Any, at: int) -> dict[str, Any]:
    """A message as templates expect it: what is None left out, and what the assistant thought under each of its names."""
    if not isinstance(message, Mapping):
        raise GumihoError(f"message {at} is {_kind(message)}: give a mapping with a role and a content")
    plain: dict[str, Any] = _plain({key: value for key, value in message.items() if value is not None}, at)
    thought = next((plain[name] for name in _THOUGHTS if plain.get(name) is not None), None)
    return plain if thought is None else {"thinking": thought} | plain | {"reasoning_content": thought}


def _plain(value: Any, at: int) -> Any:
    """A copy in JSON's types, since the sandbox does not know what the methods of other objects can do."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, at): _plain(inner, at) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(_plain(inner, at) for inner in value)
    for kind, bare in _SCALARS:
        if isinstance(value, kind):
            return bare(value)
    raise GumihoError(f"message {at} holds {_kind(value)}: give text, numbers, lists and mappings")


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


# --- what a template finds --------------------------------------------------------------------------------------------


class _Generation(Extension):
    """``{% generation %}``, with which templates mark the assistant's words for training. It shows what stands within."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        within = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As a call with a body, and not the body alone, so that variables set within end with it.
        return nodes.CallBlock(self.call_method("_shown"), [], [], within).set_lineno(line)

    @staticmethod
    def _shown(caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` without what else the type can do."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's, without the names that Python itself looks up."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a template may not set the attribute {name!r} of a namespace")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    made = _Namespace()
    for name, value in dict(*args, **kwargs).items():
        made[name] = value
    return made


def _tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own escapes what HTML reads as markup."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _raise_exception(message: object) -> None:
    raise GumihoError(f"the target's chat template refuses this conversation: {message}")


def _environment() -> Sandbox:
    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals |= {
        "dict": _Dict(),
        "namespace": _namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    made.guard()
    return made
