"""Text as its tokens come."""

from collections.abc import Sequence
from typing import Any

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # how tokenizers show bytes that are no character, or not yet


class TextStream:
    """The text of a generation: never part of a character, nor of a stop string; special tokens are left out."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        """tokenizer: a ``tokenizers.Tokenizer``."""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        # A character that the prompt breaks off, of at most three tokens so far, is read with the text.
        said, cuts = self._decode(prompt), range(len(prompt), max(0, len(prompt) - 4), -1)
        self._read = next((cut for cut in cuts if not self._decode(prompt[:cut]).endswith(_UNKNOWN)), len(prompt))
        # New tokens are decoded behind the last ones, at first the prompt, since some tokenizers drop a first word's space.
        self._ids, self._before = list(prompt), self._decode(prompt[: self._read])
        self._said = said[len(self._before) :]
        self._text = ""
        self._shown = 0
        self._ended = False

    @property
    def text(self) -> str:
        """The text so far, taken or not; without what a stop string has cut off."""
        return self._text

    def push(self, token: int) -> str:
        """Adds a token and returns the text that it completes, "" where that is not a whole character yet."""
        self._ids.append(token)
        whole = self._decode(self._ids)
        return "" if whole == self._before or whole.endswith(_UNKNOWN) else self._read_on(whole)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _read_on(self, whole: str) -> str:
        """Takes up what the unread tokens add to the text. whole: they and those before them, decoded."""
        # Where bytes are tokens, one that begins no character spoils those before it, which have been shown.
        behind = whole.startswith(self._before)
        piece = whole[len(self._before) :] if behind else self._decode(self._ids[self._read :])
        piece, self._said = piece.removeprefix(self._said), ""
        self._ids = self._ids[self._read :]
        self._read, self._before = len(self._ids), self._decode(self._ids)
        self._text += piece
        return piece

    def stopped(self, piece: str) -> bool:
        """Whether the text has come to a stop string with the last piece; it then ends in front of it."""
        if not piece:
            return False
        # Of those that this piece completes the one that begins first counts.
        found = [self._text.find(s, max(self._shown, len(self._text) - len(piece) - len(s) + 1)) for s in self._stop]
        if not (starts := [at for at in found if at >= 0]):
            return False
        self._text, self._ended = self._text[: min(starts)], True
        return True

    def take(self) -> str:
        """What may be shown and has not been: all but what may yet become a stop string."""
        held = 0
        if not self._ended:
            longest = max((len(s) for s in self._stop), default=1) - 1
            tails = (self._text[len(self._text) - n :] for n in range(min(longest, len(self._text)), 0, -1))
            held = next((len(tail) for tail in tails if any(s.startswith(tail) for s in self._stop)), 0)
        return self._show(len(self._text) - held)

    def rest(self) -> str:
        """What is left when no token follows: bytes that end in the middle of a character as the tokenizer shows them."""
        if (whole := self._decode(self._ids)) != self._before:
            self._read_on(whole)
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        piece, self._shown = self._text[self._shown : end], max(end, self._shown)
        return piece
