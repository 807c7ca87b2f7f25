"""Records: what is written is read again, and whatever else a file says is refused in one line."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.bundle.records import Bounds, Damage, OneOf, Pattern, checked, parse, sealed, unsealed


@dataclass(frozen=True)
class Inner:
    size: Annotated[int, Bounds(1, 1000)]
    name: Annotated[str, Pattern("[a-z]{1,8}", "a name")]


@dataclass(frozen=True)
class Outer:
    kind: Annotated[str, OneOf(("one", "two"))]
    share: float
    flag: bool
    pair: tuple[int, str]
    many: tuple[int | Annotated[str, OneOf(("rows",))], ...]
    inner: Mapping[str, Inner]
    note: str = "none"


INNER = st.builds(Inner, st.integers(1, 1000), st.from_regex("[a-z]{1,8}", fullmatch=True))
OUTER = st.builds(
    Outer,
    st.sampled_from(("one", "two")),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.tuples(st.integers(), st.text()),
    st.lists(st.integers() | st.just("rows")).map(tuple),
    st.dictionaries(st.text(), INNER),
    st.text(),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(OUTER)
def test_what_is_written_is_read(outer: Outer) -> None:
    assert checked(Outer, unsealed(parse(sealed(asdict(outer))))) == outer


def replace_one(value: Any, at: list[int], new: Any) -> Any:
    """The value with another one at a place that ``at`` chooses."""
    if isinstance(value, dict) and value and at:
        names = sorted(value)
        name = names[at[0] % len(names)]
        return {**value, name: replace_one(value[name], at[1:], new)}
    if isinstance(value, list) and value and at:
        i = at[0] % len(value)
        return [*value[:i], replace_one(value[i], at[1:], new), *value[i + 1 :]]
    return new


@given(OUTER, st.lists(st.integers(0, 9), max_size=4), JSON)
def test_whatever_stands_there_it_is_checked_or_refused(outer: Outer, at: list[int], new: Any) -> None:
    """Sealed again: either the types and bounds hold, or Damage says so in one line."""
    raw = replace_one(json.loads(json.dumps(asdict(outer))), at, new)
    try:
        found = checked(Outer, raw)
    except Damage as error:
        said = str(error)
        one_line = len(said.splitlines()) == 1 and len(said) < 400
        assert one_line
        return
    assert found.kind in ("one", "two")
    assert [type(v) for v in (found.share, found.flag, found.note)] == [float, bool, str]
    assert [type(v) for v in found.pair] == [int, str]
    assert all(type(v) is int or v == "rows" for v in found.many)
    assert all(1 <= inner.size <= 1000 and 1 <= len(inner.name) <= 8 for inner in found.inner.values())


@given(OUTER, st.data())
def test_any_changed_character_is_noticed(outer: Outer, data: st.DataObject) -> None:
    text = sealed(asdict(outer))
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[at]))
    changed = text[:at] + other + text[at + 1 :]
    try:
        found = unsealed(parse(changed))
    except (Damage, AttributeError):
        return
    assert found == unsealed(parse(text)), "another spelling of the same content at most"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": NaN}', "holds NaN"),
        ('{"a": -Infinity}', "holds -Infinity"),
        ('{"a": 1e999}', "too large"),
        ("{", "not JSON"),
        ("1" * 5000, "a number has too many digits"),
        ("", "it is empty"),
    ],
)
def test_what_is_not_json(text: str, said: str) -> None:
    with pytest.raises(Damage, match=said):
        parse(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"flag": 1}, "flag is 1, expected true or false"),
        ({"share": True}, "share is True, expected a number"),
        ({"share": 10**400}, "share is 'a very large number', expected a smaller number"),
        ({"pair": [1]}, "pair has 1 entries, expected 2"),
        ({"pair": [True, "x"]}, r"pair\[0\] is True, expected a whole number"),
        ({"many": [1, "columns"]}, r"many\[1\] is 'columns', expected one of rows"),
        ({"inner": {"x": {"size": 0, "name": "a"}}}, "inner.x.size is 0, expected 1 to 1000"),
        ({"inner": {"x\n" * 99: {"size": 1}}}, r"inner.x\?x\?.*name is missing"),
        ({"kind": "three" * 100}, "expected one of one, two"),
    ],
)
def test_messages_name_the_value(change: dict[str, Any], said: str) -> None:
    raw = {"kind": "one", "share": 1.0, "flag": True, "pair": [1, "x"], "many": [], "inner": {}}
    checked(Outer, raw)
    with pytest.raises(Damage, match=said):
        checked(Outer, {**raw, **change})
