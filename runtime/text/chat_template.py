"""Renders a conversation with the target's chat template, like transformers' ``apply_chat_template``.

Templates are programs from a checkpoint, so they run in Jinja's sandbox. Their environment (filters, functions, the
``generation`` tag, the form of messages) is that of transformers 5.23, ``utils/chat_template_utils.py``.
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

from ..errors import DamageError, GumihoError, InputError
from .template_sandbox import Sandbox

_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
# Converts an instance of a subclass to the plain type, even if the subclass overrides the conversion.
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = ((str, str.__str__), (int, int.__int__), (float, float.__float__))
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template. Safe to use from any thread."""

    def __init__(self, text: str, variables: Mapping[str, str], source: str) -> None:
        """text: the template; variables: more variables that it can use; source: its file, for messages.

        Raises DamageError if the template does not parse.
        """
        self.text, self._variables, self._source = text, dict(variables), source
        try:
            self._template = _environment().compiled(text)
        except TemplateSyntaxError as error:
            raise DamageError(f"{self._name()} does not parse (line {error.lineno}: {error.message}): correct it") from None
        except Exception as error:  # Jinja accepts some templates whose generated code Python's compiler refuses
            raise DamageError(f"{self._name()} does not parse ({_described(error)}): correct it") from None

    @staticmethod
    def of(folder: Path) -> "ChatTemplate | None":
        """The template of a bundle: ``chat_template.jinja``, else the one in ``tokenizer_config.json``; None without either.

        Raises DamageError for damaged files, for several templates without a default, and for a template that does not parse.
        """
        file, config = folder / "chat_template.jinja", _read_json(folder / _CONFIG)
        if file.is_file():
            return ChatTemplate(_read(file), _special_tokens(folder, config), str(file))
        file, text = folder / _CONFIG, config.get("chat_template")
        if isinstance(text, list):
            text = _default(text, file)
        if text is None:
            return None
        if not isinstance(text, str):
            raise DamageError(f"{file} is damaged (its chat_template is not a string): copy the bundle again")
        return ChatTemplate(text, _special_tokens(folder, config), str(file))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text that includes special tokens: encode it with ``add_special_tokens=False``.

        messages: each with a ``role``, a ``content`` and other keys that the template reads, in JSON's types.
        add_generation_prompt: whether to add the beginning of the assistant's next message, if the template supports it. tools: JSON
        schemas of functions, for templates that know tools. variables: others that the template knows, such as Qwen3's
        ``enable_thinking``, in JSON's types.

        Raises InputError if there is no message, if one is not a mapping of JSON's types, for a variable that is not of these types or
        has a name of its own here, and if the template refuses the conversation (with its own message) or fails on it.
        """
        prepared = [_prepared(message, index) for index, message in enumerate(messages)]
        if not prepared:
            raise InputError("the conversation is empty: give at least one message")
        listed = None if tools is None else [_plain(tool, f"tool {index}") for index, tool in enumerate(tools)]
        more = {str(name): _plain(value, f"the template's variable {name!r}") for name, value in (variables or {}).items()}
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
                f"{self._name()} fails on this conversation ({_described(error)}): "
                "change the messages, or give the prompt as text or token ids"
            ) from None

    def _name(self) -> str:
        return f"the chat template in {self._source}"


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DamageError(f"{file} cannot be read ({error}): copy the bundle again") from None


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises DamageError."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{file} is damaged ({error}): copy the bundle again") from None
    if not isinstance(content, dict):
        raise DamageError(f"{file} is damaged (it is not a JSON object): copy the bundle again")
    return content


def _default(templates: list[Any], file: Path) -> Any:
    try:
        named = {entry["name"]: entry["template"] for entry in templates}
    except (KeyError, TypeError):
        raise DamageError(
            f"{file} is damaged (its chat_template is not a list of names and templates): copy the bundle again"
        ) from None
    if "default" not in named:
        raise DamageError(
            f"{file} has no default chat template (only {', '.join(map(str, named)) or 'an empty list'}): "
            "write the template to use to chat_template.jinja"
        )
    return named["default"]


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Variables such as ``bos_token``. The exporter writes the map, which includes the tokens that transformers adds to the
    configuration.
    """
    named = {name: value for name, value in config.items() if name.endswith("_token")} | _read_json(folder / _SPECIAL)
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _prepared(message: Any, index: int) -> dict[str, Any]:
    """A message as templates expect it: without values of None, and with the assistant's reasoning under each of its names."""
    if not isinstance(message, Mapping):
        raise InputError(f"message {index} is {_type_name(message)}: give a mapping with a role and a content")
    plain: dict[str, Any] = _plain({key: value for key, value in message.items() if value is not None}, f"message {index}")
    reasoning = next((plain[name] for name in _REASONING if plain.get(name) is not None), None)
    return plain if reasoning is None else {"thinking": reasoning} | plain | {"reasoning_content": reasoning}


def _plain(value: Any, holder: str) -> Any:
    """A copy in JSON's types, since methods of other objects are outside the sandbox's control. holder: of the value, for messages."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, holder): _plain(entry, holder) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(_plain(entry, holder) for entry in value)
    for kind, convert in _SCALARS:
        if isinstance(value, kind):
            return convert(value)
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


def _tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
