"""Drafts that cost nothing: what followed the same tokens earlier in the text (prompt lookup decoding, as transformers and
llama.cpp have it)."""

from collections.abc import Iterable, Sequence

_RUNS = 4, 2  # tokens by which an earlier place is found, the longer first
MOST = 8  # that a repetition's length is counted to


class Lookup:
    """A text that grows, and where it repeats itself."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # a run -> the place behind its last appearance
        self._found = 0

    def extend(self, tokens: Iterable[int]) -> None:
        text, behind = self.text, self._behind
        for token in tokens:
            text.append(token)
            runs = [tuple(text[-n:]) for n in _RUNS if n <= len(text)]
            self._found = next((behind[run] for run in runs if run in behind), 0)
            behind.update(dict.fromkeys(runs, len(text)))

    def find(self, most: int) -> tuple[int, Sequence[int]]:
        """How many of the last tokens came before, counted to ``MOST``, and what followed them there, at most so many tokens. A
        repetition that reaches the end of the text goes on with what it repeats."""
        if not self._found:
            return 0, ()
        text, found = self.text, self._found
        length = next((i for i in range(min(MOST, found)) if text[found - 1 - i] != text[-1 - i]), min(MOST, found))
        period = len(text) - found
        return length, [text[found + i % period] for i in range(most)]
