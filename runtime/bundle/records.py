"""JSON files with a checksum, parsed into dataclasses whose annotations give the types and bounds of the fields.

A record contains the SHA-256 of its content, so accidental damage is always detected. Someone who changes a record on purpose
can seal it again, but ``checked`` still enforces the annotated types and bounds.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

SEAL = "sha256"
_SHOWN = 60  # characters of a wrong value that a message quotes
T = TypeVar("T")


class Damage(ValueError):
    """Names the wrong value and the expected one in a single line; callers add the file and the way out."""


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
    """Parses standard JSON. Raises Damage for anything else, such as NaN, infinity and numbers too large for a float."""
    try:
        return json.loads(text, parse_constant=_constant, parse_float=_finite)
    except RecursionError:
        raise Damage("it is nested too deeply") from None
    except Damage:
        raise
    except ValueError as error:
        raise Damage(f"it is not JSON: {' '.join(str(error).split())[:200]}") from None


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

    Keys that the dataclass does not have are ignored; fields with a default may be missing. at: the value's path, for messages.
    Raises Damage for the first value of another type or outside its bounds.
    """
    value: T = _checked(kind, raw, at)
    return value


def _checked(kind: Any, raw: Any, at: str) -> Any:
    if type(raw) is kind:
        return raw
    if is_dataclass(kind):
        return _record(kind, raw, at)
    origin, arguments = _taken_apart(kind)
    if origin is Annotated:
        return _bounded(_checked(arguments[0], raw, at), arguments[1], at)
    if origin in (Union, UnionType):
        if raw is None and NoneType in arguments:
            return None
        for alternative in (one for one in arguments if one is not NoneType):
            try:
                return _checked(alternative, raw, at)
            except Damage as error:
                damage = error
        raise damage
    if origin is tuple:
        return _tuple(arguments, raw, at)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(raw, dict):
            raise _wrong(at, raw, "an object")
        key, value = arguments
        return {_checked(key, name, at): _checked(value, content, _inside(at, name)) for name, content in raw.items()}
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return _as_float(raw, at)
    raise _wrong(at, raw, {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind])


@cache
def _taken_apart(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _as_float(raw: int, at: str) -> float:
    try:
        return float(raw)
    except OverflowError:
        raise _wrong(at, raw, "a smaller number") from None


def _record(kind: Any, raw: Any, at: str) -> Any:
    if not isinstance(raw, dict):
        raise _wrong(at, raw, "an object")
    values = {}
    for name, annotation, required in _fields(kind):
        if name in raw:
            values[name] = _checked(annotation, raw[name], _inside(at, name))
        elif required:
            raise Damage(f"{_inside(at, name)} is missing")
    return kind(**values)


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Name, annotation, and whether the field is required."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((f.name, hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in fields(kind))


def _tuple(arguments: tuple[Any, ...], raw: Any, at: str) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise _wrong(at, raw, "a list")
    kinds = (arguments[0],) * len(raw) if arguments[-1] is ... else arguments
    if len(kinds) != len(raw):
        raise Damage(f"{at} has {len(raw)} entries, expected {len(kinds)}")
    return tuple(_checked(kind, value, f"{at}[{i}]") for i, (kind, value) in enumerate(zip(kinds, raw, strict=True)))


def _bounded(value: Any, limit: Any, at: str) -> Any:
    if isinstance(limit, Bounds) and not limit.least <= value <= limit.most:
        raise _wrong(at, value, f"{limit.least:,.0f} to {limit.most:,.0f}".replace(",", ""))
    if isinstance(limit, OneOf) and value not in limit.choices:
        raise _wrong(at, value, f"one of {', '.join(limit.choices)}")
    if isinstance(limit, Pattern) and not re.fullmatch(limit.expression, value):
        raise _wrong(at, value, limit.description)
    return value


def _inside(at: str, name: str) -> str:
    return f"{at}.{shown(name)}" if at else shown(name)


def _wrong(at: str, value: Any, expected: str) -> Damage:
    actual = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(_printable(value))
    return Damage(f"{at or 'it'} is {shown(actual)}, expected {expected}")


def _printable(value: Any) -> Any:
    """The value, or words for an integer that is too long: Python refuses to print integers of thousands of digits."""
    return "a very large number" if isinstance(value, int) and abs(value) >= 1 << 256 else value


def shown(text: str) -> str:
    """A string from a file, shortened and on one line."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= _SHOWN else f"{clean[:_SHOWN]}..."
