"""``--chat``: a conversation over standard input, as a user has it."""

import io
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from runtime import Model, load
from runtime.cli.generate import main
from tests.conftest import with_template

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index > 1 %}{{ raise_exception('system comes first') "
    "}}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(demo_bundle, tmp_path_factory.mktemp("chat") / "bundle", TEMPLATE)


def talk(monkeypatch: pytest.MonkeyPatch, typed: str, *argv: str | Path) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return main([*map(str, argv), "--chat", "--max-new-tokens", "12"])


def test_answers_know_what_was_said(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each answer is what generating from the whole conversation anew gives, and reads only what is new of it."""
    typed = ["def f(x):", "import os", "return x"]
    assert (
        talk(
            monkeypatch,
            "\n".join([typed[0], "", typed[1], "/new", typed[2], "/exit", "never"]),
            bundle,
            "--stats",
            "--system",
            "Be brief.",
        )
        == 0
    )
    out, err = capsys.readouterr()
    begun = [{"role": "system", "content": "Be brief."}]
    with load(bundle) as model:
        expected, messages = "", list(begun)
        for line in typed:
            if line == typed[2]:
                messages = list(begun)
            messages.append({"role": "user", "content": line})
            text = "".join(model.generate(model.chat(messages), 12))
            messages.append({"role": "assistant", "content": text})
            expected += text + "\n"
    assert out == expected
    prompts = [line for line in err.splitlines() if line.startswith("prompt ")]
    assert len(prompts) == 3
    assert "(0 cached)" in prompts[0]
    assert "(0 cached)" not in prompts[1]  # the first question and its answer are
    assert ">" not in err  # nobody is asked where nobody types


def test_a_conversation_that_gets_too_long_goes_on_after_new(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "x = 1; " * 700
    assert talk(monkeypatch, f"one\n{long}\ntwo\n", bundle) == 1
    out, err = capsys.readouterr()
    assert err.count("error: ") == 1
    assert "shorten it" in err
    assert len(out.splitlines()) >= 2


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # Python's own choices, by locale
def test_a_message_that_is_not_utf_8_is_refused_and_the_conversation_goes_on(
    errors: str, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\ndef f(x):\n"), "utf-8", errors))
    assert main([str(bundle), "--chat", "--max-new-tokens", "4"]) == 1
    out, err = capsys.readouterr()
    assert err == (
        "error: the prompt is not Unicode (it has a byte that is not UTF-8, or half a character): give UTF-8 text "
        "(/new starts a new conversation)\n"
    )
    assert out


def test_one_message(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "", bundle, "--prompt", "def f(x):") == 0
    out = capsys.readouterr().out
    with load(bundle) as model:
        assert out == "".join(model.generate(model.encode("[user] def f(x):\n[assistant]", special=False), 12)) + "\n"


def test_prompts_use_the_template_unless_raw(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*options: str) -> str:
        assert main([str(bundle), "--prompt", "def f(x):", "--max-new-tokens", "12", *options]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    with load(bundle) as model:

        def expected(prompt: str | list[int]) -> str:
            return "".join(model.generate(prompt, 12)) + "\n"

        templated, instructed, raw = printed(), printed("--system", "Be brief."), printed("--raw")
        assert templated == expected(model.chat([{"role": "user", "content": "def f(x):"}]))
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f(x):"}]
        assert instructed == expected(model.chat(messages))
        assert raw == expected("def f(x):")
        assert len({templated, instructed, raw}) == 3


def test_a_template_that_refuses_a_prompt(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_template(bundle, tmp_path / "b", "{{ raise_exception('only silence') }}")
    assert main([str(folder), "--prompt", "x"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "only silence" in err
    assert "--raw continues the prompt without a chat template" in err


def test_a_template_that_refuses(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_template(bundle, tmp_path / "b", "{{ raise_exception('only silence') }}")
    assert talk(monkeypatch, "hello\n", folder) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "only silence" in err


def test_an_interrupted_answer_is_kept_and_the_conversation_goes_on(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.api.generation import Generation

    pieces, first = Generation.pieces, []

    def interrupted(self: Generation, watch: object = None):  # type: ignore[no-untyped-def]
        for i, piece in enumerate(pieces(self)):
            yield piece
            if not first and i == 1:
                first.append(piece)
                raise KeyboardInterrupt

    monkeypatch.setattr(Generation, "pieces", interrupted)
    assert talk(monkeypatch, "def f(x):\nimport os\n", bundle) == 0
    assert first
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_commands_do_not_reach_the_model(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    typed = [
        "/regenerate",
        "def f(x):",
        "/regenerate",
        "/nwe",
        "/save",
        "/new now",
        f"/save {file}",
        f"/save {file}",
        f"/save {tmp_path / 'none' / 'x'}",
        "/save ~nobody-here/x",
        "/system Be brief.",
        "//etc",
        "/stats",
        "/help",
    ]
    assert talk(monkeypatch, "\n".join(typed), bundle) == 0
    out, err = capsys.readouterr()
    with load(bundle) as model:
        messages = [{"role": "user", "content": "def f(x):"}]
        first = "".join(model.generate(model.chat(messages), 12))
        messages.append({"role": "assistant", "content": first})
        assert json.loads(file.read_text("utf-8")) == messages
        system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "/etc"}
        last = "".join(model.generate(model.chat([system, *messages, question]), 12))
    assert out == f"{first}\n{first}\n{last}\n"
    said = err.splitlines()
    assert said[:5] == [
        "error: there is no answer to replace yet",
        "error: there is no command '/nwe': /help lists them, and // begins a message that starts with /",
        "error: /save needs FILE",
        "error: /new takes nothing after it",
        f"error: '{file}' exists already: name another file",
    ]
    nowhere = tmp_path / "none" / "x"
    assert said[5] == f"error: '{nowhere}' cannot be written (No such file or directory): name another file"
    assert (
        said[6] == "error: '~nobody-here/x' cannot be written (Could not determine home directory): name another file"
    )
    assert said[7].startswith("prompt ")
    assert [line.split()[0] for line in said[-7:]] == [
        "/help",
        "/new",
        "/system",
        "/regenerate",
        "/save",
        "/stats",
        "/exit",
    ]


def test_a_template_without_a_system_keeps_the_conversation(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content "
        "}}{% endfor %}"
    )
    folder = with_template(bundle, tmp_path / "b", template)
    assert talk(monkeypatch, "def f(x):\n/system Be brief.\nimport os\n", folder) == 0
    out, err = capsys.readouterr()
    assert err == "error: the target's chat template refuses this conversation: no system\n"
    assert len(out.splitlines()) >= 2


def test_several_lines(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    typed = [
        '"""def f(x):',
        "  /new",
        '  return x"""',
        '"""',
        "//a",
        "",
        "b",
        '"""',
        '"""one"""',
        f"/save {file}",
        '"""',
        "the end",
    ]
    assert talk(monkeypatch, "\n".join(typed), bundle) == 0
    asked = [message["content"] for message in json.loads(file.read_text("utf-8")) if message["role"] == "user"]
    assert asked == ["def f(x):\n  /new\n  return x", "//a\n\nb", "one"]
    assert capsys.readouterr().err == ""


def test_special_tokens_in_messages_are_text(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every way to a model, unless they are asked for. The ids are those of the tokenizer with
    ``encode_special_tokens``."""
    folder = with_template(
        bundle,
        tmp_path / "b",
        "<|begin_of_text|>{% for m in messages %}{{ m.role }}: {{ m.content }}<|end_of_text|>{% endfor %}",
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id("<|begin_of_text|>"), tokenizer.token_to_id("<|end_of_text|>")]

    def ids(text: str, special: bool) -> list[int]:
        tokenizer.encode_special_tokens = not special
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    plain = [
        ends[0],
        *ids("system: <|begin_of_text|>", False),
        ends[1],
        *ids("user: a<|end_of_text|>b", False),
        ends[1],
    ]
    special = ids(
        "<|begin_of_text|>system: <|begin_of_text|><|end_of_text|>user: a<|end_of_text|>b<|end_of_text|>", True
    )
    read, kept = list[list[int]](), Model.start

    def start(model: Model, prompt: list[int], *args: Any, **options: Any) -> Any:
        read.append(list(prompt))
        return kept(model, prompt, *args, **options)

    monkeypatch.setattr(Model, "start", start)
    for options, expected in (([], plain), (["--special-tokens"], special)):
        for more in (["--prompt", "a<|end_of_text|>b"], ["--chat"]):
            monkeypatch.setattr("sys.stdin", io.StringIO("a<|end_of_text|>b\n"))
            assert main([str(folder), "--system", "<|begin_of_text|>", "--max-new-tokens", "1", *options, *more]) == 0
            assert read.pop() == expected


def test_a_terminal(bundle: Path, tmp_path: Path) -> None:
    """Over a pseudo terminal, as a user has it: what is typed can be edited, pasted lines are one message, Ctrl-C keeps
    the conversation, and Ctrl-D leaves."""
    pty = pytest.importorskip("pty")
    root, file = Path(__file__).parent.parent, tmp_path / "talk.json"
    main_end, process_end = pty.openpty()
    argv = [sys.executable, "-m", "runtime.generate", str(bundle), "--chat", "--max-new-tokens", "4"]
    process = subprocess.Popen(
        argv,
        stdin=process_end,
        stdout=process_end,
        stderr=process_end,
        cwd=root,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(process_end)
    said = b""

    def until(text: bytes) -> None:
        """Reads up to a text."""
        nonlocal said
        while text not in said:
            assert select.select([main_end], [], [], 60)[0], said
            said += os.read(main_end, 1 << 16)
        said = said.partition(text)[2]

    def ready() -> None:
        """Reads up to where a message can be typed, whatever an answer holds: there the terminal is asked to mark what
        is pasted."""
        until(b"\x1b[?2004h")
        until(b"> ")

    def interrupt() -> None:
        """Ctrl-C, again if nothing happens: Python's readline overlooks one that comes after it handled a key and
        before it waits for the next, which a process sees far more often than a person."""
        for _ in range(12):
            process.send_signal(signal.SIGINT)
            if select.select([main_end], [], [], 5)[0]:
                break
        until(b"Ctrl-D or /exit leaves")

    try:
        until(b"Ctrl-D leaves")
        ready()
        for typed in (b"def f(y\x7fx):\n", b"\x1b[200~import os\nimport sys\x1b[201~\n"):
            os.write(main_end, typed)
            until(b"\n")
            ready()
            os.write(main_end, b"not sent")
            until(b"not sent")
            interrupt()  # right after an answer, too
            until(b"> ")
        os.write(main_end, f"/save {file}\n".encode())
        until(b"\n")
        until(b"> ")
        os.write(main_end, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(main_end)
    messages = json.loads(file.read_text("utf-8"))
    assert [message["content"] for message in messages[::2]] == ["def f(x):", "import os\nimport sys"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
