"""JSON files with a checksum, parsed into dataclasses whose annotations give the types and bounds of the fields.

A record contains the SHA-256 of its content, so accidental damage is always detected. Someone who changes a record on
purpose can seal it again, but ``checked`` still enforces the annotated types and bounds.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import reason

SEAL = "sha256"
_SHOWN = 60  # characters of a wrong value that a message quotes
T = TypeVar("T")


class Damage(ValueError):
    """Names the wrong value and the expected one in a single line; callers add the file and what to do."""


@dataclass(frozen=True)
class Bounds:
    """The range of a number, both ends included."""

    least: float
    most: float


@dataclass(frozen=True)
class OneOf:
    """The only strings that a field may hold."""

    choices: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """A regular expression that the whole string must match."""

    expression: str
    description: str  # of a matching string, for messages


def parse(text: str | bytes) -> Any:
    """Parses standard JSON. Raises Damage for anything else, such as NaN, infinity and numbers too large for a
    float."""
    try:
        return json.loads(text, parse_constant=_constant, parse_float=_finite)
    except RecursionError:
        raise Damage("it is nested too deeply") from None
    except Damage:
        raise
    except ValueError as error:
        raise Damage(reason(error)) from None


def _constant(name: str) -> float:
    raise Damage(f"it holds {name}, which is not a JSON number")


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise Damage(f"it holds the number {text[:_SHOWN]}, which is too large")


def sealed(content: Mapping[str, Any]) -> str:
    """The text of a record: the content and its checksum."""
    return json.dumps({**content, SEAL: _seal(content)}, indent=1)


def unsealed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A record's content. Raises Damage if it does not match its checksum."""
    content = {name: value for name, value in raw.items() if name != SEAL}
    if raw.get(SEAL) != _seal(content):
        raise Damage("its content does not match its checksum")
    return content


def _seal(content: Mapping[str, Any]) -> str:
    try:
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    except RecursionError:
        raise Damage("it is nested too deeply") from None


def checked(kind: type[T], raw: Any, at: str = "") -> T:
    """Parsed JSON as ``kind``: a dataclass, or any type that annotates its fields.

    Keys that the dataclass does not have are ignored; fields with a default may be missing. at: the value's path, for
    messages. Raises Damage for the first value of another type or outside its bounds.
    """
    annotation: Any = kind
    value: T = _check_of(annotation)(raw, at)
    return value


# A value's place in the record: its container's place, and its name or index there. Formatting these as text for every
# value would take longer than the checks.
Place = str | tuple["Place", str | int]
Check = Callable[[Any, Place], Any]  # of a raw value: the value, or Damage
_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


@cache
def _check_of(kind: Any) -> Check:
    if is_dataclass(kind):
        return partial(_record, kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return partial(_bounded, _check_of(arguments[0]), arguments[1])
    if origin in (Union, UnionType):
        return partial(
            _one_of, tuple(_check_of(one) for one in arguments if one is not NoneType), NoneType in arguments
        )
    if origin is tuple and arguments[-1] is ...:
        return partial(_list, _check_of(arguments[0]))
    if origin is tuple:
        return partial(_tuple, tuple(map(_check_of, arguments)))
    if origin is not None and issubclass(origin, Mapping):
        return partial(_mapping, _check_of(arguments[0]), _check_of(arguments[1]))
    return partial(_plain, kind)


def _plain(kind: type, raw: Any, at: Place) -> Any:
    if type(raw) is kind:
        return raw
    if kind is float and type(raw) is int:
        try:
            return float(raw)
        except OverflowError:
            raise _wrong(at, raw, "a smaller number") from None
    raise _wrong(at, raw, _WORDS[kind])


def _one_of(alternatives: tuple[Check, ...], or_none: bool, raw: Any, at: Place) -> Any:
    if raw is None and or_none:
        return None
    for alternative in alternatives[:-1]:
        with suppress(Damage):
            return alternative(raw, at)
    return alternatives[-1](raw, at)


def _mapping(key: Check, value: Check, raw: Any, at: Place) -> dict[Any, Any]:
    if not isinstance(raw, dict):
        raise _wrong(at, raw, "an object")
    return {key(name, at): value(content, (at, name)) for name, content in raw.items()}


def _record(kind: Any, raw: Any, at: Place) -> Any:
    if not isinstance(raw, dict):
        raise _wrong(at, raw, "an object")
    values = {}
    for name, check, required in _fields(kind):
        if name in raw:
            values[name] = check(raw[name], (at, name))
        elif required:
            raise Damage(f"{_text((at, name))} is missing")
    return kind(**values)


@cache
def _fields(kind: Any) -> tuple[tuple[str, Check, bool], ...]:
    """For each field its name, its check, and whether it is required."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (f.name, _check_of(hints[f.name]), f.default is MISSING and f.default_factory is MISSING) for f in fields(kind)
    )


def _list(check: Check, raw: Any, at: Place) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise _wrong(at, raw, "a list")
    return tuple([check(value, (at, i)) for i, value in enumerate(raw)])


def _tuple(checks: tuple[Check, ...], raw: Any, at: Place) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise _wrong(at, raw, "a list")
    if len(checks) != len(raw):
        raise Damage(f"{_text(at)} has {len(raw)} entries, expected {len(checks)}")
    return tuple(check(value, (at, i)) for i, (check, value) in enumerate(zip(checks, raw, strict=True)))


def _bounded(check: Check, limit: Any, raw: Any, at: Place) -> Any:
    value = check(raw, at)
    if isinstance(limit, Bounds) and not limit.least <= value <= limit.most:
        raise _wrong(at, value, f"{limit.least:,.0f} to {limit.most:,.0f}".replace(",", ""))
    if isinstance(limit, OneOf) and value not in limit.choices:
        raise _wrong(at, value, f"one of {', '.join(limit.choices)}")
    if isinstance(limit, Pattern) and not re.fullmatch(limit.expression, value):
        raise _wrong(at, value, limit.description)
    return value


def _text(at: Place) -> str:
    if isinstance(at, str):
        return at
    outer, inner = _text(at[0]), at[1]
    if isinstance(inner, int):
        return f"{outer}[{inner}]"
    return f"{outer}.{shown(inner)}" if outer else shown(inner)


def _wrong(at: Place, value: Any, expected: str) -> Damage:
    actual = (
        "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(_printable(value))
    )
    return Damage(f"{_text(at) or 'it'} is {shown(actual)}, expected {expected}")


def _printable(value: Any) -> Any:
    """The value, or words for an integer that is too long: Python refuses to print integers of thousands of digits."""
    return "a very large number" if isinstance(value, int) and abs(value) >= 1 << 256 else value


def shown(text: str) -> str:
    """A string from a file, shortened and on one line."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= _SHOWN else f"{clean[:_SHOWN]}..."
