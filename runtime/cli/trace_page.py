"""Traces of generations, cycle by cycle, as a page (.html) or as the same records in JSON lines (.jsonl)."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from operator import eq
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from ..bundle.files import regular, replaced
from ..decoding.cycle import Cycle
from ..errors import InputError

_PAGE = Path(__file__).with_name("trace_page.html")
_PLACEHOLDER = "{{records}}"  # in the page's template


class Trace:
    """Collects the cycles of one generation and writes them to a file.

    Both formats hold the same records: one of type ``run``, one of type ``cycle`` for each cycle, the prefill first,
    and one of type ``end``. Times are in microseconds. The texts of the prompt and of all tokens, joined, are the
    tokenizer's text of the whole.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        serial_steps: int,
        tokenizer: Any = None,
        about: Mapping[str, Any] = {},
        plain_pass_ns: float | None = None,
    ) -> None:
        """tokenizer: a ``tokenizers.Tokenizer``; without one a token's text is ⟨id⟩. about: facts for the head of the
        page. plain_pass_ns: the stored price of a plain pass of the target (``costs.json``), None if there is none."""
        self._prompt, self._serial_steps = list(prompt), serial_steps
        self._tokenizer, self._about, self._plain_pass_ns = tokenizer, dict(about), plain_pass_ns
        self._cycles: list[Cycle] = []

    def add(self, cycle: Cycle) -> None:
        """Records the next cycle. ``write`` does all work, so tracing does not slow the generation down."""
        self._cycles.append(cycle)

    @staticmethod
    def check(path: Path) -> None:
        """Raises InputError if ``write`` cannot succeed. Called before anything is generated."""
        if path.suffix.lower() not in (".html", ".jsonl"):
            raise InputError(
                f"'{path}' is not a name for a trace: let it end in .html for a page or in .jsonl for data"
            )
        folder = regular(path).parent
        if not folder.is_dir():
            raise InputError(f"the trace cannot be written, because there is no folder '{folder}': make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"the trace cannot be written, because folder '{folder}' is read-only: choose another one")

    def write(self, path: Path, stats: Mapping[str, Any]) -> None:
        """Writes the whole file or nothing. stats: ``Stats.summary()``.

        Raises InputError for a path that ``check`` refuses, and GumihoError if the disk is full.
        """
        self.check(path)
        content = "".join(json.dumps(record, default=str) + "\n" for record in self.records(stats))
        if path.suffix.lower() == ".html":
            # Escaped, so that no token can end the element that holds the records.
            content = _PAGE.read_text("utf-8").replace(_PLACEHOLDER, content.replace("<", "\\u003c"))
        with replaced(path) as file:
            file.write(content.encode())

    def records(self, stats: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The records of both formats, in order."""
        ids = [token for cycle in self._cycles for token in cycle.tokens]
        prompt, texts = self._texts(ids)
        run = {
            "type": "run",
            "version": 1,
            "prompt_ids": self._prompt,
            "prompt": prompt,
            "serial_steps": self._serial_steps,
        }
        yield run | self._about | run
        names: dict[int, str] = {}
        position = start = 0
        for index, cycle in enumerate(self._cycles):
            tokens = [
                {"id": token, "text": texts[position + i], "source": source(cycle, i, self._serial_steps)}
                for i, token in enumerate(cycle.tokens)
            ]
            draft, target, host = cycle.times
            yield {
                "type": "cycle",
                "index": index,
                "position": position,
                "tokens": tokens,
                "rows": cycle.rows,
                "path": list(cycle.path),
                "lookup": cycle.lookup,
                "tree": self._tree(cycle, names),
                "start_us": start / 1e3,
                "draft_us": draft / 1e3,
                "target_us": target / 1e3,
                "host_us": host / 1e3,
                "finish_reason": cycle.finish_reason,
            }
            position, start = position + len(tokens), start + draft + target + host
        yield {"type": "end", "finish_reason": stats.get("finish_reason"), "plain": self._plain(), "stats": dict(stats)}

    def _plain(self) -> dict[str, Any] | None:
        """The time that plain decoding would have taken for the tokens after the first. None if this was plain
        decoding, or if the time of a plain pass is unknown.

        passes: one per token. pass_us: time of one: the shortest target time of this generation's plain passes (other
        load only lengthens a pass) or else the stored price, plus the shortest host time of any cycle. measured: number
        of plain passes in this generation, 0 if the stored price was used. total_us: time of all passes. decoding_us:
        time of this generation. speedup: the ratio of the two.
        """
        cycles = self._cycles[1:]
        plain_ns = [cycle.times[1] for cycle in cycles if cycle.rows == 1 and cycle.tree is None]
        pass_ns = min(plain_ns) if plain_ns else self._plain_pass_ns
        passes, decoding_ns = sum(len(cycle.tokens) for cycle in cycles), sum(sum(cycle.times) for cycle in cycles)
        if len(plain_ns) == len(cycles) or not pass_ns or not decoding_ns:
            return None
        pass_ns += min(cycle.times[2] for cycle in cycles)
        return {
            "passes": passes,
            "pass_us": round(pass_ns / 1e3, 3),
            "measured": len(plain_ns),
            "total_us": round(passes * pass_ns / 1e3, 3),
            "decoding_us": decoding_ns / 1e3,
            "speedup": round(passes * pass_ns / decoding_ns, 3),
        }

    def _tree(self, cycle: Cycle, names: dict[int, str]) -> dict[str, Any] | None:
        """names: texts of tokens by id, filled here."""
        if (tree := cycle.tree) is None:
            return None
        for token in set(tree.tokens) - names.keys():
            names[token] = self._name(token)
        return {
            "tokens": list(tree.tokens),
            "texts": [names[token] for token in tree.tokens],
            "parents": list(tree.parents),
            "depths": list(tree.depths),
            # JSON has no infinity, which is the score of padding rows and of looked-up ones.
            "scores": [round(score, 5) if abs(score) < float("inf") else None for score in tree.scores],
        }

    def _name(self, token: int) -> str:
        """The text of a single token, decoded without its neighbours."""
        if self._tokenizer is None:
            return f"⟨{token}⟩"
        text = self._tokenizer.decode([token], skip_special_tokens=False) or self._tokenizer.id_to_token(token)
        return text or f"⟨{token}⟩"

    def _texts(self, ids: Sequence[int]) -> tuple[str, list[str]]:
        """The prompt's text and the text of each token after it, "" for a token that ends in the middle of a character.

        Joined they are the tokenizer's text of prompt and tokens, so the last one includes an incomplete character at
        the end.
        """
        if self._tokenizer is None:
            return "".join(map(self._name, self._prompt)), [self._name(token) for token in ids]

        def decode(tokens: int) -> str:
            return str(self._tokenizer.decode([*self._prompt, *ids[:tokens]], skip_special_tokens=False))

        prompt, whole = decode(0), decode(len(ids))
        if not ids:
            return prompt, []
        try:
            stream = DecodeStream(ids=self._prompt, skip_special_tokens=False)
            texts = [stream.step(self._tokenizer, token) or "" for token in ids]
        except Exception:  # the library raises bare exceptions
            texts = []
        if texts and whole.startswith(shown := prompt + "".join(texts)):
            return prompt, [*texts[:-1], texts[-1] + whole[len(shown) :]]
        # The stream fails in two cases: after a prompt that ends in the middle of a character, whose text it repeats,
        # and for bytes that turn out not to be a character, which change the text before them. A token's text is then
        # what it adds to the part that no longer changes.
        ends = [0]
        for tokens in range(len(ids) + 1):
            text, end = decode(tokens), ends[-1]
            if text.startswith(whole[:end]):
                end += sum(takewhile(bool, map(eq, text[end:], whole[end:])))
            ends.append(end)
        prompt, *texts = (whole[a:b] for a, b in pairwise(ends))
        return prompt, texts


def source(cycle: Cycle, i: int, serial_steps: int) -> str:
    """The part that proposed a cycle's token i. serial_steps: the drafter's."""
    if i + 1 >= len(cycle.path):
        return "target"
    if cycle.lookup:
        return "lookup"
    depth = cycle.tree.depths[cycle.path[i + 1]] if cycle.tree else i + 1
    return f"serial {depth}" if depth <= serial_steps else f"head {depth - serial_steps}"
