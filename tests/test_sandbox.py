"""A template that would run or grow without end is refused in a sentence, in any thread."""

import resource
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from jinja2.defaults import DEFAULT_FILTERS
from transformers.utils.chat_template_utils import _compile_jinja_template

from runtime.decoding.text.chat_template import ChatTemplate
from runtime.decoding.text.template_sandbox import SECONDS
from runtime.errors import GumihoError

MESSAGES = [{"role": "user", "content": "a\nb"}]
HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ lipsum(n=100000) }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ [1, 2] | tojson(indent=10**9) }}",
    "{{ 'x' * 10**9 }}",
    "{{ 10**9 * 'x' }}",
    "{{ ([1] * 10**9) | length }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{{ 'x' | center(10**9) }}",
    "{{ 'x' | indent(10**9, true) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ '\\t'.expandtabs(10**9) }}",
    "{% set x = 'x' * 8000000 %}" + "{% set x = x ~ x %}" * 12 + "{{ x | length }}",
    "{% set x = 'x' * 8000000 %}" + "{% set x = x + x %}" * 12 + "{{ x | length }}",
    "{% set x = 'x' * 8000000 %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 12 + "{{ x | length }}",
    "{% set x = 'x' * 8000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "{% set x = 'x' * 99999 %}{{ x | replace('x', x) | length }}",
    "{% set x = 'x' * 99999 %}{{ x.replace('x', x) | length }}",
    "{% set x = 'x' * 99999 %}{{ ([x] * 99999) | join | length }}",
    "{% set x = 'x' * 99999 %}{{ ''.join([x] * 99999) | length }}",
    "{% set x = 'x' * 99999 %}{{ x.join(x) | length }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ (1).to_bytes(10**9, 'big') | length }}",
    "{{ ('x'.encode() * 10**9) | length }}",
    "{{ 'x'.encode().center(10**9) | length }}",
    "{{ 1.5 | round(10**9, 'ceil') }}",
    "{{ ([[1] * 9999] * 9999) | sum(start=[]) | length }}",
    "{{ ('<!--' * 999999) | striptags }}",
    "{{ (('\\n' * 99999) | indent(4000)) | length }}",
]


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """What takes gigabytes fails, instead of the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 29), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refusal(template: str) -> str:
    with pytest.raises(GumihoError) as error:
        ChatTemplate(template, {}, "x").render(MESSAGES)
    return str(error.value)


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_a_template_that_takes_too_much(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.decoding.text.template_sandbox.SECONDS", 0.5)
    said = refusal(template)
    assert said.startswith("the chat template in x fails on this conversation (")
    assert "MemoryError" not in said


def test_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.decoding.text.template_sandbox.SECONDS", 0.5)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(refusal(HOSTILE[0])))
    thread.start()
    thread.join(60)
    assert "longer than" in said[0]


def test_the_clock_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr("runtime.decoding.text.template_sandbox.monotonic", lambda: next(ticks) * 1e-5)
    template = ChatTemplate("{% for i in range(30000) %}{{ i }}{% endfor %}", {}, "x")
    for _ in range(12):
        assert len(template.render(MESSAGES)) == 138890
    assert next(ticks) * 1e-5 > SECONDS, "the test proves too little"


def test_what_templates_do_is_not_too_much() -> None:
    text = "word\n" * 100_000
    template = ChatTemplate(
        "{% for m in messages %}{{ '<|' + m.role ~ '|>' }}{{ m.content | replace('\n', ' ') | trim | length }}"
        "{{ m.content.split('\n') | join('\n') | length }}{{ '-' * 40 }}{{ '%s' % m.role }}{{ [1] | tojson(indent=4) "
        "}}{% endfor %}",
        {},
        "x",
    )
    assert (
        template.render([{"role": "user", "content": text}])
        == "<|user|>499999" + "500000" + "-" * 40 + "user[\n    1\n]"
    )


def test_every_filter_and_method_with_a_large_number() -> None:
    """None takes long or much (``memory``), whether it is refused or not; transformers' value is what those give that
    are not."""
    values = {"'a b'": "a b", "['a', 'b']": ["a", "b"], "'a'.encode()": b"a", "7": 7, "1.5": 1.5, "{'a': 1}": {"a": 1}}
    calls = [f"{value} | {name}(10**9)" for value in values for name in DEFAULT_FILTERS]
    for spelled, value in values.items():
        names = [name for name in dir(value) if not name.startswith("_") and callable(getattr(value, name))]
        calls += [
            f"({spelled}).{name}({given})"
            for name in names
            for given in ("10**9", "10**9, 'a'", "'a', 10**9", "'a', 'b', 10**9")
        ]
    judge = _compile_jinja_template("").environment
    same = 0
    for call in calls:
        try:
            ours = ChatTemplate(f"{{{{ {call} }}}}", {}, "x").render(MESSAGES)
        except GumihoError:
            continue
        if "random" in call or " at 0x" in ours:
            continue
        assert len(ours) < 999, call
        assert judge.from_string(f"{{{{ {call} }}}}").render() == ours, call
        same += 1
    assert same > 50


@pytest.mark.parametrize(
    "expression",
    [
        "('word ' * 9) | truncate(100000)",
        "'a b' | truncate(9999999, True, '')",
        "'aaa'.replace('a', 'b', 99999)",
        "'a,b'.split(',', 99999)",
        "'a' | default(123456)",
        "[1, 99999] | select('gt', 50000) | list",
        "'x' | int(99999)",
        "'abc'.find('c', 0, 99999)",
    ],
)
def test_large_numbers_that_are_no_sizes(expression: str) -> None:
    expected = _compile_jinja_template(f"{{{{ {expression} }}}}").render()
    assert ChatTemplate(f"{{{{ {expression} }}}}", {}, "x").render(MESSAGES) == expected
