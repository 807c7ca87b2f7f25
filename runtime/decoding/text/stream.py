"""Text from tokens, while they are generated."""

from collections.abc import Sequence
from typing import Any

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # tokenizers decode invalid or incomplete characters to it


class TextStream:
    """The text of a generation, in whole characters, without stop strings and special tokens."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        """tokenizer: a ``tokenizers.Tokenizer``; prompt: its token ids, for context; stop: strings that end the
        text."""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        # If the prompt ends within a character, its last tokens (three at most) are decoded together with the text.
        prompt_text, cuts = self._decode(prompt), range(len(prompt), max(0, len(prompt) - 4), -1)
        self._read = next((cut for cut in cuts if not self._decode(prompt[:cut]).endswith(_UNKNOWN)), len(prompt))
        # New tokens are decoded together with the previous ones (first the prompt), since some tokenizers drop the
        # first word's space.
        self._ids, self._before = list(prompt), self._decode(prompt[: self._read])
        self._prompt_rest = prompt_text[len(self._before) :]
        self._text = ""
        self._shown = 0
        self._ended = False

    @property
    def text(self) -> str:
        """The text so far, up to the stop string that ended it, if any; includes text that ``take`` has not returned
        yet."""
        return self._text

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that it completes, "" if it does not complete a character."""
        self._ids.append(token)
        decoded = self._decode(self._ids)
        return "" if decoded == self._before or decoded.endswith(_UNKNOWN) else self._append(decoded)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _append(self, decoded: str) -> str:
        """Appends the text of the unread tokens. decoded: their text, after that of the tokens before them."""
        # With byte tokens, an invalid byte can change how the characters before it decode, which were already returned.
        continues = decoded.startswith(self._before)
        piece = decoded[len(self._before) :] if continues else self._decode(self._ids[self._read :])
        piece, self._prompt_rest = piece.removeprefix(self._prompt_rest), ""
        self._ids = self._ids[self._read :]
        self._read, self._before = len(self._ids), self._decode(self._ids)
        self._text += piece
        return piece

    def stopped(self, piece: str) -> bool:
        """Whether the last piece completed a stop string; the text then ends before that string."""
        if not piece:
            return False
        # If the piece completes several, the one that begins first counts.
        positions = [
            self._text.find(s, max(self._shown, len(self._text) - len(piece) - len(s) + 1)) for s in self._stop
        ]
        if not (starts := [position for position in positions if position >= 0]):
            return False
        self._text, self._ended = self._text[: min(starts)], True
        return True

    def take(self) -> str:
        """The text not returned before, except an end that may become a stop string."""
        withheld = 0
        if not self._ended:
            longest = max((len(s) for s in self._stop), default=1) - 1
            tails = (self._text[len(self._text) - n :] for n in range(min(longest, len(self._text)), 0, -1))
            withheld = next((len(tail) for tail in tails if any(s.startswith(tail) for s in self._stop)), 0)
        return self._show(len(self._text) - withheld)

    def rest(self) -> str:
        """The remaining text after the last token; an incomplete character is returned as the tokenizer decodes it."""
        if (decoded := self._decode(self._ids)) != self._before:
            self._append(decoded)
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        piece, self._shown = self._text[self._shown : end], max(end, self._shown)
        return piece
