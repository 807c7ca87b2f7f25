"""Which tokens may follow in one text by its grammar."""

import re
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import numpy as np

from ..errors import InputError, MisuseError
from .grammar_child import MEMORY, STEP_SECONDS, TEXT_SECONDS
from .grammar_process import EndedError, GrammarProcess
from .grammar_vocabulary import Vocabulary

_T = TypeVar("_T")
_NOTHING = (
    "the grammar allows no next token, so nothing can follow: stop here, or change it to what this vocabulary can spell"
)
# The upper bounds of eight tokens' logits, by the byte that holds their bits: float32 [256, 8], inf if allowed,
# otherwise -inf.
_BOUNDS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_BOUNDS = _BOUNDS.astype(np.float32)


class GrammarMatcher:
    """The state of a grammar in one generation: which tokens may follow. A token that ends the text counts as accepted,
    too.

    seconds: that the text has waited for the grammar.
    """

    def __init__(self, vocabulary: Vocabulary, process: GrammarProcess) -> None:
        """``GrammarMatchers.start`` creates one. process: at the start of the text."""
        self._vocabulary, self._process, self.seconds = vocabulary, process, 0.0
        self._accepted: list[int] = []
        self._ended = False
        self._bits = np.zeros_like(vocabulary.spellable)  # the allowed tokens, if they are current
        self._bounds = np.empty((self._bits.nbytes, 8), np.float32)
        self._current = False

    def mask(self, row: np.ndarray) -> None:
        """Sets the logits of tokens that the grammar does not allow to -inf. row: float32 [vocabulary], changed in
        place.

        Raises InputError if no token is allowed: after the end, if the vocabulary cannot spell what must follow, and if
        the grammar became too complex.
        """
        vocabulary, bits, may_end = self._vocabulary, self._allowed(), self._may_end()
        if self._ended or not (bits.any() or (may_end and vocabulary.ends)):
            raise InputError(_NOTHING)
        # Far cheaper than a mask of bools, whose branches a processor cannot predict. mode="clip" avoids a copy.
        np.take(_BOUNDS, bits.view(np.uint8), axis=0, out=self._bounds, mode="clip")
        bounds = self._bounds.reshape(-1)[: vocabulary.size]
        bounds[vocabulary.duplicates] = bounds[vocabulary.originals]
        bounds[vocabulary.end_ids] = np.inf if may_end else -np.inf
        np.minimum(row, bounds, out=row)

    def accept(self, token: int) -> None:
        """Appends a token to the text. Raises InputError if the grammar does not allow it; the matcher is then
        unchanged."""
        if token in self._vocabulary.ends and self._may_end():
            self._ended = True
        elif not self._continue(token):
            raise InputError(f"token {token} cannot follow by the grammar: accept only a token that mask leaves finite")
        self._accepted.append(token)

    def rewind(self, count: int) -> None:
        """Takes back the last ``count`` tokens. Raises MisuseError if fewer were accepted."""
        if not 0 <= count <= len(self._accepted):
            raise MisuseError(
                f"{count} tokens cannot be taken back, because {len(self._accepted)} were accepted: take back no more"
            )
        remaining = self._accepted[: len(self._accepted) - count]
        if seen := count - (self._ended and count > 0):  # the library never saw the token that ended the text
            self._do(lambda: self._process.rollback(seen))
        self._accepted, self._ended, self._current = remaining, self._ended and count == 0, False

    @property
    def done(self) -> bool:
        """Whether the text is complete: only its end can follow."""
        return self._ended or (self._may_end() and not self._allowed().any())

    def _continue(self, token: int) -> bool:
        library_id = int(self._vocabulary.library_ids[token]) if 0 <= token < self._vocabulary.size else -1
        if self._ended or library_id < 0:
            return False
        accepted = self._do(lambda: self._process.consume(library_id))
        self._current = self._current and not accepted
        return accepted

    def _may_end(self) -> bool:
        return not self._ended and self._process.may_end

    def _allowed(self) -> np.ndarray:
        if not self._current:
            self._do(lambda: self._process.mask(self._bits))
            self._bits &= self._vocabulary.spellable
            self._current = True
        return self._bits

    def _do(self, work: Callable[[], _T]) -> _T:
        begun = perf_counter()
        try:
            done = work()
        except EndedError:
            raise InputError(
                f"the grammar cannot be followed further (a token takes more than {STEP_SECONDS:g} s, or the text "
                f"{TEXT_SECONDS} s or {MEMORY >> 20} MiB): simplify it"
            ) from None
        finally:
            self.seconds += perf_counter() - begun
        # A state with an error allows the end of the text anywhere, so it must not be used.
        if problem := brief(self._process.problem):
            dead = problem.startswith("NoExtensionBias")
            raise InputError(_NOTHING if dead else f"the grammar cannot be followed further ({problem}): simplify it")
        return done


def brief(problem: str, place: str = "") -> str:
    """The library's message without the source and state that it appends. place: pattern to remove at the beginning."""
    return " ".join(re.sub(place, "", re.split(r"\n *\d+ \| |\n<", problem)[0]).split())
