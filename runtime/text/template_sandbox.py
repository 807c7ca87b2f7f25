"""Where chat templates run: Jinja's sandbox, with an end to what a template can take of time and memory.

The sandbox bounds ``range`` only. Here every loop, macro, call and filter looks at the clock, and nothing makes a text or list larger
than ``_MOST``, so that none of the steps between two looks can take long.
"""

import re
from collections.abc import Callable
from functools import wraps
from threading import local
from time import monotonic
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 3.0  # that a rendering may take
_MOST = 1 << 23  # characters or entries of anything
_BITS = 1 << 14  # of whole numbers
_WIDTH = 1 << 12  # of padding, indentation and the like
_SLOW = {"striptags", "urlize", "wordwrap", "xmlattr", "pprint", "urlencode"}  # filters whose time may grow with the square
_SLOW_MOST = 1 << 16  # characters
_SPEC = re.compile(r"\d{4,}|\*")
_ends = local()


def _refuse(what: str) -> SecurityError:
    return SecurityError(f"the template {what}")


def tick() -> None:
    """Raises SecurityError where the time is up."""
    if monotonic() > getattr(_ends, "at", float("inf")):
        raise _refuse(f"runs longer than {SECONDS:.0f} s")


def _require(size: int) -> None:
    if size > _MOST:
        raise _refuse("makes a text or list that is too large")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 1


def _concat(pieces: Any) -> str:
    found, size = [], 0
    for piece in pieces:
        tick()
        size += len(piece)
        _require(size)
        found.append(piece)
    return "".join(found)


def _text(value: Any) -> str:
    text = str(value)
    _require(len(text))
    return text


def _format(template: str) -> None:
    if _SPEC.search(template) or template.count("%") + template.count("{") > _WIDTH:
        raise _refuse("pads a text too widely")


def _operate(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError where an operation would make something too large."""
    if operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _BITS:
                raise _refuse("makes a number that is too large")
        elif isinstance(left, int) or isinstance(right, int):
            count, other = (left, right) if isinstance(left, int) else (right, left)
            _require(_size(other) * max(0, count) if isinstance(other, (str, list, tuple)) else 0)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _BITS:
            raise _refuse("makes a number that is too large")
    elif operator == "%":
        if isinstance(left, str):
            _format(left)
    else:
        _require(_size(left) + _size(right))


def _arguments(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of a filter, or a method of text or a list. value: what it works on."""
    tick()
    given = [*args, *kwargs.values()]
    wide = max((abs(one) for one in given if isinstance(one, int) and not isinstance(one, bool)), default=0)
    if wide > _WIDTH and name not in ("round", "default", "d", "index", "append", "insert", "count", "get"):
        raise _refuse(f"gives {name} a number that is too large")
    if isinstance(value, str):
        if name == "replace" and len(args) >= 2:
            old, new = (_text(one) for one in args[:2])
            _require(len(value) + (value.count(old) if old else len(value) + 1) * len(new))
        elif name in ("indent", "expandtabs"):
            widths = [wide, *(len(one) for one in given if isinstance(one, str))]
            _require((1 + value.count("\n") + value.count("\t")) * max(widths) + len(value))
        elif name in ("format", "format_map"):
            _format(value)
        elif name in _SLOW and len(value) > _SLOW_MOST:
            raise _refuse(f"gives {name} a text that is too long")
    if name == "join":
        parts, between = (given[0] if given else (), value) if isinstance(value, str) else (value, given[0] if given else "")
        if isinstance(parts, (str, list, tuple)):
            _require(sum(len(one) if isinstance(one, str) else 1 for one in parts) + len(parts) * _size(between))
    elif name == "sum" and not all(isinstance(one, (int, float, str)) for one in given):
        raise _refuse("adds up other things than numbers")
    elif name == "tojson" and any(isinstance(one, str) and len(one) > _WIDTH for one in given):
        raise _refuse("indents too widely")


def _guarded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    at = 1 if hasattr(filter, "jinja_pass_arg") else 0

    @wraps(filter)
    def call(*args: Any, **kwargs: Any) -> Any:
        _arguments(name, args[at] if len(args) > at else None, args[at + 1 :], kwargs)
        made = filter(*args, **kwargs)
        _require(_size(made))
        return made

    return call


class _Clock(Extension):
    """Its method is called at the beginning of every loop's and macro's body; calls look at the clock."""

    def node(self) -> nodes.ExprStmt:
        return nodes.ExprStmt(self.call_method("look"))

    @staticmethod
    def look() -> None:
        pass


class Sandbox(ImmutableSandboxedEnvironment):
    """Raises SecurityError while a template of it is rendered that takes too much."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))
    concat = staticmethod(_concat)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_extension(_Clock)
        self.globals.pop("lipsum")

    def guard(self) -> None:
        """Bounds the filters; the last step of setting it up."""
        self.filters = {name: _guarded(name, filter) for name, filter in self.filters.items()}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        tick()
        _operate(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, list, tuple)):
            _arguments(obj.__name__, owner, args, kwargs)
        else:
            tick()
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        made = super().wrap_str_format(value)
        if made is not None:
            _format(value.__self__)
        return made

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        clock: Any = next(one for one in self.extensions.values() if isinstance(one, _Clock))
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            node.body.insert(0, clock.node().set_lineno(node.lineno))  # type: ignore[attr-defined]
        return tree

    def compiled(self, source: str) -> Template:
        template = self.from_string(source)
        # What generated code joins texts with.
        template.root_render_func.__globals__.update(concat=_concat, str_join=lambda parts: _concat(map(_text, parts)))
        return template

    @staticmethod
    def render(template: Template, variables: dict[str, Any]) -> str:
        _ends.at = monotonic() + SECONDS
        try:
            return template.render(variables)
        finally:
            del _ends.at
