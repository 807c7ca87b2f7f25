"""Runs chat templates in Jinja's sandbox, with limits on time and memory.

Jinja's own sandbox only limits ``range``. This one checks the time in every loop, macro, call and filter, and refuses
strings and lists larger than ``_MOST``, so that no step between two checks can take long.
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

SECONDS = 3.0  # the longest time of a rendering
_MOST = 1 << 23  # characters of a string, or entries of a list
_BITS = 1 << 14  # of an integer
_WIDTH = 1 << 12  # of padding, indentation and the like
# What makes as much as a number among its arguments says, or takes as long.
_SIZED = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "to_bytes", "tojson", "zfill"}
# filters whose time can grow quadratically
_SLOW = {"striptags", "urlize", "wordwrap", "xmlattr", "pprint", "urlencode"}
_SLOW_MOST = 1 << 16  # characters that such a filter may get
_SEQUENCES = (str, bytes, list, tuple)
_WIDE_SPEC = re.compile(r"\d{4,}|\*")
_deadline = local()


def _refused(reason: str) -> SecurityError:
    return SecurityError(f"the template {reason}")


def tick() -> None:
    """Raises SecurityError after the deadline."""
    if monotonic() > getattr(_deadline, "seconds", float("inf")):
        raise _refused(f"runs longer than {SECONDS:.0f} s")


def _require(size: int) -> None:
    if size > _MOST:
        raise _refused("makes a string or list that is too large")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (*_SEQUENCES, dict)) else 1


def _concat(pieces: Any) -> str:
    checked, size = [], 0
    for piece in pieces:
        tick()
        size += len(piece)
        _require(size)
        checked.append(piece)
    return "".join(checked)


def _text(value: Any) -> str:
    text = str(value)
    _require(len(text))
    return text


def _format(template: str) -> None:
    if _WIDE_SPEC.search(template) or template.count("%") + template.count("{") > _WIDTH:
        raise _refused("pads a string too widely")


def _operate(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError if the operation's result would be too large."""
    if operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _BITS:
                raise _refused("makes a number that is too large")
        elif isinstance(left, int) or isinstance(right, int):
            count, sequence = (left, right) if isinstance(left, int) else (right, left)
            _require(_size(sequence) * max(0, count) if isinstance(sequence, _SEQUENCES) else 0)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _BITS:
            raise _refused("makes a number that is too large")
    elif operator == "%":
        if isinstance(left, str):
            _format(left)
    else:
        _require(_size(left) + _size(right))


def _arguments(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises SecurityError if a filter, or a method of a string or list, would take too long or make too large a
    result.

    value: the object that the filter or method ``name`` is applied to.
    """
    tick()
    values = [*args, *kwargs.values()]
    largest = max(
        (abs(number) for number in values if isinstance(number, int) and not isinstance(number, bool)), default=0
    )
    if largest > _WIDTH and name in _SIZED:
        raise _refused(f"gives {name} a number that is too large")
    if isinstance(value, str):
        if name == "replace" and len(args) >= 2:
            old, new = (_text(argument) for argument in args[:2])
            _require(len(value) + (value.count(old) if old else len(value) + 1) * len(new))
        elif name in ("indent", "expandtabs"):
            widths = [largest, *(len(text) for text in values if isinstance(text, str))]
            _require((1 + value.count("\n") + value.count("\t")) * max(widths) + len(value))
        elif name in ("format", "format_map"):
            _format(value)
        elif name in _SLOW and len(value) > _SLOW_MOST:
            raise _refused(f"gives {name} a string that is too long")
    if name == "join":
        parts, between = (
            (values[0] if values else (), value) if isinstance(value, str) else (value, values[0] if values else "")
        )
        if isinstance(parts, (str, list, tuple)):
            _require(sum(len(part) if isinstance(part, str) else 1 for part in parts) + len(parts) * _size(between))
    elif name == "sum" and not all(isinstance(argument, (int, float, str)) for argument in values):
        raise _refused("sums values that are not numbers")
    elif name == "tojson" and any(isinstance(text, str) and len(text) > _WIDTH for text in values):
        raise _refused("indents too widely")


def _guarded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(filter, "jinja_pass_arg") else 0

    @wraps(filter)
    def call(*args: Any, **kwargs: Any) -> Any:
        _arguments(name, args[first] if len(args) > first else None, args[first + 1 :], kwargs)
        result = filter(*args, **kwargs)
        _require(_size(result))
        return result

    return call


class _Clock(Extension):
    """Its method is called at the start of every loop and macro body, since calls check the time."""

    def node(self) -> nodes.ExprStmt:
        return nodes.ExprStmt(self.call_method("check"))

    @staticmethod
    def check() -> None:
        pass


class Sandbox(ImmutableSandboxedEnvironment):
    """Rendering one of its templates raises SecurityError if it takes too much time or memory."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))
    concat = staticmethod(_concat)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_extension(_Clock)
        self.globals.pop("lipsum")

    def guard(self) -> None:
        """Adds the limits to the filters; must be called after all filters are set."""
        self.filters = {name: _guarded(name, filter) for name, filter in self.filters.items()}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        tick()
        _operate(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (*_SEQUENCES, int)):
            _arguments(obj.__name__, owner, args, kwargs)
        else:
            tick()
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _format(value.__self__)
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        clock: Any = next(extension for extension in self.extensions.values() if isinstance(extension, _Clock))
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            node.body.insert(0, clock.node().set_lineno(node.lineno))  # type: ignore[attr-defined]
        return tree

    def compiled(self, source: str) -> Template:
        template = self.from_string(source)
        # The functions with which the generated code joins strings.
        template.root_render_func.__globals__.update(concat=_concat, str_join=lambda parts: _concat(map(_text, parts)))
        return template

    @staticmethod
    def render(template: Template, variables: dict[str, Any]) -> str:
        _deadline.seconds = monotonic() + SECONDS
        try:
            return template.render(variables)
        finally:
            del _deadline.seconds
