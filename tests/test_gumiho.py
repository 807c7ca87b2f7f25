"""``gumiho``, and the manners of the package: names, types, versions, examples."""

import json
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import runtime
from runtime import GumihoError, Settings, load
from runtime.cli.generate import main as generate
from runtime.decoding.settings import Options
from runtime.gumiho import COMMANDS, main
from tests.conftest import MakeBundle
from tests.pairs import SMALL

ROOT = Path(__file__).parent.parent
PROMPT = "def main(argv=None):\n"


def gumiho(*argv: str | Path, cwd: Path = ROOT, before: str = "") -> subprocess.CompletedProcess[str]:
    """before: a statement that comes first."""
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; {before or 'pass'}; from runtime.gumiho import main; "
        "sys.exit(main())"
    )
    return subprocess.run([sys.executable, "-I", "-c", code, *map(str, argv)], capture_output=True, text=True, cwd=cwd)


def test_commands_are_the_modules(demo_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(demo_bundle), "-p", PROMPT, "--max-tokens", "20"]
    assert generate(argv) == 0
    done = gumiho("generate", *argv)
    assert (done.returncode, done.stdout, done.stderr) == (0, capsys.readouterr().out, "")


def test_a_folder_named_runtime_breaks_nothing(demo_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    done = gumiho("doctor", demo_bundle, "--quick", cwd=tmp_path)
    assert (done.returncode, "the wrong one" in done.stdout + done.stderr) == (0, False)


def test_every_command_helps_and_has_a_version() -> None:
    """One after another in a process that has imported nothing before."""
    code = """
import contextlib, io, json, sys
from runtime.gumiho import COMMANDS, main
told = []
for name in COMMANDS:
    for option in ("--help", "--version"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                status = main([name, option])
            except SystemExit as exit:
                status = exit.code
        told.append((name, option, status, out.getvalue()))
print(json.dumps(told))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    told = json.loads(done.stdout)
    assert len(told) == 2 * len(COMMANDS)
    for name, option, status, out in told:
        assert status == 0, name
        if option == "--help":
            assert f"usage: gumiho {name} " in out
        else:
            assert out == f"gumiho-export {runtime.__version__}\n"


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert main(["genrate"]) == 2
    said = capsys.readouterr()
    assert said.err == f"error: there is no command 'genrate': choose one of {', '.join(COMMANDS)}\n"


def test_an_export_without_torch_says_what_to_install() -> None:
    """In a process of its own, that cannot import what a device lacks."""
    missing = (
        "sys.modules.update(dict.fromkeys(('torch', 'onnx', 'onnx_ir', 'onnxscript', 'transformers', 'safetensors')))"
    )
    done = gumiho("export", "--ckpt", "x", before=missing)
    assert done.returncode == 1
    assert done.stderr.endswith("pip install 'gumiho-export[export]'\n")
    assert done.stderr.count("\n") == 1


def test_options_are_the_settings() -> None:
    """What type checkers are told is what there is."""
    named = {field.name: field.type for field in fields(Settings)}
    del named["max_new_tokens"], named["speculate"]
    assert {name: str(kind) for name, kind in Options.__annotations__.items()} == {
        n: str(kind) for n, kind in named.items()
    }


def test_an_unknown_setting_is_told_with_the_closest(demo_bundle: Path) -> None:
    with load(demo_bundle) as model:
        with pytest.raises(GumihoError, match="^there is no setting 'temprature': did you mean 'temperature'\\?$"):
            model.generate(PROMPT, temprature=1.0)  # type: ignore[call-arg]
        with pytest.raises(GumihoError, match="^there is no setting 'qqq': choose from max_new_tokens, "):
            model.session().generate(PROMPT, qqq=1)  # type: ignore[call-arg]


def test_one_stop_string(demo_bundle: Path) -> None:
    with load(demo_bundle) as model:
        plain = "".join(model.generate(PROMPT, 24))
        end = plain[8:11]
        assert (
            "".join(model.generate(PROMPT, 24, stop=end))
            == "".join(model.generate(PROMPT, 24, stop=[end]))
            == plain.split(end)[0]
        )


@pytest.mark.parametrize("options", [{}, {"stop": "return"}, {"temperature": 1.0, "seed": 3}])
def test_the_text_of_a_generation(demo_bundle: Path, options: dict[str, object]) -> None:
    """However it is taken."""
    with load(demo_bundle) as model:
        taken = model.generate(PROMPT, 24, **options)  # type: ignore[arg-type]
        pieces = ""
        for piece in taken:
            pieces += piece
            assert taken.text.startswith(pieces)
        by_cycles = model.generate(PROMPT, 24, **options)  # type: ignore[arg-type]
        list(by_cycles.cycles())
        assert taken.text == by_cycles.text == pieces
        if not options:
            assert model.decode(taken.ids) == pieces
        assert repr(taken) == f"<Generation, {len(taken.ids)} tokens, {taken.finish_reason}>"


def test_what_a_model_knows_of_itself(make_bundle: MakeBundle) -> None:
    bundle = make_bundle(SMALL, "--capacity", "100")
    manifest = json.loads((bundle / "gumiho.json").read_text())
    with load(bundle) as model:
        assert (model.capacity, model.vocabulary_size) == (100, manifest["vocabulary"])
        assert model.eos_token_ids == tuple(manifest["eos_token_ids"])
        assert repr(model) == f"<Model of {bundle}, 100 positions, {manifest['vocabulary']} tokens>"
        assert repr(model.session()) == "<Session, 0 tokens>"
        with pytest.raises(GumihoError, match=f"there is no token {manifest['vocabulary']}: ids go from 0 to"):
            model.decode([0, manifest["vocabulary"]])
    assert repr(model).endswith("tokens, closed>")


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples(
    example: Path, demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each runs from another folder, and is accepted by mypy in strict mode."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), str(demo_bundle), str(demo_bundle)])
    runpy.run_path(str(example), run_name="__main__")
    out, err = capfd.readouterr()
    assert err == ""
    assert out.strip()
