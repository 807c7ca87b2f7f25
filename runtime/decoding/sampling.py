"""Chooses a token from a row of the target's logits, identically in plain and in speculative decoding.

The steps, in the order of transformers (``GenerationMixin._get_logits_processor``):

logit bias; repetition penalty; presence and frequency penalties; no repeated n-gram; banned tokens; end-of-text tokens,
before ``min_new_tokens``; the caller's processors; the grammar's mask; forced tokens; temperature; top-k; top-p; min-p;
the draw.

Differences from transformers: presence and frequency penalties are OpenAI's and unknown there; among equally likely
tokens at the edge of top-p the lower ids stay, while transformers leaves the order open; and the draw uses another
random generator (``noise``).
"""

from collections.abc import Sequence
from math import inf, log

import numpy as np

from ..errors import InputError
from .grammar_matcher import GrammarMatcher
from .noise import blocks, noise, winners
from .settings import Settings


def candidates(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that can be drawn, as ascending ids int64 [n], and their logits divided by the temperature, float64
    [n].

    row: float32 [V]. Uses partial selection; at most a few hundred tokens, or ten times those that top-p keeps, are
    sorted.
    """
    best = float(row.max())
    if 0 < top_k < len(row):
        ids = np.flatnonzero(row >= np.partition(row, len(row) - top_k)[len(row) - top_k])
        ids = ids[_nucleus(row[ids], best, temperature, top_p)] if top_p < 1 else ids
    elif top_p < 1:
        ids = _nucleus(row, best, temperature, top_p)
    else:  # those that min-p keeps, and some near them
        least = best + 1.001 * temperature * log(min_p) - 1e-5 * abs(best) if min_p > 0 else -inf
        ids = np.flatnonzero(row >= least)
    ids = ids[row[ids] > -np.inf]
    values = _scaled(row[ids], best, temperature)
    if min_p > 0:
        within = np.exp(values) >= min_p
        ids, values = ids[within], values[within]
    return ids, values


def _scaled(logits: np.ndarray, highest: float, temperature: float) -> np.ndarray:
    """Float64 [n]; the largest is 0."""
    values = logits.astype(np.float64)
    values -= highest  # before the division, which may overflow
    with np.errstate(over="ignore"):
        values /= temperature
    return values


def _nucleus(row: np.ndarray, best: float, temperature: float, share: float) -> np.ndarray:
    """Ascending indices of the smallest set of likeliest tokens that have at least this share of the probability (arXiv
    1904.09751). best: the largest logit."""
    size = 64
    wanted = share * sum(float(np.exp(_scaled(row[block], best, temperature)).sum()) for block in blocks(len(row)))
    while True:
        size = min(8 * size, len(row))
        edge = np.partition(row, len(row) - size)[len(row) - size]
        above, level = np.flatnonzero(row > edge), np.flatnonzero(row == edge)
        largest = np.concatenate((above, level[: size - len(above)]))
        order = largest[np.argsort(-row[largest], kind="stable")]
        before = np.cumsum(np.exp(_scaled(row[order], best, temperature)))
        if before[-1] >= wanted or size == len(row):
            return np.sort(order[: int(np.searchsorted(before, wanted)) + 1])


class Sampler:
    """Chooses the tokens of one text. It is told every token that joins the text."""

    def __init__(
        self,
        settings: Settings,
        seed: int,
        prompt: Sequence[int],
        vocabulary: int,
        ends: frozenset[int],
        matcher: GrammarMatcher | None,
    ) -> None:
        """ends: ids that end the text, masked before ``min_new_tokens``. Raises InputError for ids outside the
        vocabulary."""
        self.settings, self.seed, self._matcher = settings, seed, matcher
        self._ends = np.array([end for end in sorted(ends) if 0 <= end < vocabulary], np.int64)
        for what, ids in (
            ("banned", settings.banned),
            ("logit_bias", settings.logit_bias),
            ("forced", settings.forced.values()),
            ("stop_token_ids", settings.stop_token_ids),
        ):
            if (odd := next((i for i in ids if not 0 <= i < vocabulary), None)) is not None:
                raise InputError(
                    f"{what} names token id {odd}, outside the vocabulary of {vocabulary}: give 0 to {vocabulary - 1}"
                )
        self._banned = np.array(sorted(settings.banned), np.int64)
        self._biased = np.array(list(settings.logit_bias), np.int64)
        self._bias = np.array(list(settings.logit_bias.values()), np.float32)
        self._ids, self._prompt = list(prompt), len(prompt)
        self._seen = np.zeros(vocabulary, np.bool_)
        self._seen[list(prompt)] = True
        self._counts = np.zeros(vocabulary, np.float32)
        # tokens that followed each sequence of no_repeat_ngram - 1 tokens
        self._runs: dict[tuple[int, ...], set[int]] = {}
        for end in range(1, len(prompt) + 1) if settings.no_repeat_ngram else ():
            self._note(end)
        s = settings
        self._idle = not (
            s.temperature
            or s.logit_bias
            or s.presence_penalty
            or s.frequency_penalty
            or s.no_repeat_ngram
            or s.banned
            or s.processors
            or matcher
            or s.repetition_penalty != 1
        )

    def _note(self, end: int) -> None:
        """Records the n-gram that ends before position ``end``."""
        n = self.settings.no_repeat_ngram
        if 0 < n <= end:
            self._runs.setdefault(tuple(self._ids[end - n : end - 1]), set()).add(self._ids[end - 1])

    @property
    def idle(self) -> bool:
        """Whether the next token is simply the one with the largest logit."""
        new = len(self._ids) - self._prompt
        return self._idle and new >= self.settings.min_new_tokens and new not in self.settings.forced

    @property
    def most_likely(self) -> bool:
        """Whether nothing but the logits decides every token, as far as ``added`` knows."""
        s = self.settings
        return not (s.temperature or s.logit_bias or s.banned or s.presence_penalty or s.frequency_penalty)

    def added(self, position: int) -> np.ndarray | None:
        """What biases, penalties of the text so far, and bans add to the logits at a position that may lie ahead; fp32
        [V], or None if nothing. The steps that depend on the logits or on the tokens between are left out."""
        s = self.settings
        early = position - self._prompt < s.min_new_tokens
        if not (s.logit_bias or s.banned or s.presence_penalty or s.frequency_penalty or early):
            return None
        row = np.zeros(len(self._seen), np.float32)
        row[self._biased] += self._bias
        if s.presence_penalty or s.frequency_penalty:
            self._penalize(row)
        row[self._banned] = -np.inf
        if early:
            row[self._ends] = -np.inf
        return row

    def _penalize(self, row: np.ndarray) -> None:
        used = np.flatnonzero(self._counts)
        row[used] -= self.settings.presence_penalty + self.settings.frequency_penalty * self._counts[used]

    def accept(self, token: int) -> None:
        self._ids.append(token)
        if self._idle:
            return
        self._seen[token] = True
        self._counts[token] += 1
        self._note(len(self._ids))
        if self._matcher:
            self._matcher.accept(token)

    def processed(self, row: np.ndarray) -> np.ndarray:
        """A copy of the row, float32 [V], after steps 1 to 9; tokens that cannot be chosen are -inf."""
        s, row, new = self.settings, row.astype(np.float32), len(self._ids) - self._prompt
        row[self._biased] += self._bias
        if s.repetition_penalty != 1:
            seen = np.flatnonzero(self._seen)
            values = row[seen]
            row[seen] = np.where(values < 0, values * s.repetition_penalty, values / s.repetition_penalty)
        if s.presence_penalty or s.frequency_penalty:
            self._penalize(row)
        if 0 < s.no_repeat_ngram <= len(self._ids) + 1:
            run = tuple(self._ids[len(self._ids) + 1 - s.no_repeat_ngram :])
            row[list(self._runs.get(run, ()))] = -np.inf
        row[self._banned] = -np.inf
        if new < s.min_new_tokens:
            row[self._ends] = -np.inf
        for process in s.processors:
            process(self._ids, row)
        if self._matcher:
            self._matcher.mask(row)
        if new in s.forced:
            token = s.forced[new]
            if self._matcher and not self._allows(token):
                raise InputError(
                    f"token {token}, forced at index {new}, is not allowed by the grammar: change one of them"
                )
            row[:] = -np.inf
            row[token] = 0.0
        return row

    def _allows(self, token: int) -> bool:
        """Whether the grammar allows a token, regardless of the other steps."""
        row = np.zeros(len(self._seen), np.float32)
        assert self._matcher
        self._matcher.mask(row)
        return bool(row[token] == 0)

    def margin(self, row: np.ndarray, token: int) -> float:
        """How much the logit of a token must grow for it to be chosen; inf if no amount is enough. Runs the processors
        repeatedly."""
        least, enough = 0.0, 1e-6

        def chosen(more: float) -> bool:
            raised = row.astype(np.float32)
            raised[token] += more
            return self.choose(raised) == token

        while not chosen(enough):
            least, enough = enough, 2 * enough
            if enough > 1e6:
                return np.inf
        for _ in range(30):
            middle = (least + enough) / 2
            least, enough = (least, middle) if chosen(middle) else (middle, enough)
        return enough

    def choose(self, row: np.ndarray) -> int:
        """The next token, given the target's logits [V]. Raises InputError if no token is allowed."""
        s, row = self.settings, self.processed(row)
        best = row.max()
        if np.isnan(best) or (s.temperature and best == np.inf):
            raise InputError(
                f"a logit at position {len(self._ids)} is {best}: check the processors, and use smaller biases and "
                "penalties"
            )
        if best == -np.inf:
            raise InputError(
                f"no token is allowed at position {len(self._ids)}: relax the grammar, bans, biases, no_repeat_ngram "
                "or min_new_tokens"
            )
        if not s.temperature:
            return int(row.argmax())
        position = len(self._ids)
        if s.top_k or s.top_p < 1 or s.min_p:
            ids, values = candidates(row, s.temperature, s.top_k, s.top_p, s.min_p)
        else:
            ids = winners(row, s.temperature, self.seed, position)
            values = _scaled(row[ids], float(best), s.temperature)
        return int(ids[(values + noise(self.seed, position, ids)).argmax()])
