"""The runtime as people embed it: imports, threads, limits, streaming, errors."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from exporter import cli
from runtime import Cycle, GumihoError, InputError, MisuseError, Model, load
from runtime.backends import backend
from runtime.backends.onnxruntime_engine import Engine
from runtime.bundle.manifest_reader import parse_manifest
from runtime.bundle.reader import Bundle
from runtime.bundle.records import sealed
from runtime.cli.compile import main as compile_bundle
from runtime.decoding.decoder import Decoder
from runtime.engines.store import compile_engines
from tests.conftest import DEMO, MakeBundle
from tests.pairs import SMALL, RandomPair
from tests.seal import edit, update

# whose rows are rounded to int8
ROUNDED = RandomPair({"vocab_size": 40, "hidden_size": 96, "intermediate_size": 64}, seed=5)
PROMPT = "def main(argv=None):\n    parser = argparse.ArgumentParser("


def test_runtime_imports_nothing_heavy(demo_bundle: Path) -> None:
    """A whole generation in a fresh interpreter."""
    code = f"""
import sys
from runtime import load
with load({str(demo_bundle)!r}) as model:
    assert "".join(model.generate({PROMPT!r}, max_new_tokens=32))
heavy = {{"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "exporter", "graphs",
    "safetensors"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_text_is_the_tokens_text(demo_bundle: Path) -> None:
    with load(demo_bundle) as model:
        generation = model.generate(PROMPT, 100)
        text = "".join(generation)
        tokenizer = Tokenizer.from_file(str(DEMO / "target/tokenizer.json"))
        assert PROMPT + text == tokenizer.decode(model.encode(PROMPT) + generation.ids, skip_special_tokens=True)
        assert len(generation.ids) == generation.stats.tokens <= 100
        assert model.encode(PROMPT) == tokenizer.encode(PROMPT).ids


def pieces_of(model: Model, prompt: list[int], ids: list[int]) -> list[str]:
    """The text of a generation that emits the given ids, one a cycle."""
    generation = model.generate(prompt, 1)

    def cycles() -> Iterator[Cycle]:
        for token in ids:
            generation.ids.append(token)
            yield Cycle((token,), 1, (0,), None)

    generation.cycles = cycles  # type: ignore[method-assign]
    return list(generation)


def test_streams_whole_characters(demo_bundle: Path) -> None:
    """Multi-byte characters arrive in one piece, wherever the byte-level tokens are cut."""
    wanted = "naïve 数学 🦊🦊 Ωμέγα"
    with load(demo_bundle) as model:
        ids = model.bundle.tokenizer.encode(wanted, add_special_tokens=False).ids
        pieces = pieces_of(model, [0, 5], ids)
        assert "".join(pieces) == wanted
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert "".join(pieces_of(model, [0, 5], ids[:-1])).startswith(wanted[:-1])


def test_the_space_behind_the_prompt_is_kept(demo_bundle: Path) -> None:
    """Tokenizers of Llama 2's kind drop a text's leading space; a continuation is not the beginning of a text."""
    words = ["<unk>", "▁The", "▁capital", "▁is", "▁Pa", "ris"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    with load(demo_bundle) as model:
        model.bundle.__dict__["tokenizer"] = tokenizer
        assert "".join(pieces_of(model, [1, 2], [3, 4, 5])) == " is Paris"


@pytest.mark.parametrize("speculate", [True, False])
def test_max_new_tokens_is_exact(demo_bundle: Path, speculate: bool) -> None:
    with load(demo_bundle) as model:
        whole = model.generate(PROMPT, 31)
        list(whole.cycles())
        for count in (0, 1, 2, 3, 5, 8, 13, 31):
            generation = model.generate(PROMPT, count, speculate)
            emitted = [token for cycle in generation.cycles() for token in cycle.tokens]
            assert emitted == generation.ids == whole.ids[:count]
            assert generation.finish_reason == "length" or whole.finish_reason == "stop"


def test_nothing_behind_an_end_of_text(demo_bundle: Path, tmp_path: Path) -> None:
    """Any of several end-of-text ids ends it, also in the middle of an accepted block."""
    with load(demo_bundle) as model:
        free = model.generate(PROMPT, 40)
        borders = set(accumulate(len(cycle.tokens) for cycle in free.cycles()))
    middle = 0
    for end in list(dict.fromkeys(free.ids))[:5]:  # the first one comes of the prompt itself
        bundle = tmp_path / str(end)
        shutil.copytree(demo_bundle, bundle, copy_function=os.link)
        edit(bundle, lambda raw: raw.update(eos_token_ids=[2047, end]))  # noqa: B023
        with load(bundle) as model:
            generation = model.generate(PROMPT, 40)
            list(generation.cycles())
            assert generation.ids == free.ids[: free.ids.index(end) + 1]
            assert generation.finish_reason == "stop"
            assert generation.stats.tokens == len(generation.ids)
            assert generation.stats.cycle_tokens == len(generation.ids) - 1
            assert len(model.decoder.cached) == len(generation.prompt) + len(generation.ids) - 1
            middle += len(generation.ids) not in borders
        shutil.rmtree(bundle)
    assert middle, "no end fell inside an accepted block: the test proves too little"


def test_several_bundles_and_threads(make_bundle: MakeBundle, demo_bundle: Path) -> None:
    """Two bundles side by side, each driven from its own thread, give what each gives alone."""
    other = make_bundle(SMALL, "--capacity", "100")

    def alone(path: Path, prompt: list[int]) -> list[int]:
        with load(path) as model:
            generation = model.generate(prompt, 40)
            list(generation.cycles())
            return generation.ids

    jobs = [(demo_bundle, [0, 5, 9, 700]), (other, [3, 4, 5]), (demo_bundle, [0, 300, 301])]
    expected = [alone(*job) for job in jobs]
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = alone(*jobs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(jobs))] == expected


def test_a_newer_generation_ends_the_older(demo_bundle: Path) -> None:
    with load(demo_bundle) as model:
        older = model.generate(PROMPT, 50).cycles()
        next(older)
        newer = model.generate(PROMPT, 20)
        ids = [t for c in newer.cycles() for t in c.tokens]
        with pytest.raises(GumihoError, match="another generation"):
            next(older)
        again = model.generate(PROMPT, 20)
        list(again.cycles())
        assert again.ids == ids


def test_close(demo_bundle: Path) -> None:
    model = load(demo_bundle)
    running = model.generate(PROMPT, 50).cycles()
    next(running)
    model.close()
    model.close()
    for call in (lambda: next(running), lambda: model.generate(PROMPT, 5)):
        with pytest.raises(GumihoError, match="closed"):
            call()


def test_cycles_bind_and_allocate_nothing(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once warm, a cycle makes no binding, and the interpreter's heap grows by the text alone over hundreds of them."""
    import tracemalloc

    with load(demo_bundle) as model:
        cycles = model.generate([0, 5, 6, 7], 900)._steps
        for _ in range(20):
            next(cycles)

        def refuse(*_: object) -> None:
            raise AssertionError("bound in a cycle")

        monkeypatch.setattr(Engine, "bind", refuse)
        tracemalloc.start()
        before = tracemalloc.take_snapshot()
        tokens = sum(len(next(cycles).tokens) for _ in range(100))
        after = tracemalloc.take_snapshot()
        tracemalloc.stop()
        grown = sum(d.size_diff for d in after.compare_to(before, "filename") if "/runtime/" in str(d.traceback))
        assert grown < 2048 + 64 * tokens  # the text itself: ids, and places for them


def test_the_first_token_waits_for_the_target_alone(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter reads its part of the prompt behind it, all of it, before anything else is read."""
    prompt, passes = [0, *range(5, 400)], list[tuple[str, int]]()
    with load(demo_bundle) as model:
        names, bind = {id(engine): name for name, engine in model.decoder.engines.items()}, Engine.bind

        def logged(engine: Engine, buffers: dict[str, np.ndarray]) -> Callable[[], None]:
            call, entry = bind(engine, buffers), (names[id(engine)], len(buffers["tokens"]))
            return lambda: (passes.append(entry), call())[1]

        monkeypatch.setattr(Engine, "bind", logged)
        decoder = Decoder(
            model.bundle.manifest, model.bundle.manifest.form("cpu"), model.decoder.engines, model.decoder.device
        )
        monkeypatch.setitem(model.decoders._made, model.decoders.drafter, decoder)
        cycles = model.generate(prompt, 40).cycles()
        next(cycles)
        assert passes == [("target", 128)] * 3 + [("target", 12)]
        next(cycles)
        assert passes[4:] == [("extend", 128)] * 2 + [("draft", 1), ("target", 8)]
        assert decoder.draft.length == 4 + 252 + 1


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 5, "no tokens"),
        ([1] * 1025, 5, "1025 tokens and the bundle's capacity is 1024"),
        ([5, 2048], 5, "token id 2048, outside the vocabulary of 2048"),
        ([5, -1], 5, "token id -1"),
        ([5], -1, "max_new_tokens is -1"),
    ],
)
def test_refused_prompts(demo_bundle: Path, prompt: list[int], count: int, message: str) -> None:
    with load(demo_bundle) as model, pytest.raises(GumihoError, match=message):
        model.generate(prompt, count)


def test_damaged_bundles(demo_bundle: Path, tmp_path: Path) -> None:
    """Every file that is missing, short or of another format is named."""
    with pytest.raises(GumihoError, match="is not a bundle"):
        load(tmp_path / "nowhere")
    copy = tmp_path / "bundle"
    shutil.copytree(demo_bundle, copy)
    text = (copy / "gumiho.json").read_text()

    weights = copy / "weights/draft.bin"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(GumihoError, match=rf"draft.bin has {len(content) - 1} bytes, expected {len(content)}"):
        load(copy)
    weights.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    for read in (lambda: load(copy), lambda: Bundle(copy).verify()):
        with pytest.raises(GumihoError, match="draft.bin is damaged"):
            read()
    weights.unlink()
    with pytest.raises(GumihoError, match="lacks its file weights/draft.bin"):
        load(copy)
    weights.write_bytes(content)

    for broken in ("{", "[]", '{"format": 3}', json.dumps({**json.loads(text), "rows": 9}), sealed({"format": 3})):
        (copy / "gumiho.json").write_text(broken)
        with pytest.raises(GumihoError, match="is damaged"):
            load(copy)
    (copy / "gumiho.json").write_text(text.replace('"format": 3', '"format": 99'))
    with pytest.raises(GumihoError, match="format 99"):
        load(copy)
    (copy / "gumiho.json").write_text(text)

    shutil.rmtree(copy / "engines")
    with pytest.raises(GumihoError, match=r"no engines for backend 'cpu': run `gumiho compile"):
        load(copy)


def test_stale_engines_are_never_loaded(demo_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(demo_bundle, copy)
    folder = next((copy / "engines").glob("cpu-*"))
    edit(folder / "engine.json", lambda raw: raw["key"].update(onnxruntime="0.1"))
    folder.rename(folder.with_name("cpu-0"))
    with pytest.raises(GumihoError, match=r"compiled for onnxruntime 0.1, and here it is .*gumiho compile"):
        load(copy)
    assert compile_bundle([str(copy)]) == 0
    assert "golden run replayed" in capsys.readouterr().out
    load(copy).close()


def test_engines_that_fail_the_golden_run_are_not_kept(
    demo_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One exponent bit of one weight is enough."""
    copy = tmp_path / "bundle"
    shutil.copytree(demo_bundle, copy, ignore=shutil.ignore_patterns("engines"))
    weights = copy / "weights/target.bin"
    values = np.fromfile(weights, np.float32)
    values[: 192 * 2048] *= 1.5
    values.tofile(weights)
    update(copy, "weights/target.bin")
    assert compile_bundle([str(copy)]) == 1
    assert "differs from the golden run" in capsys.readouterr().err
    assert [path.name for path in (copy / "engines").iterdir()] == [".lock"]


def test_products_of_bytes_need_a_processor_that_does_not_overflow(
    make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runtime.backends.onnxruntime.overflows", lambda: True)
    ROUNDED.make_target().save_pretrained(tmp_path / "target")
    monkeypatch.setattr("exporter.recipe.precision.overflows", lambda: True)
    capsys.readouterr()
    command = [
        "--target",
        str(tmp_path / "target"),
        "--weights",
        "w8a8",
        "--capacity",
        "100",
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli.main(command) == 0
    done = capsys.readouterr()
    assert done.err.startswith("note: w8a8 needs a CPU with VNNI, which this one lacks")  # before anything is read
    assert "cpu: not compiled here, since w8a8 weights need a processor" in done.out
    bundle = Bundle(tmp_path / "out")
    bundle.verify()
    assert not (tmp_path / "out/engines").exists()
    with pytest.raises(GumihoError, match="need a processor .*VNNI.*: export with --weights w8a8-unsigned"):
        compile_engines(bundle, backend("cpu"))
    command[3] = "w8a8-unsigned"
    assert cli.main([*command, "--overwrite"]) == 0
    load(bundle.path).close()


def test_manifest_round_trip(demo_bundle: Path) -> None:
    manifest = Bundle(demo_bundle).manifest
    assert parse_manifest(manifest.to_json(), Path("x")) == manifest


def test_the_model_is_not_entered_twice(demo_bundle: Path, tmp_path: Path) -> None:
    """From a callback or a processor, which run inside a cycle; the model goes on being usable."""
    with load(demo_bundle) as model:
        session = model.session()
        tries: list[Callable[[], object]] = [
            lambda: session.save(tmp_path / "s"),
            lambda: model.generate("x", 3),
            lambda: session.generate("x", 3),
            model.close,
        ]
        for attempt in tries:
            for where in ("callback", "processors"):
                call = (lambda *_: attempt()) if where == "callback" else [lambda *_: attempt()]  # noqa: B023
                with pytest.raises(GumihoError, match="in the middle of a cycle"):
                    list(model.generate(PROMPT, 5, **{where: call}).cycles())
        assert not (tmp_path / "s").exists()
        assert "".join(model.generate(PROMPT, 5))


def test_a_broken_generation_does_not_go_on(demo_bundle: Path) -> None:
    def fails(token: int, text: str) -> None:
        seen.append(token)
        if len(seen) == 5:
            raise ZeroDivisionError

    seen: list[int] = []
    with load(demo_bundle) as model:
        generation = model.generate(PROMPT, 50, callback=fails)
        with pytest.raises(ZeroDivisionError):
            list(generation)
        with pytest.raises(GumihoError, match="broken off by an error"):
            list(generation)
        assert len(list(model.generate(PROMPT, 5).cycles())) > 0


def test_the_last_cycle_says_why(demo_bundle: Path) -> None:
    with load(demo_bundle) as model:
        assert list(model.generate(PROMPT, 50, max_seconds=0.0).cycles())[-1].finish_reason == "time"
        generation = model.generate(PROMPT, 900, callback=lambda *_: generation.cancel())
        assert list(generation.cycles())[-1].finish_reason == "cancelled"


def test_pieces_behind_cycles(demo_bundle: Path) -> None:
    """Go on where the cycles stopped, with whole characters."""
    with load(demo_bundle) as model:
        whole = "".join(model.generate(PROMPT, 40))
        generation = model.generate(PROMPT, 40)
        first = next(generation.cycles())
        behind = "".join(generation)
        assert "".join(model.generate(PROMPT, len(first.tokens))) + behind == whole


@pytest.mark.parametrize("prompt", [b"def f", None, [[1, 2]], [1.5], 7])
def test_prompts_of_other_kinds(demo_bundle: Path, prompt: object) -> None:
    with load(demo_bundle) as model, pytest.raises(GumihoError, match="neither text nor a list of token ids"):
        model.generate(prompt)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(demo_bundle: Path) -> None:
    with load(demo_bundle) as model:
        ids = []
        for kind in (int, np.int64):
            generation = model.generate(
                np.array([5, 6, 7]), kind(20), seed=kind(3), temperature=np.float32(1), banned=np.array([9])
            )
            list(generation.cycles())
            ids.append(generation.ids)
        assert ids[0] == ids[1]
    load(demo_bundle, threads=np.int64(1)).close()  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1.0, "2", None, -1, 1 << 40, np.float32(1)])
def test_threads_that_are_no_number_of_threads(demo_bundle: Path, threads: object) -> None:
    with pytest.raises(InputError, match=re.escape(f"threads is {threads!r}: give 0 for as many as")):
        load(demo_bundle, threads=threads)  # type: ignore[arg-type]


def test_causes_have_their_own_exceptions(demo_bundle: Path) -> None:
    with load(demo_bundle, threads=1) as model:
        for prompt, options in (
            ([], {}),
            ([1, 2048], {}),
            ([1] * 2000, {}),
            (PROMPT, {"temperature": -1.0}),
            (PROMPT, {"warmth": 1}),
        ):
            with pytest.raises(InputError):
                model.generate(prompt, **options)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="there is no token 2048"):
            model.decode([2048])
        first = model.generate(PROMPT, 8)
        model.generate(PROMPT, 8)
        with pytest.raises(MisuseError, match="another generation was started"):
            next(iter(first))
    with pytest.raises(MisuseError, match="the model is closed"):
        model.generate(PROMPT)


def test_events_are_logged_under_one_name(demo_bundle: Path) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    root, gumiho = logging.getLogger(), logging.getLogger("gumiho")
    root.addHandler(handler)
    gumiho.setLevel("DEBUG")
    try:
        with load(demo_bundle, threads=1) as model:
            list(model.generate(PROMPT, 5))
    finally:
        gumiho.setLevel(logging.NOTSET)
        root.removeHandler(handler)
    messages = {record.getMessage(): record.levelname for record in records if record.name.startswith("gumiho.")}
    assert [
        level for message, level in messages.items() if message.startswith(f"loaded {demo_bundle} for cpu in ")
    ] == ["INFO"]
    ended = [
        level
        for message, level in messages.items()
        if message.startswith("generation ended: {") and "'tokens': 5" in message
    ]
    assert ended == ["DEBUG"]


def test_nothing_is_printed_where_no_logging_is_set_up(demo_bundle: Path) -> None:
    code = f"from runtime import load\nwith load({str(demo_bundle)!r}) as model: list(model.generate('x', 3))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
