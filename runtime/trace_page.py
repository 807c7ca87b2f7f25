"""A generation written down cycle by cycle: a page to look at (.html), or the same records as data (.jsonl)."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from operator import eq
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from .bundle.files import regular, replaced
from .decoding.cycle import Cycle
from .errors import GumihoError

_PAGE = Path(__file__).with_name("trace_page.html")
_PLACE = "{{records}}"  # where the page takes them


class Trace:
    """Collects the cycles of one generation and writes them down.

    Both formats hold the same records: one of type ``run``, one of type ``cycle`` for each cycle, the prefill's first, and one
    of type ``end``. Times are in microseconds; texts joined give what the tokenizer makes of the whole.
    """

    def __init__(self, prompt: Sequence[int], serial_steps: int, tokenizer: Any = None, about: Mapping[str, Any] = {}) -> None:
        """tokenizer: a ``tokenizers.Tokenizer``; without one a token's text is ⟨id⟩. about: facts for the head of the page."""
        self._prompt, self._serial_steps = list(prompt), serial_steps
        self._tokenizer, self._about = tokenizer, dict(about)
        self._cycles: list[Cycle] = []

    def add(self, cycle: Cycle) -> None:
        """Takes the next cycle. All work waits for ``write``, so that tracing costs the run nothing."""
        self._cycles.append(cycle)

    @staticmethod
    def check(path: Path) -> None:
        """Raises GumihoError where ``write`` could not succeed, before anything is generated."""
        if path.suffix.lower() not in (".html", ".jsonl"):
            raise GumihoError(f"'{path}' is no name for a trace: let it end in .html for a page or in .jsonl for data")
        folder = regular(path).parent
        if not folder.is_dir():
            raise GumihoError(f"the trace cannot be written, since there is no folder '{folder}': make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise GumihoError(f"the trace cannot be written, since folder '{folder}' is read-only: choose another one")

    def write(self, path: Path, stats: Mapping[str, Any]) -> None:
        """Writes the whole file or nothing. stats: ``Stats.summary()``.

        Raises GumihoError for a path that ``check`` refuses and where the disk takes no more.
        """
        self.check(path)
        content = "".join(json.dumps(record, default=str) + "\n" for record in self.records(stats))
        if path.suffix.lower() == ".html":
            # No token can end the element that holds the records.
            content = _PAGE.read_text("utf-8").replace(_PLACE, content.replace("<", "\\u003c"))
        with replaced(path) as file:
            file.write(content.encode())

    def records(self, stats: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What is written, a line each."""
        ids = [token for cycle in self._cycles for token in cycle.tokens]
        prompt, texts = self._texts(ids)
        run = {"type": "run", "version": 1, "prompt_ids": self._prompt, "prompt": prompt, "serial_steps": self._serial_steps}
        yield run | self._about | run
        names: dict[int, str] = {}
        position = start = 0
        for index, cycle in enumerate(self._cycles):
            tokens = [
                {"id": token, "text": texts[position + i], "source": self._source(cycle, i)}
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
        yield {"type": "end", "finish_reason": stats.get("finish_reason"), "stats": dict(stats)}

    def _source(self, cycle: Cycle, i: int) -> str:
        """Who proposed a cycle's token i."""
        if i + 1 >= len(cycle.path):
            return "target"
        if cycle.lookup:
            return "lookup"
        depth = cycle.tree.depths[cycle.path[i + 1]] if cycle.tree else i + 1
        return f"serial {depth}" if depth <= self._serial_steps else f"head {depth - self._serial_steps}"

    def _tree(self, cycle: Cycle, names: dict[int, str]) -> dict[str, Any] | None:
        """names: texts of the tokens met so far, by id."""
        if (tree := cycle.tree) is None:
            return None
        for token in set(tree.tokens) - names.keys():
            names[token] = self._name(token)
        return {
            "tokens": list(tree.tokens),
            "texts": [names[token] for token in tree.tokens],
            "parents": list(tree.parents),
            "depths": list(tree.depths),
            # JSON has no infinity, which is the score of a row that fills up the tree, or that was looked up.
            "scores": [round(score, 5) if abs(score) < float("inf") else None for score in tree.scores],
        }

    def _name(self, token: int) -> str:
        """A token's text by itself."""
        if self._tokenizer is None:
            return f"⟨{token}⟩"
        text = self._tokenizer.decode([token], skip_special_tokens=False) or self._tokenizer.id_to_token(token)
        return text or f"⟨{token}⟩"

    def _texts(self, ids: Sequence[int]) -> tuple[str, list[str]]:
        """The prompt's text and that of each token behind it: "" where it ends in the middle of a character.

        Joined they are the tokenizer's text of prompt and tokens, so the last one also has what was held back to the end.
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
        # A prompt that ends in the middle of a character is given out once more by the stream, and bytes that turn out to be no
        # character change the text in front of them. Then a token's text is what it adds to the part that stays.
        ends = [0]
        for tokens in range(len(ids) + 1):
            text, end = decode(tokens), ends[-1]
            if text.startswith(whole[:end]):
                end += sum(takewhile(bool, map(eq, text[end:], whole[end:])))
            ends.append(end)
        prompt, *texts = (whole[a:b] for a, b in pairwise(ends))
        return prompt, texts
