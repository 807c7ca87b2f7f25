"""A tokenizer as grammars see it: what each token spells."""

from collections.abc import Sequence

import numpy as np

from .grammar_process import GrammarProcesses
from .token_bytes import spell


class Vocabulary:
    """The tokenizer in the library's form. Built once, because that takes long for a large vocabulary.

    size: width of a row of logits. ends, end_ids: the ids that end a text, as a tuple and as int64. library_ids: int64
    [size], the id that the library has for each token: the lowest id with the same spelling, -1 for a token without a
    spelling. duplicates: int64, the ids whose library id is another one; originals: int64, that other id. spellable:
    int32 [words], a bit for each id that the library may allow. processes: those that follow grammars over it.
    """

    def __init__(self, tokenizer_json: str, size: int, ends: Sequence[int]) -> None:
        self.size, self.ends = size, tuple(sorted({end for end in ends if 0 <= end < size}))
        self.library_ids = np.full(size, -1, np.int64)
        first_ids: dict[bytes, int] = {}
        for token, spelled in sorted(spell(tokenizer_json).items()):
            # The byte 0xff occurs in no UTF-8 text, and the library uses it as a mark.
            if 0 <= token < size and token not in self.ends and spelled and not spelled.startswith(b"\xff"):
                self.library_ids[token] = first_ids.setdefault(spelled, token)
        is_first = np.zeros((size // 32 + 1) * 32, bool)
        is_first[:size] = self.library_ids == np.arange(size)
        self.spellable = np.packbits(is_first, bitorder="little").view(np.int32)
        self.duplicates = np.flatnonzero((self.library_ids >= 0) & ~is_first[:size])
        self.originals, self.end_ids = self.library_ids[self.duplicates], np.array(self.ends, np.int64)
        # The library needs one token that ends a text, and it must not be one of the model's: it gets an additional id
        # after them. Its name begins with the mark of special tokens, so no grammar can contain it.
        tokens = [b""] * size + [b"\xffend"]
        for spelled, token in first_ids.items():
            tokens[token] = spelled
        self.processes = GrammarProcesses(tokens, size)
