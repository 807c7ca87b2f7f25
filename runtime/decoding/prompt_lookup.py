"""Prompt lookup: proposes the tokens that followed the text's last tokens earlier in the text. It costs no draft.
transformers and llama.cpp have it, too."""

from collections.abc import Iterable, Sequence

_RUNS = 4, 2  # how many last tokens must occur earlier: four, or else two
LONGEST_MATCH = 8  # tokens; longer matches count as this long


class Lookup:
    """A text that grows, indexed by its runs of tokens."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._position_after: dict[tuple[int, ...], int] = {}  # of a run's last occurrence
        self._match_end = 0  # the position after the earlier occurrence of the text's last run, 0 if there is none

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text."""
        text, position_after = self.text, self._position_after
        for token in tokens:
            text.append(token)
            runs = [tuple(text[-n:]) for n in _RUNS if n <= len(text)]
            self._match_end = next((position_after[run] for run in runs if run in position_after), 0)
            position_after.update(dict.fromkeys(runs, len(text)))

    def find(self, most: int) -> tuple[int, Sequence[int]]:
        """The length of the match, at most ``LONGEST_MATCH``, and ``most`` tokens that followed it; 0 and no tokens
        without a match.

        If the earlier occurrence ends less than ``most`` tokens before the text's end, the tokens in between are
        repeated.
        """
        if not self._match_end:
            return 0, ()
        text, end = self.text, self._match_end
        longest = min(LONGEST_MATCH, end)
        length = next((i for i in range(longest) if text[end - 1 - i] != text[-1 - i]), longest)
        period = len(text) - end
        return length, [text[end + i % period] for i in range(most)]
