"""Traces: the records by hand, the texts against the tokenizer's own, and the page in a real browser."""

import json
import math
import random
import stat
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from runtime.cli.trace_page import Trace
from runtime.decoding.cycle import Cycle, Tree
from runtime.errors import GumihoError
from tests.limits import full_disk

DEMO = Path(__file__).parent.parent / "demo/target/tokenizer.json"
HOSTILE = [
    "</script>",
    "<script>alert(1)</script>",
    "<!--",
    "-->",
    "<img src=x onerror=alert(1)>",
    "&lt;",
    "\\u003c",
    "{{records}}",
    "$& $1",
    "]]>",
    "\n",
    "\n\n",
    "\t",
    " ",
    "    ",
    "\x00",
    "\x1b[31m",
    "\x7f",
    "\u2028",
    "\u200d",
    "\u202eabc",
    "مرحبا",
    "漢字",
    "👩‍👧",
    "\U000e0041",
    "é",
    "",
    '"',
    "'",
    "`${x}`",
    "plain",
    " words",
    "x" * 200,
]


def words(vocabulary: Sequence[str]) -> Tokenizer:
    """A tokenizer whose tokens are these texts, one behind another."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """One in Llama 2's manner: characters it lacks come as bytes, and a text's first space goes."""
    vocabulary = ["<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁a", "b", "▁é", "漢", "�"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(vocabulary)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def plain(tokens: Sequence[int]) -> list[Cycle]:
    """A run without speculation: the prefill, then a token a cycle."""
    return [Cycle((token,), int(i > 0), (0,) if i else (), None, (0, 1000, 10)) for i, token in enumerate(tokens)]


def grow(rows: int, vocabulary: int, rng: random.Random) -> Tree:
    """A random tree of at most seven levels, parents before children."""
    parents, depths, scores = [0], [0], [0.0]
    while len(parents) < rows:
        parent = rng.choice([row for row, depth in enumerate(depths) if depth < 7][-12:])
        parents.append(parent)
        depths.append(depths[parent] + 1)
        scores.append(scores[parent] - rng.random())
    return Tree(tuple(rng.randrange(vocabulary) for _ in parents), tuple(parents), tuple(depths), tuple(scores))


def speculative(tokens: int, rows: int, vocabulary: int, seed: int) -> list[Cycle]:
    """A run of about that many tokens, its trees and what is accepted of them drawn at random."""
    rng = random.Random(seed)
    cycles = [Cycle((rng.randrange(vocabulary),), 0, (), None, (0, 9_000_000, 0))]
    while sum(len(cycle.tokens) for cycle in cycles) < tokens:
        tree, path = grow(rows, vocabulary, rng), [0]
        while rng.random() < 0.8 and (below := [r for r in range(1, rows) if tree.parents[r] == path[-1]]):
            path.append(rng.choice(below))
        emitted = (*(tree.tokens[row] for row in path[1:]), rng.randrange(vocabulary))
        times = (rng.randrange(300_000, 500_000), rng.randrange(1_000_000, 2_000_000), 50_000)
        cycles.append(Cycle(emitted, rows, tuple(path), None, times, tree))
    return cycles


def trace(cycles: Sequence[Cycle], prompt: Sequence[int] = (0,), tokenizer: Any = None, **about: Any) -> Trace:
    made = Trace(prompt, 2, tokenizer, about)
    for cycle in cycles:
        made.add(cycle)
    return made


def cycle_records(made: Trace) -> list[dict[str, Any]]:
    return [record for record in made.records({}) if record["type"] == "cycle"]


TREE = Tree(
    (3, 4, 5, 6, 7, 8), (0, 0, 1, 2, 3, 0), (0, 1, 2, 3, 4, 1), (0.0, -0.5, -0.75, -1.0, -1.123456789, -math.inf)
)
RUN = [
    Cycle((3,), 0, (), None, (0, 5_000_000, 0)),
    Cycle((4, 5, 6, 7, 9), 6, (0, 1, 2, 3, 4), None, (300_000, 1_000_500, 20_000), TREE),
    Cycle((1,), 6, (0,), None, (300_000, 1_000_000, 20_000), TREE),
    Cycle((4, 5), 6, (0, 1, 2, 3), "length", (300_000, 1_000_000, 20_000), TREE),  # cut behind its second token
]


def test_records() -> None:
    stats = {"tokens": 9, "finish_reason": "length"}
    run, *cycles, end = trace(RUN, [1, 2], backend="cpu", type="spoofed").records(stats)
    assert list(run.items())[:2] == [("type", "run"), ("version", 1)]
    assert run == {
        "type": "run",
        "version": 1,
        "prompt_ids": [1, 2],
        "prompt": "⟨1⟩⟨2⟩",
        "serial_steps": 2,
        "backend": "cpu",
    }
    assert [[token["source"] for token in cycle["tokens"]] for cycle in cycles] == [
        ["target"],
        ["serial 1", "serial 2", "head 1", "head 2", "target"],
        ["target"],
        ["serial 1", "serial 2"],
    ]
    assert [cycle["index"] for cycle in cycles] == [0, 1, 2, 3]
    assert [cycle["position"] for cycle in cycles] == [0, 1, 6, 7]
    assert [cycle["start_us"] for cycle in cycles] == [0, 5000, 6320.5, 7640.5]
    assert (cycles[1]["draft_us"], cycles[1]["target_us"], cycles[1]["host_us"]) == (300, 1000.5, 20)
    assert cycles[0]["tree"] is None
    assert cycles[1]["tree"] == {
        "tokens": [3, 4, 5, 6, 7, 8],
        "texts": ["⟨3⟩", "⟨4⟩", "⟨5⟩", "⟨6⟩", "⟨7⟩", "⟨8⟩"],
        "parents": [0, 0, 1, 2, 3, 0],
        "depths": [0, 1, 2, 3, 4, 1],
        "scores": [0.0, -0.5, -0.75, -1.0, -1.12346, None],
    }
    assert (cycles[1]["rows"], cycles[1]["path"], cycles[3]["finish_reason"]) == (6, [0, 1, 2, 3, 4], "length")
    assert end == {"type": "end", "finish_reason": "length", "plain": None, "stats": stats}


# A prefill, three plain passes of 2, 9 and 4 ms, and a cycle with a draft: 8 tokens in 20 ms.
MEASURED = [
    Cycle((3,), 0, (), None, (0, 50_000_000, 0)),
    Cycle((4,), 1, (0,), None, (1_000_000, 2_000_000, 400_000)),
    Cycle((4, 5, 6, 7, 9), 6, (0, 1, 2, 3, 4), None, (500_000, 2_500_000, 100_000), TREE),
    Cycle((1,), 1, (0,), None, (0, 9_000_000, 200_000)),
    Cycle((1,), 1, (0,), "length", (0, 4_000_000, 300_000)),
]


def end_record(cycles: Sequence[Cycle], plain_pass_ns: float | None = None) -> Any:
    made = Trace([0], 2, plain_pass_ns=plain_pass_ns)
    for cycle in cycles:
        made.add(cycle)
    return list(made.records({}))[-1]["plain"]


def test_the_comparison_with_plain_decoding() -> None:
    """The shortest of the generation's own plain passes, or else the stored price, and the least host time: for every
    token but the first one. Nothing is compared if nothing was measured, and plain decoding is not compared with
    itself."""
    own = {"passes": 8, "pass_us": 2100, "measured": 3, "total_us": 16_800, "decoding_us": 20_000, "speedup": 0.84}
    assert end_record(MEASURED) == end_record(MEASURED, 7e6) == own
    stored = {"passes": 8, "pass_us": 2020, "measured": 0, "total_us": 16_160, "decoding_us": 3960.5, "speedup": 4.08}
    assert end_record(RUN, 2e6) == stored
    assert end_record(RUN) is None
    for cycles in (plain([1, 2, 3]), plain([1]), []):
        assert end_record(cycles, 2e6) is None


LOOKED_UP = Cycle((4, 5, 9), 4, (0, 1, 2), None, (0, 1_000_000, 20_000), Tree.chain((3, 4, 5, 6)), lookup=True)


def test_records_of_lookups() -> None:
    (record,) = cycle_records(trace([LOOKED_UP]))
    assert record["lookup"]
    assert [token["source"] for token in record["tokens"]] == ["lookup", "lookup", "target"]
    assert record["tree"] == {
        "tokens": [3, 4, 5, 6],
        "texts": ["⟨3⟩", "⟨4⟩", "⟨5⟩", "⟨6⟩"],
        "parents": [0, 0, 1, 2],
        "depths": [0, 1, 2, 3],
        "scores": [0.0, None, None, None],
    }


def test_sources_without_trees() -> None:
    assert [record["tokens"][0]["source"] for record in cycle_records(trace(plain([1, 2, 3])))] == ["target"] * 3
    bare = Cycle((4, 5, 6, 1), 8, (0, 2, 5, 7), None)
    sources = [token["source"] for token in cycle_records(trace([bare]))[0]["tokens"]]
    assert sources == ["serial 1", "serial 2", "head 1", "target"]


def joined(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The texts of a plain run, checked against the tokenizer's text of the whole."""
    run, *cycles, _ = trace(plain(tokens), prompt, tokenizer).records({})
    texts = [cycle["tokens"][0]["text"] for cycle in cycles]
    assert run["prompt"] + "".join(texts) == tokenizer.decode([*prompt, *tokens], skip_special_tokens=False)
    return texts


def test_characters_of_several_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO))
    ids = tokenizer.encode("x = 'é漢👩‍👧'\n").ids
    for cut in range(1, len(ids)):  # a prompt may end in the middle of a character, too
        texts = joined(tokenizer, ids[:cut], ids[cut:])
        assert "\ufffd" not in "".join(texts)
    assert texts == ["\n"]
    assert joined(tokenizer, ids[:3], ids[3:9]) == [" '", "", "é", "", "", "漢"]
    assert joined(tokenizer, ids[:3], ids[3:8]) == [" '", "", "é", "", "\ufffd"]  # held back to the end
    assert joined(tokenizer, ids[:5], []) == []


@pytest.mark.parametrize("tokenizer", [Tokenizer.from_file(str(DEMO)), byte_fallback(), words(HOSTILE)])
def test_any_tokens_join(tokenizer: Tokenizer) -> None:
    """Bytes that are no characters among them, on which the library's stream gives up or takes back what it said."""
    rng = random.Random(5)
    few = [0, *range(tokenizer.get_vocab_size() - 5, tokenizer.get_vocab_size()), 2 + 0xC3, 2 + 0xA9]
    for _ in range(200):
        prompt, tokens = ([rng.choice([rng.randrange(262), *few]) for _ in range(rng.randint(1, 9))] for _ in "ab")
        joined(tokenizer, prompt, tokens)


def test_names_in_trees() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO))
    tree = Tree((0, 293, 129, 99_999), (0, 0, 1, 2), (0, 1, 2, 3), (0.0, -1.0, -2.0, -3.0))
    record = cycle_records(trace([Cycle((293,), 4, (0, 1), None, tree=tree)], [0], tokenizer))[0]
    assert record["tree"]["texts"] == ["<|begin_of_text|>", " '", "\ufffd", "⟨99999⟩"]
    empty = Tree((HOSTILE.index(""),), (0,), (0,), (0.0,))
    record = cycle_records(trace([Cycle((1,), 1, (0,), None, tree=empty)], [0], words(HOSTILE)))[0]
    assert record["tree"]["texts"] == [f"⟨{HOSTILE.index('')}⟩"]


class Scripts(HTMLParser):
    """The contents of a page's scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.inside = tag == "script"
        self.found += [""] * self.inside

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found[-1] += data


def test_both_formats_hold_the_same(tmp_path: Path) -> None:
    order = list(range(len(HOSTILE)))
    made = trace(
        [*plain(order), *speculative(40, 8, len(HOSTILE), 1)], [0, 1], words(HOSTILE), bundle="</script>\ud800"
    )
    stats = {"tokens": 3, "finish_reason": None, "path": Path("x")}
    for name in ("a.html", "a.jsonl", "A.HTML"):
        made.write(tmp_path / name, stats)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A.HTML", "a.html", "a.jsonl"]
    data = (tmp_path / "a.jsonl").read_text("utf-8")
    records, program = Scripts((tmp_path / "a.html").read_text("utf-8")).found
    lines = [json.loads(line) for line in data.splitlines()]
    assert [json.loads(line) for line in records.strip().splitlines()] == lines
    assert [line["type"] for line in lines] == ["run", *["cycle"] * (len(lines) - 2), "end"]
    assert "<" not in records
    assert "innerHTML" not in program
    assert (tmp_path / "A.HTML").read_bytes() == (tmp_path / "a.html").read_bytes()
    assert stat.S_IMODE((tmp_path / "a.html").stat().st_mode) & 0o400


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trace.txt", "let it end in .html for a page or in .jsonl for data"),
        ("trace", "let it end in .html"),
        ("nowhere/trace.html", "there is no folder"),
        ("folder.html", "is a folder, not a file"),
    ],
)
def test_refused_paths(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.html").mkdir()
    for refuse in (Trace.check, lambda path: trace(RUN).write(path, {})):
        with pytest.raises(GumihoError, match=message):
            refuse(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_a_folder_that_takes_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(GumihoError, match="is read-only: choose another one"):
        Trace.check(tmp_path / "trace.html")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("before")
    made = trace(speculative(500, 16, 99, 2))
    with full_disk(), pytest.raises(GumihoError, match=r"cannot be written \(File too large\): raise the limit"):
        made.write(path, {})
    assert [p.name for p in tmp_path.iterdir()] == ["trace.jsonl"]
    assert path.read_text() == "before"


class Page:
    """A trace in the browser, with what the browser complained of and asked for."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.tab = browser.new_page(viewport={"width": 1400, "height": 900})
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri())
        self.uri = path.as_uri()

    def text(self, selector: str) -> str:
        return str(self.tab.locator(selector).text_content())

    def token(self, index: int) -> Any:
        return self.tab.locator(f".token[data-index='{index}']")

    def rows(self, selector: str) -> list[int]:
        """Which rows of the tree that is shown match, in order."""
        return sorted(
            self.tab.eval_on_selector_all(f"#tree {selector}[data-row]", "all => all.map((e) => Number(e.dataset.row))")
        )

    def quiet(self) -> None:
        """Nothing went wrong, and nothing but the file was asked for."""
        assert self.complaints == []
        assert self.requests == [self.uri]


def test_page(browser: Any, tmp_path: Path) -> None:
    tree = Tree((3, 30, 31, 2, 4, 0), (0, 0, 1, 2, 3, 0), (0, 1, 2, 3, 4, 1), (0.0, -0.5, -0.75, -1.0, -1.5, -9.0))
    cycles = [
        Cycle((30,), 0, (), None, (0, 40_000_000, 0)),
        Cycle((30, 31, 2, 4, 0), 6, (0, 1, 2, 3, 4), None, (1_000_000, 2_000_000, 500_000), tree),
        Cycle((30, HOSTILE.index("")), 6, (0, 1), None, (1_000_000, 1_000_000, 500_000), tree),
        Cycle((1,), 6, (0,), "length", (500_000, 1_000_000, 0), tree),
    ]
    path = tmp_path / "trace #1 <b>.html"
    stats = {
        "tokens": 9,
        "cycles": 3,
        "tau": 2.667,
        "tokens_per_second": 1234.5,
        "seed": 12345,
        "finish_reason": "length",
    }
    stats |= {"acceptance_by_depth": [1.0, 0.5]}
    trace(cycles, [30, 31, 10], words(HOSTILE), bundle="demo").write(path, stats)
    page = Page(browser, path)

    expected = [HOSTILE[token] for cycle in cycles for token in cycle.tokens]
    assert page.text("#text") == "plain words\n" + "".join(expected)
    assert page.tab.locator(".token").all_text_contents() == expected
    assert page.tab.locator("#text .prompt").all_text_contents() == ["", "plain words\n"]
    for fact in ("2.67", "1,234.5", "12345", "length", "9", "3"):
        assert page.tab.locator("#summary dd").get_by_text(fact, exact=True).count() == 1
    assert page.text("#about") == "bundle demo"
    assert page.tab.locator("#sources .count").all_text_contents() == ["2", "1", "1", "1", "4"]
    assert page.tab.locator("#sources .share").all_text_contents() == ["100 %", "50 %", "33 %", "33 %", ""]
    widths = page.tab.eval_on_selector_all(
        "#sources .track", "all => all.map((e) => e.firstChild.offsetWidth / e.offsetWidth)"
    )
    assert widths == pytest.approx([1, 1 / 2, 1 / 3, 1 / 3], abs=0.01)

    for scheme in ("dark", "light"):
        page.tab.emulate_media(color_scheme=scheme)
        looks = page.tab.eval_on_selector_all(
            ".token", "all => all.slice(1, 6).map((e) => getComputedStyle(e).backgroundImage)"
        )
        assert len(set(looks)) == 5  # two serial steps, two heads and the target
    assert page.token(7).bounding_box()["width"] > 2  # a token without a text is there to be pointed at

    assert page.tab.locator(".bar").count() == 4
    page.token(3).hover()
    assert page.text("#cycle") == "Cycle 1"
    assert page.rows(".node") == [0, 1, 2, 3, 4, 5]
    assert page.rows(".node.accepted") == [0, 1, 2, 3, 4]
    assert page.rows(".node.on") == [3]
    assert page.tab.locator(".node.own .text").all_text_contents() == [HOSTILE[0]]
    assert page.text("#tree [data-row='1'] .score") == "61%−0.50"
    assert page.text("#tree [data-row='2'] .text") == "·words"
    assert page.text("#token .text") == "<!--"
    assert page.text("#times") == "draft 1.00 mstarget 2.00 mshost 0.50 ms"
    page.token(8).hover()
    assert page.rows(".node.accepted") == [0]
    assert page.text("#facts") == "0 of 5 drafted rows accepted, then the target’s own token"
    page.token(0).hover()
    assert page.rows(".node") == []
    assert "prefill" in page.text("#facts")

    page.token(6).click()  # pinned: pointing elsewhere changes nothing
    page.token(1).hover()
    assert page.text("#cycle") == "Cycle 2, pinned"
    page.token(6).click()
    page.token(1).hover()
    assert page.text("#cycle") == "Cycle 1"

    heights = page.tab.eval_on_selector_all(".bar i", "all => all.map((e) => e.offsetHeight)")
    unit = heights[4] / 2
    assert heights[3:] == pytest.approx([unit * n for n in (1, 2, 0.5, 1, 1, 0.5, 0.5, 1, 0)], abs=1)
    assert page.tab.locator(".bar.cut").count() == 1  # the prefill, far off the scale of the others
    assert "target 40.00 ms" in page.tab.locator(".bar").first.get_attribute("title")
    page.tab.locator(".bar").nth(2).hover()
    assert page.text("#cycle") == "Cycle 2"
    page.tab.locator(".bar").nth(3).click()
    assert page.text("#cycle") == "Cycle 3, pinned"
    page.tab.keyboard.press("ArrowLeft")
    assert page.text("#cycle") == "Cycle 2, pinned"
    page.tab.keyboard.press("Escape")
    assert page.text("#cycle") == "Cycle 2"
    page.quiet()


def test_page_of_lookups(browser: Any, tmp_path: Path) -> None:
    tree = Tree((3, 30), (0, 0), (0, 1), (0.0, -0.5))
    cycles = [Cycle((3,), 0, (), None), Cycle((30, 3), 2, (0, 1), None, (1, 1, 1), tree), LOOKED_UP]
    trace(cycles, [30], words(HOSTILE)).write(tmp_path / "trace.html", {"acceptance_by_depth": [0.5]})
    page = Page(browser, tmp_path / "trace.html")
    assert page.tab.locator("#sources .name").all_text_contents() == ["serial 1", "lookup", "target’s own"]
    assert page.tab.locator("#sources .count").all_text_contents() == ["1", "2", "3"]
    assert page.tab.locator("#sources .share").all_text_contents() == ["50 %", "", ""]
    for scheme in ("dark", "light"):
        page.tab.emulate_media(color_scheme=scheme)
        looks = page.tab.eval_on_selector_all(".token", "all => all.map((e) => getComputedStyle(e).backgroundImage)")
        assert len(set(looks)) == 3
        assert looks[3] == looks[4]
    page.token(4).hover()
    assert page.text("#facts") == "2 of 3 looked up rows accepted, then the target’s own token"
    assert page.rows(".node.accepted") == [0, 1, 2]
    assert page.tab.locator(".column span").all_text_contents() == ["pending", "lookup", "lookup", "lookup"]
    assert page.tab.locator("#tree .score").all_text_contents() == ["target"]
    page.quiet()


def test_page_compares_with_plain_decoding(browser: Any, tmp_path: Path) -> None:
    trace(MEASURED).write(tmp_path / "measured.html", {})
    page = Page(browser, tmp_path / "measured.html")
    assert page.text("#plain") == (
        "Plain decoding would have taken 8 passes of 2.10 ms (the shortest of 3 plain passes in this generation), "
        "16.80 ms in all. This generation took 20.00 ms after the first token: 0.84× the speed."
    )
    for index, told in (
        (1, "Cycle 1: 1 token in 3.40 ms"),
        (2, "Cycle 2: 5 tokens in 3.10 ms, by plain decoding 10.50 ms"),
    ):
        page.tab.locator(".bar").nth(index).hover()
        assert page.text("#whose") == told
    page.quiet()
    stored = Trace([0], 2, plain_pass_ns=2e6)
    for cycle in RUN:
        stored.add(cycle)
    for name, made, told in (
        ("stored", stored, "8 passes of 2.02 ms (the price measured beforehand), 16.16 ms in all"),
        ("nothing", trace(RUN), "No plain pass was measured"),
        ("plain", trace(plain([1, 2])), "this is plain decoding"),
    ):
        made.write(tmp_path / f"{name}.html", {})
        assert told in Page(browser, tmp_path / f"{name}.html").text("#plain")


def test_page_explains_its_marks(browser: Any, tmp_path: Path) -> None:
    """Those that it shows, in the colours that they have in the text, light and dark; and it can be folded."""
    cycles = [*plain([1, HOSTILE.index("\n"), HOSTILE.index("")]), *RUN[1:], LOOKED_UP]
    trace(cycles, [30], words(HOSTILE)).write(tmp_path / "trace.html", {})
    page = Page(browser, tmp_path / "trace.html")
    legend = page.tab.locator("#legend p").all_text_contents()
    for told in (
        "target" + "the target’s own token: no accepted row proposed it",
        "serial 1serial 2head 1head 2" + "accepted drafted tokens, one colour per depth",
        "lookup" + "accepted looked-up tokens, which followed the same tokens earlier in the text",
        "row" + "a row that was verified and rejected",
        "a token that begins with a new line",
        "a token without visible characters",
        "draft: time in the drafter",
    ):
        assert told in legend
    for scheme in ("dark", "light"):
        page.tab.emulate_media(color_scheme=scheme)
        for kind in ("d0", "d1", "d2", "d3", "d4", "found"):
            colours = [
                page.tab.locator(f"{place}.{kind}:not(.same)").first.evaluate(
                    "e => getComputedStyle(e).backgroundImage"
                )
                for place in ("#legend .chip", "#text .token")
            ]
            assert colours[0] == colours[1] != "none"
    assert page.tab.locator("#legend p").first.is_visible()
    page.tab.locator("#legend summary").click()
    assert page.tab.locator("#legend p").first.is_hidden()
    page.quiet()

    trace(plain([1, 2])).write(tmp_path / "plain.html", {})
    legend = Page(browser, tmp_path / "plain.html").tab.locator("#legend p").all_text_contents()
    assert not [line for line in legend if "drafted" in line or "looked" in line or "row that" in line]


def test_page_by_keyboard(browser: Any, tmp_path: Path) -> None:
    cycles = speculative(60, 8, len(HOSTILE), 3)
    trace(cycles, [30], words(HOSTILE)).write(tmp_path / "trace.html", {})
    page = Page(browser, tmp_path / "trace.html")
    total = sum(len(cycle.tokens) for cycle in cycles)
    for _ in range(9):  # Tab reaches the text, and one of its tokens only
        page.tab.keyboard.press("Tab")
        if "token" in page.tab.evaluate("document.activeElement.className"):
            break
    for key, token in (
        ("Home", 1),
        ("ArrowRight", 2),
        ("ArrowRight", 3),
        ("ArrowLeft", 2),
        ("End", total),
        ("ArrowRight", total),
    ):
        page.tab.keyboard.press(key)
        assert f"token {token} of {total}" in page.text("#token")
        assert page.tab.evaluate("Number(document.activeElement.dataset.index)") == token - 1
    page.tab.keyboard.press("Home")
    for index in (1, 2):
        page.tab.keyboard.press("ArrowDown")
        assert page.text("#cycle") == f"Cycle {index}"
    page.tab.keyboard.press("ArrowUp")
    page.tab.keyboard.press("Enter")
    assert page.text("#cycle") == "Cycle 1, pinned"
    page.tab.keyboard.press("ArrowDown")
    assert page.text("#cycle") == "Cycle 2, pinned"
    page.tab.keyboard.press("Escape")
    assert page.text("#cycle") == "Cycle 2"
    assert page.rows(".node.accepted") == sorted(cycles[2].path)
    page.quiet()


def test_page_of_hostile_texts(browser: Any, tmp_path: Path) -> None:
    order = list(range(len(HOSTILE)))
    tree = Tree(
        tuple(order),
        (0, *([0] * (len(order) - 1))),
        (0, *([1] * (len(order) - 1))),
        (0.0, *([-1.0] * (len(order) - 1))),
    )
    cycles = [*plain(order), Cycle((1, 30), len(order), (0, 1), "stop", (1, 1, 1), tree)]
    trace(cycles, [0, 1, 15], words(HOSTILE), bundle="<b>x</b></script>").write(tmp_path / "trace.html", {})
    page = Page(browser, tmp_path / "trace.html")
    assert page.text("#text") == "".join(HOSTILE[i] for i in [0, 1, 15, *order, 1, 30])
    assert page.text("#about") == "bundle <b>x</b></script>"
    assert page.tab.locator("#text *:not(span), #tree img, #about > * *:not(b)").count() == 0
    for index in range(len(order)):
        if HOSTILE[index] != "\u2028":  # a line's end, without a width
            assert page.token(index).bounding_box()["width"] > 2, HOSTILE[index]
    page.token(len(order)).click()
    assert page.rows(".node") == order
    shown = page.tab.locator(".node .text").all_text_contents()
    for text in (
        "</script>",
        "<img·src=x·onerror=alert(1)>",
        "U+0000",
        "U+200D",
        "U+202Eabc",
        "↵↵",
        "→",
        "👩‍👧",
        "{{records}}",
    ):
        assert text in shown
    page.quiet()


def test_page_of_a_long_run(browser: Any, tmp_path: Path) -> None:
    cycles = speculative(1000, 64, len(HOSTILE), 4)
    trace(cycles, [10, 30] * 2000, words(HOSTILE)).write(tmp_path / "trace.html", {"finish_reason": "length"})
    page = Page(browser, tmp_path / "trace.html")
    total = sum(len(cycle.tokens) for cycle in cycles)
    assert page.tab.locator(".token").count() == total >= 1000
    assert page.tab.locator(".bar").count() == len(cycles)
    assert page.rows(".node") == list(range(64))  # one tree at a time
    page.token(total - 1).click()
    assert page.rows(".node.accepted") == sorted(cycles[-1].path)
    assert page.tab.locator(".bar.on").is_visible()
    # The start of a long prompt is folded away, and still part of the text.
    assert page.text("#text").startswith("\nplain\nplain" * 3)
    assert page.tab.locator("#text .prompt").first.is_hidden()
    page.tab.locator("#unfold").click()
    assert page.tab.locator("#text .prompt").first.is_visible()
    page.quiet()


@pytest.mark.parametrize("cycles", [[], plain([1]), plain([1, 2, 3])])
def test_page_without_trees(browser: Any, tmp_path: Path, cycles: list[Cycle]) -> None:
    trace(cycles, [30], words(HOSTILE)).write(
        tmp_path / "trace.html", {"finish_reason": "length", "tokens": len(cycles)}
    )
    page = Page(browser, tmp_path / "trace.html")
    assert page.tab.locator(".bar").count() == len(cycles)
    assert page.tab.locator("#sources .name").all_text_contents() == ["target’s own"]
    if len(cycles) > 1:
        assert page.text("#facts") == "one row, nothing drafted"
    page.quiet()
