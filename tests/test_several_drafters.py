"""Bundles with several drafters: each drafts as if it were alone, texts change between them, and none changes a
text."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError

from exporter.cli import main
from runtime import Model, load
from runtime.backends import backend
from runtime.bundle.reader import Bundle
from runtime.cli.checks.doctor import main as doctor
from runtime.cli.checks.selftest import results
from runtime.decoding import acceptance
from runtime.decoding.drafter_choice import DrafterChoice
from runtime.decoding.prices import Costs
from runtime.decoding.stats import Stats
from runtime.engines import summary
from runtime.engines.store import compile_engines
from runtime.errors import DamageError, GumihoError, InputError, MisuseError
from tests.conftest import DEMO, MakeBundle, examples
from tests.eagle3 import RandomEagle3
from tests.end_to_end import llama
from tests.heads import RandomHydra, RandomMedusa
from tests.pairs import SMALL, RandomPair
from tests.seal import edit, edit_golden
from tests.serving import client, served

# Of more layers than are traced, so that taps are moved in the repeated graph.
PAIR = RandomPair({"num_hidden_layers": 5, "head_dim": 16, "hidden_size": 96, "intermediate_size": 128}, seed=8)
# Those of the last two contain the names of graphs.
NAMES = "gumiho", "eagle3", "medusa", "a-draft", "an-extend"
PROMPTS = [[(5 * i * i + length) % 1000 + 2 for i in range(length)] for length in (1, 9, 140)]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the drafters by name, and their target."""
    folder = tmp_path_factory.mktemp("drafters")
    PAIR.write(folder / "pair")
    for name, made in (
        ("eagle3", RandomEagle3(PAIR, taps=(4, 0, 5))),
        ("medusa", RandomMedusa(PAIR)),
        ("an-extend", RandomHydra(PAIR)),
    ):
        (folder / f"{name}-pair").mkdir()
        made.write(folder / f"{name}-pair")  # type: ignore[attr-defined]
        (folder / f"{name}-pair/drafter").rename(folder / name)
    (folder / "pair/drafter").rename(folder / "gumiho")
    RandomPair({"num_hidden_layers": 3}, seed=4).make_target().save_pretrained(folder / "a-draft")
    return folder


def argv(drafters: Path, names: Sequence[str], out: Path) -> list[str]:
    return [
        "--ckpt",
        *(str(drafters / name) for name in names),
        "--target",
        str(drafters / "pair/target"),
        "--out",
        str(out),
        "--rows",
        "8",
        "--capacity",
        "200",
        "--draft-weights",
        "none",
    ]


@pytest.fixture(scope="module")
def bundle(drafters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("several") / "out"
    assert main([*argv(drafters, NAMES, out), "--validate"]) == 0
    return out


def cycles(model: Model, prompt: Sequence[int], **options: Any) -> list[tuple[Any, ...]]:
    """What every cycle drafted and emitted, in whole trees."""
    generation = model.generate(prompt, 24, rows=8, trace=True, **options)
    return [(cycle.tokens, cycle.tree and (cycle.tree.tokens, cycle.tree.parents)) for cycle in generation.cycles()]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("eagle3", "an-extend") else pytest.mark.exhaustive) for name in NAMES],
)
def test_each_drafts_as_if_it_were_alone(name: str, bundle: Path, drafters: Path, tmp_path: Path) -> None:
    assert main(argv(drafters, [name], tmp_path / "alone")) == 0
    with load(bundle) as model, load(tmp_path / "alone") as alone:
        assert tuple(model.bundle.manifest.drafters) == NAMES
        assert model.bundle.manifest.hidden == 96 * (1 + 3) + 3
        for prompt in PROMPTS:
            assert cycles(model, prompt, drafter=name) == cycles(alone, prompt)
            assert model.decoders.drafter == name


def test_texts_are_transformers_whoever_drafts(bundle: Path, drafters: Path) -> None:
    target = drafters / "pair/target"
    with load(bundle, streams=2) as model:
        for prompt in PROMPTS:
            for name in (*NAMES, None):
                generation = model.generate(prompt, 20, drafter=name)
                list(generation.cycles())
                llama.assert_same(target, prompt, generation.ids, llama.generate(target, [prompt], 20)[0])
        drawn = [model.generate(PROMPTS[1], 30, temperature=1.0, seed=5, drafter=name) for name in NAMES[:1]]
        texts = {tuple(token for cycle in one.cycles() for token in cycle.tokens) for one in drawn}
        for name in NAMES:
            one = model.streams[1].generate(PROMPTS[1], 30, temperature=1.0, seed=5, drafter=name)
            texts.add(tuple(token for cycle in one.cycles() for token in cycle.tokens))
        assert len(texts) == 1


def test_a_session_goes_on_with_another_drafter(bundle: Path, drafters: Path, tmp_path: Path) -> None:
    with load(bundle) as model:
        session, text = model.session(), list(PROMPTS[2])
        for name in (*NAMES, *NAMES[:2]):
            turn = session.generate(text, 6, drafter=name)
            list(turn.cycles())
            assert len(turn.ids) == 6
            llama.assert_same(
                drafters / "pair/target", text, turn.ids, llama.generate(drafters / "pair/target", [text], 6)[0]
            )
            text = [*session.ids, 7]


def test_what_the_target_has_read_is_not_read_again(bundle: Path) -> None:
    """Medusa reads nothing of a text before its last row; the others read the last part again."""
    with load(bundle) as model:
        session = model.session()
        list(session.generate(PROMPTS[2], 4, drafter="gumiho").cycles())
        turn = session.generate([*session.ids, 5], 4, drafter="medusa")
        list(turn.cycles())
        assert turn.stats.cached_tokens >= len(PROMPTS[2])
        one, other = model.decoders._made.values()
        assert one.target is other.target


def test_a_saved_session_and_another_stream_keep_their_drafter(bundle: Path, tmp_path: Path) -> None:
    with load(bundle, streams=2) as model:
        session = model.session()
        list(session.generate(PROMPTS[1], 8, drafter="eagle3").cycles())
        session.save(tmp_path / "saved")
        list(model.generate(PROMPTS[1], 3, drafter="a-draft").cycles())
        again = model.session(tmp_path / "saved")
        assert model.decoders.drafter == "eagle3"
        assert again.ids == session.ids
        turn = again.generate([*again.ids, 3], 4, drafter="eagle3")
        list(turn.cycles())
        assert turn.stats.cached_tokens > len(PROMPTS[1])
        other = model.streams[1]
        list(other.generate(PROMPTS[0], 3, drafter="medusa").cycles())
        assert other.adopt(model, [*again.ids])
        assert other.decoders.drafter == "eagle3"


def test_without_a_name_the_fastest_drafts(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(bundle) as model:
        used = []
        for _ in range(len(NAMES)):
            generation = model.generate(PROMPTS[1], 8)
            list(generation.cycles())
            used.append(generation.drafter)
        assert used == list(NAMES), "each once, in turn"
        speeds = model._loaded.choices[0].speeds()
        assert model.generate(PROMPTS[1], 8).drafter == max(speeds, key=lambda name: speeds[name])
        plain = model.generate(PROMPTS[1], 8, speculate=False)
        list(plain.cycles())
        assert model._loaded.choices[0].speeds() == speeds, "plain texts say nothing about drafters"


@given(st.lists(st.tuples(*[st.floats(1, 100)] * 3), min_size=60, max_size=90))
@examples(30)
def test_the_fastest_has_most_texts_and_the_others_their_turn(speeds: list[tuple[float, ...]]) -> None:
    choice, names = DrafterChoice(["a", "b", "c"]), ["a", "b", "c"]
    chosen = []
    for tokens_a_second in speeds:
        before = choice.speeds()
        chosen.append(choice.next())
        if all(before.values()):
            ranked = max(before, key=lambda name: before[name])
            assert chosen[-1] == ranked or (len(chosen) - 3) % 8 == 0
        stats = Stats(cycles=10, cycle_tokens=40, target_ns=int(40e9 / tokens_a_second[names.index(chosen[-1])]))
        choice.record(chosen[-1], stats)
    assert chosen[:3] == names
    turns = [name for i, name in enumerate(chosen) if i > 2 and (i - 2) % 8 == 0]
    assert len(turns) > 6
    choice.record("a", Stats())  # a text of one token says nothing
    assert choice.speeds()["a"] > 0


@pytest.mark.exhaustive
def test_one_bundle_for_every_backend(drafters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The graphs of all pass the static checks of an export, and share one target."""
    options = ["--backend", "cpu", "cuda", "migraphx", "tensorrt"]
    names = "eagle3", "medusa"
    assert main([*argv(drafters, names, tmp_path / "out"), *options]) == 0
    raw = json.loads((tmp_path / "out/gumiho.json").read_text())
    assert {"several-drafters", "stateless-drafter"} <= set(raw["requires"])
    for form in raw["forms"].values():
        own = {name for name in form["graphs"] if not name.startswith(("target", "shared"))}
        assert own == {"draft", "extend", "draft.medusa"}
    assert doctor([str(tmp_path / "out"), "--backend", "cpu"]) == 0
    said = capsys.readouterr().out
    assert all(f"drafter {name}: depth" in said for name in names)


@pytest.mark.exhaustive
def test_what_calibrating_changes_is_validated_for_all(drafters: Path, tmp_path: Path) -> None:
    """In int8 the target's matrices are smoothed, and errors above their limits fail the export. The drafters are fp32,
    which leaves no room for the target's."""
    options = "--weights", "int8", "--validate"
    assert main([*argv(drafters, ("gumiho", "a-draft"), tmp_path / "out"), *options]) == 0


HOSTILE = {
    "a graph of no drafter": (lambda raw: _rename(raw, "draft.a-draft", "draft.other"), "none of the drafters"),
    "one drafter": (lambda raw: _only_first(raw), "drafters has 1, expected two or more"),
    "a drafter left out": (lambda raw: raw["drafters"].pop("medusa"), "none of the drafters"),
    "no drafters": (lambda raw: raw.update(drafters={}), "none of the drafters"),
    "another first": (lambda raw: raw.update(depth=3), "not those of the first"),
    "a missing graph": (
        lambda raw: raw["forms"]["cpu"]["graphs"].pop("extend.a-draft"),
        "has caches and there is no graph",
    ),
    "a missing draft": (lambda raw: raw["forms"]["cpu"]["graphs"].pop("draft.medusa"), "no graph 'draft'"),
    "other rows": (lambda raw: raw["drafters"]["a-draft"]["tree"].update(rows=7), "drafters.a-draft has depth"),
    "too deep": (lambda raw: raw["drafters"]["a-draft"].update(depth=8), "drafters.a-draft has depth 8"),
    "a name that is a path": (
        lambda raw: raw["drafters"].update({"../x": raw["drafters"]["a-draft"]}),
        "the name of a drafter",
    ),
    "a feature left out": (lambda raw: raw["requires"].remove("several-drafters"), "expected 'several-drafters'"),
}


def _only_first(raw: dict[str, Any]) -> None:
    raw["drafters"] = {NAMES[0]: raw["drafters"][NAMES[0]]}
    for form in raw["forms"].values():
        form["graphs"] = {name: graph for name, graph in form["graphs"].items() if "." not in name}


def _rename(raw: dict[str, Any], old: str, new: str) -> None:
    graphs = raw["forms"]["cpu"]["graphs"]
    graphs[new] = graphs.pop(old)


@pytest.mark.parametrize("case", HOSTILE)
def test_manifests_that_contradict_themselves(case: str, bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    change, said = HOSTILE[case]
    edit(copy, change)
    with pytest.raises(DamageError, match=said):
        load(copy)


def test_numbers_of_a_small_scale_are_checked_beside_large_ones(bundle: Path, tmp_path: Path) -> None:
    """Beside digits of up to 255 a change of 0.05 in normed rows is within the tolerance of whole rows."""
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)

    def change(run: dict[str, Any]) -> None:
        run["prompt.hidden"][0, 7] += 0.05

    edit_golden(copy, change)
    with pytest.raises(GumihoError, match="target engine is discarded, since it differs"):
        compile_engines(Bundle(copy), backend("cpu"))


def test_a_drafter_that_is_not_there(bundle: Path, make_bundle: MakeBundle) -> None:
    one = make_bundle(SMALL, "--capacity", "100")
    with (
        load(bundle) as model,
        pytest.raises(InputError, match="no drafter 'x': give one of gumiho, eagle3, medusa, a-draft, an-extend"),
    ):
        model.generate([5], drafter="x")
    with load(one) as model, pytest.raises(InputError, match="no drafter 'x': it has one at most, so leave"):
        model.generate([5], drafter="x")
    with load(one) as model, pytest.raises(InputError, match="drafter is 5: give the name of a drafter"):
        model.generate([5], drafter=5)  # type: ignore[arg-type]


def test_the_selftest_tries_every_drafter(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop accepts what was drafted, whatever the target chooses, with one of them only, that one is named."""
    walk = acceptance.accept_path
    with load(bundle) as model:

        def wrong(tokens: Sequence[int], parents: Sequence[int], take: Callable[[int], int | None]) -> list[int]:
            if model.decoders.drafter != "medusa" or len(tokens) < 2:
                return walk(tokens, parents, take)
            owner = take.__self__  # type: ignore[attr-defined]
            if owner.selector.add(tokens[1]) is None:
                return [0]
            take(1)
            return [0, 1]

        monkeypatch.setattr(acceptance, "accept_path", wrong)
        identities = takewhile(lambda result: result.name.startswith("identity"), results(model, 1, 16, 1))
        found = {result.name: result.holds for result in identities}
    assert len(found) == 6 * len(NAMES)
    assert "identity, drafter a-draft, greedy" in found
    assert {name.split(", ")[1] for name, holds in found.items() if not holds} == {"drafter medusa"}


def test_the_doctor_says_what_each_costs(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = {"gumiho": Costs({1: 10.0, 8: 12.0}, 7.0, 1.0), "medusa": Costs({1: 10.0, 8: 12.0}, 0.0, 1.0)}
    said = summary.performance(Bundle(bundle), "cpu", costs)
    assert "drafter gumiho: estimate from the passes measured here: speed-up = tau / 1.82: " in "\n".join(said)
    assert "drafter medusa: estimate from the passes measured here: speed-up = tau / 1.18: " in "\n".join(said)
    assert doctor([str(bundle), "--backend", "cpu"]) == 0
    lines = capsys.readouterr().out
    assert all(f"cpu: drafter {name}: a plain pass reads " in lines for name in NAMES)


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        (("gumiho", "gumiho"), (), "two drafters of --ckpt would have the name 'gumiho'"),
        (("gumiho", "eagle3"), ("--family", "gumiho"), "--family is of one drafter, and --ckpt names 2"),
        (("gumiho", "medusa"), ("--backend", "vllm"), "vllm writes one drafter"),
        (("gumiho", "medusa"), ("--serial-steps", "2"), "drafter .*medusa' has 0|leave it out"),
        (("gumiho", "eagle3"), ("--head-top-k", "2"), "eagle3' has no heads: leave --head-top-k out"),
        (("medusa", "gumiho"), ("--draft-tree", "static"), "--draft-tree static is for"),
        (
            ("gumiho",),
            ("--family", "eagle"),
            "is eagle, but drafter .* has 2 serial layers and 2 heads, and is a gumiho",
        ),
        (("gumiho",), ("--family", "medusa"), "is medusa, but drafter .* has no tensor such as '0.0.linear.weight'"),
        (
            ("a-draft",),
            ("--family", "eagle3"),
            "is eagle3, but drafter .* has no tensor such as 'layers.0.hidden_norm.weight'",
        ),
        (("a-draft",), ("--family", "eagle"), "is eagle, but drafter .* has no tensor such as 'fc.weight'"),
    ],
)
def test_what_cannot_be_exported(
    names: tuple[str, ...],
    options: tuple[str, ...],
    said: str,
    drafters: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = argv(drafters, names, tmp_path / "out")
    if "vllm" in options:
        arguments = arguments[:-6]
    assert main([*arguments, *options]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    assert re.search(said, message), message
    assert not (tmp_path / "out").exists()


def test_a_family_that_tensors_tell_may_be_named(
    drafters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, family in zip(NAMES, ("gumiho", "eagle3", "medusa", "small", "hydra"), strict=True):
        assert main([*argv(drafters, [name], tmp_path / name), "--family", family, "--dry-run"]) == 0
    assert "Draft tree" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_server_takes_a_drafter(demo_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "itself").symlink_to(DEMO / "target")
    out = tmp_path / "out"
    sources = ["--ckpt", str(DEMO / "drafter"), str(tmp_path / "itself"), "--target", str(DEMO / "target")]
    assert main([*sources, "--out", str(out)]) == 0
    with load(out) as model, served(model) as address:
        ask = client(address).completions.create
        texts = {
            ask(model="demo", prompt="def f(", max_tokens=12, temperature=0, extra_body=extra).choices[0].text
            for extra in ({}, {"drafter": "itself"}, {"drafter": "drafter"})
        }
        assert len(texts) == 1
        with pytest.raises(BadRequestError, match="no drafter 'x'"):
            ask(model="demo", prompt="def f(", max_tokens=12, extra_body={"drafter": "x"})


def test_closing_frees_every_decoder(bundle: Path) -> None:
    model = load(bundle)
    for name in NAMES:
        list(model.generate(PROMPTS[0], 3, drafter=name).cycles())
    engines = dict(model._loaded.engines)
    assert len(engines) == 1 + len(NAMES) + 3  # target, drafts, extensions of those with caches
    model.close()
    model.close()
    for engine in engines.values():
        with pytest.raises(MisuseError, match="closed"):
            engine.bind({})
    with pytest.raises(GumihoError, match="closed"):
        model.generate(PROMPTS[0], 3)
