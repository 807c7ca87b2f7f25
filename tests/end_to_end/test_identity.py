"""With every setting, the text is the same with and without speculation, and it is the one that the target means.

Plain and speculative decoding are compared token by token, for trees of every kind; the tokens with what transformers'
own processors and the documented noise make of the target's logits; and what is drawn with the distribution itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from runtime import Generation, Model, load
from runtime.decoding.cycle import Cycle
from runtime.decoding.grammar import Grammar
from runtime.decoding.noise import noise
from runtime.engines.devices import DeviceArray
from tests.conftest import DEMO, EVERY_BACKEND, MakeBundle
from tests.end_to_end import llama
from tests.end_to_end.test_forms import opened
from tests.end_to_end.test_lossless import ODD, demo_prompts
from tests.pairs import RandomPair
from tests.test_sampling import p_value, their_logits, their_row
from tests.test_text import text_and_length

# So few tokens that a drafter which knows nothing is right now and then, and many in a row are accepted.
TINY = RandomPair({"vocab_size": 13}, layers=1, heads=3, seed=21, scale=4.0)
SMALL = (DEMO, *EVERY_BACKEND)  # of which the CPU's form is used
BUNDLES = [
    SMALL,
    (DEMO, "--capacity", "80", "--rows", "64"),
    (DEMO, "--capacity", "40", "--rows", "6", "--draft-tree", "chain", "--draft-vocab", "512"),
    (ODD[0][0], "--capacity", "200", *ODD[0][1]),
    (TINY, "--capacity", "64", "--rows", "2"),
    (TINY, "--capacity", "64", "--rows", "16", "--draft-tree", "reference", "--draft-vocab", "9"),
    (TINY, "--capacity", "64", "--rows", "64"),
]
END = 1  # ends the texts of all of them
NAMES = ["8", "64", "chain", "random 4", "tiny 2", "tiny reference", "tiny 64"]


def words(count: int) -> Tokenizer:
    """A tokenizer for pairs without one, whose tokens are short and alike, so that stop strings lie in and over
    them."""
    spelled = ["".join(letters) for n in range(1, 6) for letters in product("ab \n", repeat=n)][:count]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(spelled)}, []))
    made.decoder = decoders.Fuse()
    return made


@contextmanager
def spelling(bundle: Path) -> Iterator[Model]:
    """A loaded bundle that has a tokenizer."""
    with load(bundle, "cpu", threads=1) as model:
        if not model.bundle.has_tokenizer:
            model.bundle.__dict__["tokenizer"] = words(model.bundle.manifest.vocabulary)
        yield model


USUAL = ("8", "random 4", "tiny reference")  # a trained drafter, one that is never right, and every other option


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(made, id=name, marks=() if name in USUAL else pytest.mark.exhaustive)
        for made, name in zip(BUNDLES, NAMES, strict=True)
    ],
)
def model(make_bundle: MakeBundle, request: pytest.FixtureRequest) -> Iterator[Model]:
    with spelling(make_bundle(*request.param)) as model:
        yield model


def decode(model: Model, ids: Sequence[int]) -> str:
    return model.bundle.tokenizer.decode(list(ids), skip_special_tokens=True)


def finished(model: Model, prompt: Sequence[int], count: int = 24, **settings: Any) -> list[int]:
    generation = model.generate(prompt, count, **settings)
    list(generation.cycles())
    return generation.ids


def watched(generation: Generation) -> tuple[str, list[Cycle]]:
    """The text of a generation, as its pieces come, and its steps."""
    seen: list[Cycle] = []
    cycles = generation.cycles

    def recorded() -> Iterator[Cycle]:
        for cycle in cycles():
            seen.append(cycle)
            yield cycle

    generation.cycles = recorded  # type: ignore[method-assign]
    return "".join(generation), seen


def counted_right(model: Model, generation: Generation, cycles: list[Cycle]) -> None:
    """Of what was emitted, every token is in one step, is counted, and all but the last are in the cache; and nothing
    else is."""
    ids, stats = generation.ids, generation.stats
    assert [token for cycle in cycles for token in cycle.tokens] == ids
    assert [cycle.finish_reason for cycle in cycles] == [None] * (len(cycles) - 1) + [generation.finish_reason]
    assert (stats.tokens, stats.cycles, stats.cycle_tokens) == (len(ids), len(cycles) - 1, len(ids) - 1)
    assert all(len(cycle.path) == len(cycle.tokens) for cycle in cycles[1:])
    assert stats.accepted == [
        sum(len(cycle.tokens) > depth for cycle in cycles[1:])
        for depth in range(1, max((len(c.tokens) for c in cycles[1:]), default=1))
    ]
    assert stats.tau == ((len(ids) - 1) / stats.cycles if stats.cycles else 0)
    assert model.decoder.cached == [*generation.prompt, *ids[:-1]]


def the_same(model: Model, prompt: Sequence[int], count: int = 24, **settings: Any) -> tuple[list[int], list[Cycle]]:
    """Generates in both ways and compares all there is. Returns the ids and the speculative steps."""
    plain = model.generate(prompt, count, False, **settings)
    plain_text, plain_cycles = watched(plain)
    fast = model.generate(prompt, count, True, **settings)
    text, cycles = watched(fast)
    assert (fast.ids, text, fast.finish_reason) == (plain.ids, plain_text, plain.finish_reason)
    assert fast.finish_reason != "length" or len(fast.ids) == count
    counted_right(model, fast, cycles)
    assert model.decoder.cached == [*prompt, *plain.ids[:-1]]
    stop, least = settings.get("stop", ()), settings.get("min_new_tokens", 0)
    assert (text, len(fast.ids)) == text_and_length(model.bundle.tokenizer, prompt, fast.ids, stop, least)
    assert plain.stats.accepted == []
    assert plain.stats.draft_ns == 0
    assert plain.stats.tau == (1.0 if len(plain.ids) > 1 else 0.0)
    assert all((cycle.rows, cycle.path) == (1, (0,)) for cycle in plain_cycles[1:])
    return fast.ids, cycles


def wavering(ids: Sequence[int], row: np.ndarray) -> None:
    """Depends on where it is, and on what came before."""
    row[len(ids) % 7 :: 7] -= 2.0
    row[ids[-1]] -= 1.0
    row[ids[-2] % len(row)] += 1.5


def grid(vocabulary: int, text: str) -> Mapping[str, dict[str, Any]]:
    """text: a greedy continuation, of which stop strings are taken."""
    some = [(7 * i + 3) % vocabulary for i in range(max(2, vocabulary // 8))]
    everything = {
        "temperature": 1.1,
        "top_k": vocabulary // 2,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "no_repeat_ngram": 4,
        "logit_bias": {some[1]: 1.5, 3: -0.5},
        "banned": some[:1],
        "forced": {2: some[1], 7: some[1]},
        "processors": [wavering],
        "min_new_tokens": 5,
        "stop_token_ids": some[1:],
        "stop": [text[5:8], text[-4:]],
    }
    return {
        "greedy": {},
        "temperature": {"temperature": 1.0},
        "hot": {"temperature": 2.5},
        "top_k": {"temperature": 1.0, "top_k": max(3, vocabulary // 50)},
        "top_p": {"temperature": 1.0, "top_p": 0.85},
        "min_p": {"temperature": 1.3, "min_p": 0.05},
        "filters": {"temperature": 0.7, "top_k": max(5, vocabulary // 30), "top_p": 0.9, "min_p": 0.02},
        "repetition": {"repetition_penalty": 1.3},
        "repetition and temperature": {"repetition_penalty": 1.1, "temperature": 0.8},
        "presence and frequency": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "temperature": 0.9},
        "n-gram": {"no_repeat_ngram": 2},
        "n-gram and temperature": {"no_repeat_ngram": 3, "temperature": 1.0},
        "bias and bans": {"logit_bias": dict.fromkeys(some[::2], 3.0), "banned": some[1::2], "temperature": 0.9},
        "greedy bias": {"logit_bias": dict.fromkeys(some, 2.0)},
        "forced": {"forced": {0: some[0], 3: some[1], 4: some[1], 9: 2}, "temperature": 0.8},
        "processors": {"processors": [wavering], "temperature": 0.8},
        "greedy processors": {"processors": [wavering, lambda _, row: np.negative(row[::5], out=row[::5])]},
        "stop tokens": {"stop_token_ids": some, "temperature": 1.0},
        "stop tokens late": {"stop_token_ids": some, "temperature": 1.0, "min_new_tokens": 9},
        "stop strings": {"stop": [text[i : i + 3] for i in (3, 9)] + [text[12:16]]},
        "stop strings and temperature": {"stop": [text[18:20], text[22:25]], "temperature": 0.7},
        "everything": everything,
    }


def greedy_text(model: Model, prompt: Sequence[int]) -> str:
    """Of 24 tokens, kept from ending, so that stop strings can be taken of it."""
    return decode(model, [*prompt, *finished(model, prompt, logit_bias={END: -1000.0})])[len(decode(model, prompt)) :]


def prompts_of(model: Model, length: int = 12) -> list[list[int]]:
    if model.bundle.manifest.vocabulary == 2048:
        return demo_prompts(model, 2, length, 31)
    draw = np.random.default_rng(length)
    return [draw.integers(2, model.bundle.manifest.vocabulary, length).tolist() for _ in range(2)]


def test_every_setting(model: Model) -> None:
    """22 settings, each from two prompts, whose seeds differ. Drafts are accepted and texts end within a block, but for
    the drafter that would have to guess one of 1009 tokens."""
    within, accepted, drawn = 0, dict[str, int](), set[tuple[int, ...]]()
    for own, prompt in zip((1, 2**63 + 5), prompts_of(model), strict=True):
        text = greedy_text(model, prompt)
        for name, settings in grid(model.bundle.manifest.vocabulary, text).items():
            for seed in (own, own + 1) if name in ("hot", "everything") else (own,):
                ids, cycles = the_same(model, prompt, **settings, seed=seed)
                accepted[name] = accepted.get(name, 0) + sum(len(cycle.tokens) - 1 for cycle in cycles[1:])
                within += cycles[-1].finish_reason == "stop" and len(cycles[-1].tokens) > 1
                drawn |= {tuple(ids)} if name == "hot" else set()
    assert len(drawn) == 4, "seeds are not told apart"
    assert sum(accepted.values()) > 10 or model.bundle.manifest.vocabulary == 1009, "hardly a draft was accepted"
    assert within or model.bundle.manifest.vocabulary == 1009, "no text ended within a block"
    assert all(accepted.values()) or model.bundle.manifest.vocabulary < 2048, "the trained drafter was never right"


def test_seeds_differ(model: Model) -> None:
    """And the same one gives the same text; where nothing is drawn it means nothing."""
    (prompt, _) = prompts_of(model)
    drawn = {"temperature": 1.5, "logit_bias": {END: -1000.0}}
    texts = [tuple(finished(model, prompt, **drawn, seed=seed)) for seed in [*range(8), 2**32, 2**63, 2**64 - 1]]
    assert len(set(texts)) == len(texts)
    assert texts[3] == tuple(finished(model, prompt, **drawn, seed=3, speculate=False))
    assert finished(model, prompt, seed=1) == finished(model, prompt, seed=2)


def test_the_last_positions(model: Model) -> None:
    """From every prompt length that leaves at most twelve, greedy and drawn: to the very last one, and not further."""
    capacity = model.bundle.manifest.capacity
    text = (prompts_of(model, 30)[0] * 7)[:capacity]
    ends = {END: -1000.0}
    for length in range(capacity - 12, capacity + 1):
        for drawn in ({}, {"temperature": 1.0, "seed": length}):
            ids, cycles = the_same(model, text[:length], 100, **drawn, logit_bias=ends)
            assert cycles[-1].finish_reason == "context"
            assert length + len(ids) == capacity + 1
            assert [cycle.rows for cycle in cycles[1:]] == [
                min(model.bundle.manifest.rows, capacity - length - sum(len(c.tokens) for c in cycles[: i + 1]) + 1)
                for i in range(len(cycles) - 1)
            ]
            if length >= capacity - 2:
                exact, _ = the_same(model, text[:length], len(ids), **drawn, logit_bias=ends)
                assert exact == ids


@pytest.mark.parametrize(
    "lengths", [(127, 128, 129, 130, 255, 256, 257, 300), (127, 128, 129, 170)], ids=["demo", "random"]
)
def test_prompts_of_several_chunks(make_bundle: MakeBundle, demo_bundle: Path, lengths: tuple[int, ...]) -> None:
    """Lengths around the edges of chunks of 128 rows."""
    with spelling(demo_bundle if 300 in lengths else make_bundle(*BUNDLES[3])) as model:
        for length in lengths:
            (prompt, _) = prompts_of(model, length)
            the_same(model, prompt)
            the_same(model, prompt, temperature=1.0, seed=length, repetition_penalty=1.1)


def test_sessions_are_fresh_texts(model: Model) -> None:
    """Turns of either way, each with its own settings, give what a generation gives that reads everything anew."""
    text = greedy_text(model, prompts_of(model)[0])
    settings = list(grid(model.bundle.manifest.vocabulary, text).values())
    session, prompt = model.session(), prompts_of(model)[0][:6]
    turns: list[tuple[list[int], dict[str, Any], list[int], str | None]] = []
    for turn in range(len(settings)):
        asked = {**settings[turn], "seed": turn}
        generation = session.generate(prompt, 5, turn % 3 > 0, **asked)
        list(generation.cycles())
        assert turn == 0 or len(prompt) < 12 or generation.stats.cached_tokens > 0
        turns.append((prompt, asked, generation.ids, generation.finish_reason))
        prompt = [*session.ids, 5 + turn % 8]
        if len(prompt) > 34:
            session.rewind(9)
            prompt = [*session.ids, 2 + turn % 11]
    for prompt, asked, ids, reason in turns:
        for speculate in (True, False):
            fresh = model.generate(prompt, 5, speculate, **asked)
            list(fresh.cycles())
            assert (fresh.ids, fresh.finish_reason) == (ids, reason)


def test_grammars(make_bundle: MakeBundle) -> None:
    """Guided texts end where the grammar does, with and without speculation."""
    with spelling(make_bundle(*SMALL)) as model:
        for prompt in prompts_of(model):
            for pattern in (r"[a-z_]{1,9}\(\w+(, \w+)*\):\n", r"( |\n|[a-z])*", r"(abc|a[bc]d)e?"):
                for drawn in ({}, {"temperature": 1.0, "seed": 3}):
                    the_same(model, prompt, grammar=Grammar.regex(pattern), **drawn)


ON_FORMS = {
    "temperature",
    "filters",
    "repetition",
    "n-gram and temperature",
    "forced",
    "processors",
    "stop strings",
    "everything",
}


@contextmanager
def rows_read(model: Model) -> Iterator[list[int]]:
    """Which rows of logits are fetched from the device's memory, each by itself."""
    device, logits, rows = model.decoder.device, model.decoder.target.logits, list[int]()
    read, size = device.read, logits.nbytes // len(logits)

    def spied(array: DeviceArray) -> np.ndarray:
        if 0 <= array.address - logits.address < logits.nbytes:
            assert array.nbytes == size
            rows.append((array.address - logits.address) // size)
        return read(array)

    device.read = spied  # type: ignore[method-assign]
    yield rows
    device.read = read  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "form", ["migraphx", *(pytest.param(form, marks=pytest.mark.exhaustive) for form in ("tensorrt", "cuda"))]
)
def test_accelerators(make_bundle: MakeBundle, form: str) -> None:
    """The graphs made for them, over memory that is apart: the CPU's texts, of both ways, and of the logits only those
    behind the accepted path are fetched; none at all where the most likely token is asked for."""
    bundle = make_bundle(DEMO, *EVERY_BACKEND)
    with spelling(bundle) as cpu, opened(bundle, form, lazy=True) as model:
        (prompt, _) = prompts_of(cpu)
        text = greedy_text(cpu, prompt)
        for name, settings in grid(2048, text).items():
            if name in ON_FORMS:
                ids, _ = the_same(model, prompt, **settings, seed=5)
                assert ids == finished(cpu, prompt, **settings, seed=5)
        last = (len(prompt) - 1) % model.decoder.form.chunk
        with rows_read(model) as rows:
            for speculate in (True, False):
                for wanted in ([last], []):
                    drawn = {"temperature": 0.7, "seed": 1} if wanted else {}
                    for cycle in model.generate(prompt, 20, speculate, **drawn).cycles():
                        assert rows == (list(cycle.path) or [last] if wanted else [])
                        rows.clear()


# An independent target: transformers' model and processors.

REFERENCE: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.4, "min_p": 0.03},
    {"temperature": 0.8, "top_k": 11, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "no_repeat_ngram": 3},
    {"repetition_penalty": 1.3, "no_repeat_ngram": 2, "logit_bias": {5: 2.0, 9: -1.5}, "banned": [4, 11]},
    {"temperature": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 1.0, "min_new_tokens": 12, "logit_bias": {END: 3.0}, "banned": [6]},
]


@torch.inference_mode()
def differing(folder: Path, prompt: list[int], ids: list[int], asked: dict[str, Any], seed: int) -> int:
    """How many tokens are none of those that transformers' logits allow; of two within rounding of a tie both are
    allowed.

    The model is run once over the whole text, whose every row it computes from the tokens before it.
    """
    rows = llama.load(folder)(torch.tensor([prompt + ids])).logits[0].numpy()
    wrong = 0
    for n, token in enumerate(ids):
        row = rows[len(prompt) + n - 1]
        slack = llama.ROUNDING * float(np.abs(row).max())
        processed = their_row(row, asked, prompt, ids[:n], [END])
        used = np.bincount(ids[:n], minlength=len(row))
        processed -= asked.get("presence_penalty", 0) * (used > 0) + asked.get("frequency_penalty", 0) * used
        if not (temperature := asked.get("temperature", 0.0)):
            wrong += processed[token] < processed.max() - 2 * slack
            continue
        allowed = False
        for share in (0.0, -1e-5, 1e-5):
            values = their_logits(processed, temperature, asked, share).numpy()
            values = values + noise(seed, len(prompt) + n, np.arange(len(values)))
            allowed |= values[token] > -inf and values[token] >= values.max() - 2 * slack / temperature
        wrong += not allowed
    return wrong


@pytest.mark.parametrize(
    "made", [pytest.param(SMALL, id="demo"), pytest.param(BUNDLES[-1], id="tiny", marks=pytest.mark.exhaustive)]
)
def test_texts_are_the_targets_own(make_bundle: MakeBundle, made: tuple[Any, ...]) -> None:
    """And a text of another seed is not, so that the comparison is known to tell."""
    bundle = make_bundle(*made)
    folder = bundle.parent / "pair/target"
    with load(bundle, threads=1) as model:
        for asked in REFERENCE:
            asked = (
                asked
                if "min_new_tokens" in asked
                else {**asked, "logit_bias": {**asked.get("logit_bias", {}), END: -1000.0}}
            )
            for seed, prompt in enumerate(prompts_of(model)):
                ids = finished(model, prompt, 26, seed=seed, **asked)
                assert len(ids) == 26 or (len(ids) > 12 and ids[-1] == END)
                assert differing(folder, prompt, ids, asked, seed) == 0
                if asked.get("temperature"):
                    assert differing(folder, prompt, ids, asked, seed + 9) > len(ids) // 4


# The distribution of what trees verify.

DRAWN = [
    (BUNDLES[-1], {"temperature": 4.0}, 4000),
    (BUNDLES[-2], {"temperature": 1.5}, 1500),
    (SMALL, {"temperature": 2.0, "top_k": 5}, 2000),
]


@torch.inference_mode()
def exact_pairs(folder: Path, prompt: list[int], temperature: float, **filters: Any) -> dict[tuple[int, ...], float]:
    """Probabilities of second and third token together, whatever the first is."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        rows = llama.load(folder)(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1].numpy()
        shares = [torch.softmax(their_logits(row, temperature, filters), 0).numpy() for row in rows]
        texts = {
            (*text, int(token)): before * float(share[token])
            for (text, before), share in zip(texts.items(), shares, strict=True)
            for token in np.flatnonzero(share)
        }
    pairs = dict.fromkeys((text[1:] for text in texts), 0.0)
    for text, share in texts.items():
        pairs[text[1:]] += share
    return pairs


def likelihood(model: Model, folder: Path, seeds: int, **asked: Any) -> tuple[float, float]:
    """Of the second and third tokens of thousands of texts under the exact distribution (chi-squared test); and which
    share of them was drafted."""
    # Without an end there is a third token to every second one.
    model.bundle.manifest.__dict__["eos_token_ids"] = ()
    prompt, session, drafted = prompts_of(model, 6)[0], model.session(), 0
    exact = exact_pairs(folder, prompt, **asked)
    assert sum(exact.values()) == pytest.approx(1)
    counts = dict.fromkeys(exact, 0)
    for seed in range(seeds):
        generation = session.generate(prompt, 3, **asked, seed=seed)
        cycles = list(generation.cycles())
        counts[tuple(generation.ids[1:])] += 1
        drafted += len(generation.ids) - len(cycles)
    observed, expected = (np.array(list(table.values()), np.float64) for table in (counts, exact))
    return p_value(observed, seeds * expected), drafted / (2 * seeds)


@pytest.mark.parametrize(
    ("made", "asked", "seeds"),
    [
        pytest.param(*DRAWN[0], id="flat", marks=pytest.mark.exhaustive),
        pytest.param(*DRAWN[1], id="peaked"),
        pytest.param(*DRAWN[2], id="demo", marks=pytest.mark.exhaustive),
    ],
)
def test_pairs_follow_the_softmax(
    make_bundle: MakeBundle, made: tuple[Any, ...], asked: dict[str, Any], seeds: int
) -> None:
    bundle = make_bundle(*made)
    with load(bundle, threads=1) as model:
        p, drafted = likelihood(model, bundle.parent / "pair/target", seeds, **asked)
        assert p > 1e-4
        assert drafted > 0.2, "hardly any of them was verified on a tree"


def generous(share: float) -> Callable[..., list[int]]:
    """A wrong walk: of drafted tokens that are likely enough it accepts some that are not the target's choice."""
    draw = np.random.default_rng(0)

    def walk(tokens: Sequence[int], parents: Sequence[int], take: Any) -> list[int]:
        decoder, path = take.__self__, [0]
        while True:
            drafted = {tokens[row]: row for row in range(1, len(tokens)) if parents[row] == path[-1]}
            values = np.exp(decoder.target.row(path[-1]).astype(np.float64) / decoder.selector.settings.temperature)
            best = max(drafted, key=values.__getitem__, default=-1)
            if best >= 0 and values[best] > 0.1 * values.sum() and draw.random() < share:
                token = None if decoder.selector.add(best) is None else best
            else:
                token = take(path[-1])
            if token not in drafted:
                return path
            path.append(drafted[token])

    return walk


@pytest.mark.parametrize(("share", "found"), [pytest.param(0.0, False, marks=pytest.mark.exhaustive), (0.25, True)])
def test_a_wrong_acceptance_is_found(
    make_bundle: MakeBundle, share: float, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above has the power to find one that prefers one in four of the likely drafted tokens, with fewer
    texts."""
    bundle = make_bundle(*BUNDLES[-2])
    monkeypatch.setattr("runtime.decoding.acceptance.accept_path", generous(share))
    with load(bundle, threads=1) as model:
        p, _ = likelihood(model, bundle.parent / "pair/target", 1500, temperature=4.0)
        assert p < 1e-6 if found else p > 1e-4
