"""``--chat``: a conversation over standard input, as a user has it."""

import io
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import load
from runtime.generate import main
from tests.conftest import with_template

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index > 1 %}{{ raise_exception('system comes first') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(demo_bundle, tmp_path_factory.mktemp("chat") / "bundle", TEMPLATE)


def talk(monkeypatch: pytest.MonkeyPatch, typed: str, *argv: str | Path) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return main([*map(str, argv), "--chat", "--max-new-tokens", "12"])


def test_answers_know_what_was_said(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
    from runtime.generation import Generation

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
        "/regenerate", "def f(x):", "/regenerate", "/nwe", "/save", "/new now", f"/save {file}", f"/save {file}",
        f"/save {tmp_path / 'none' / 'x'}", "/system Be brief.", "//etc", "/stats", "/help",
    ]  # fmt: skip
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
    assert said[5] == (
        f"error: '{nowhere}' cannot be written ([Errno 2] No such file or directory: '{nowhere}'): name another file"
    )
    assert said[6].startswith("prompt ")
    assert [line.split()[0] for line in said[-7:]] == ["/help", "/new", "/system", "/regenerate", "/save", "/stats", "/exit"]


def test_a_template_without_a_system_keeps_the_conversation(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}{% endfor %}"
    folder = with_template(bundle, tmp_path / "b", template)
    assert talk(monkeypatch, "def f(x):\n/system Be brief.\nimport os\n", folder) == 0
    out, err = capsys.readouterr()
    assert err == "error: the target's chat template refuses this conversation: no system\n"
    assert len(out.splitlines()) >= 2


def test_a_terminal_shows_a_prompt(bundle: Path) -> None:
    """Over a pseudo terminal, as a user has it: what is typed can be edited, and Ctrl-D leaves."""
    pty = pytest.importorskip("pty")
    root = Path(__file__).parent.parent
    main_end, process_end = pty.openpty()
    argv = [sys.executable, "-m", "runtime.generate", str(bundle), "--chat", "--max-new-tokens", "4"]
    process = subprocess.Popen(argv, stdin=process_end, stdout=process_end, stderr=process_end, cwd=root)
    os.close(process_end)
    os.write(main_end, b"def f(y\x7fx):\n/exit\n")
    said = b""
    while process.poll() is None or select.select([main_end], [], [], 0.2)[0]:
        if select.select([main_end], [], [], 0.2)[0]:
            try:
                said += os.read(main_end, 1 << 16)
            except OSError:  # the other end is closed
                break
    assert process.wait(60) == 0
    assert b"/help lists the commands" in said
    assert b"> " in said
    os.close(main_end)
