"""The draft vocabulary: which tokens the drafter may propose, if fewer than all (FR-Spec, arXiv 2502.14856).

The drafter's ``lm_head`` then has rows only for these. Tokens outside are never proposed, which can lower acceptance
but never changes the output: the target chooses among all tokens.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import DamageError, InputError, reason

_PIECE = 1 << 20  # characters tokenized at once; a token across the boundary of two pieces may be counted as two


@dataclass(frozen=True)
class DraftVocabulary:
    """ids: int64 [N], the target's token id of each row of the drafter's lm_head. origin: how they were chosen, for
    messages. own_rows: whether the drafter's checkpoint has these rows; else the target's rows are used.
    """

    ids: Tensor
    origin: str
    own_rows: bool = False


def require_size(size: int, vocabulary: int, ends: Collection[int]) -> None:
    """Raises InputError for a draft vocabulary without room for the ends of text ``ends``, or larger than the
    target's."""
    if not len(ends) < size <= vocabulary:
        raise InputError(
            f"--draft-vocab is {size}: give {len(ends) + 1} to {vocabulary}, the target's vocabulary, "
            f"of which those that end a text ({len(ends)}) are always drafted"
        )


def frequent(
    size: int, vocabulary: int, tokenizer: Any, files: Sequence[Path] = (), ends: Iterable[int] = ()
) -> DraftVocabulary:
    """The most frequent tokens of the files' text, in ascending order, so that ties in the tree go to the lower id as
    always.

    size: N. vocabulary: number of the target's tokens. tokenizer: the target's, of transformers, or None. files: see
    ``count``; if they have fewer than N tokens, the rest follows in the order of ``by_age``. ends: end-of-text ids,
    which are always included because texts in files do not have them. Raises InputError for files that cannot be read.
    """
    counts = count(files, tokenizer)
    if files and not counts:
        raise InputError("the files of --draft-text hold no text: give others, or leave the option out")
    valid_counts = {i: n for i, n in counts.items() if i < vocabulary}
    ids = choose(size, valid_counts, by_age(tokenizer, vocabulary), (end for end in ends if 0 <= end < vocabulary))
    covered = sum(valid_counts.get(i, 0) for i in ids) / max(1, counts.total())
    origin = f"which are {covered:.1%} of the given text" if files else "the oldest, as no --draft-text was given"
    return DraftVocabulary(torch.tensor(ids), origin)


def choose(size: int, counts: Mapping[int, int], order: Iterable[int], always: Iterable[int]) -> list[int]:
    """``size`` ids, ascending: ``always`` first, then by descending count (ties to the lower id), then by ``order``."""
    ranked = sorted(counts, key=lambda i: (-counts[i], i))
    return sorted(islice(dict.fromkeys(chain(always, ranked, order)), size))


def by_age(tokenizer: Any, vocabulary: int) -> list[int]:
    """All ids, roughly by frequency: the alphabet, then merged tokens in the order of the merges; by id without merges.

    Byte-level tokenizers number their tokens in this order; those of SentencePiece put letters and digits last.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"] if tokenizer else {}
    if model.get("type") != "BPE":
        return list(range(vocabulary))
    ids: dict[str, int] = model["vocab"]
    merged = dict.fromkeys(ids[token] for pair in model["merges"] if (token := "".join(pair)) in ids)
    alphabet = sorted(set(ids.values()) - merged.keys())
    return [i for i in dict.fromkeys(chain(alphabet, merged, range(vocabulary))) if i < vocabulary]


def count(files: Iterable[Path], tokenizer: Any) -> Counter[int]:
    """Counts each token in the text of files. Of .jsonl files it reads the fields ``prompt``, ``text`` and ``turns``.

    Raises InputError for files that cannot be read.
    """
    counts = Counter[int]()
    for file in files:
        for text in _texts(file):
            counts.update(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return counts


def _texts(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as stream:
            if file.suffix != ".jsonl":
                while piece := stream.read(_PIECE):
                    yield piece
                return
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield from _fields(line, f"{file}, line {number}")
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror or error}): give another --draft-text") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text ({reason(error)}): give another --draft-text") from None


def _fields(line: str, where: str) -> list[str]:
    """The texts of a line of JSON."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    values = [record[key] for key in ("prompt", "text", "turns") if key in record] if isinstance(record, dict) else []
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    if not values or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"{where} has no text, or list of texts, under 'prompt', 'text' or 'turns': add one, or remove the line"
        )
    return texts


def token_map(
    ids: Tensor, vocabulary: int, rows: int | None, source: str, name: str = "token_map"
) -> DraftVocabulary | None:
    """The draft vocabulary of a drafter with a ``token_map``; None if the map has all tokens.

    ids: the map, the target's token id of each row of a trimmed lm_head. rows: rows of the drafter's lm_head, None if
    it has none. A trimmed lm_head is used as it is. Without one, or with a whole one, the target's rows are used, as in
    vLLM (``models/eagle.py`` of its V0 engine; its Gumiho ignores the map). Raises DamageError for an invalid map.
    """
    where = f"drafter '{source}': its {name}"
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64) or not len(ids):
        raise DamageError(
            f"{where} is {ids.dtype} of shape {list(ids.shape)}, expected a list of token ids: download it again"
        )
    ascending = ids.long().unique()
    if len(ascending) != len(ids) or ascending[0] < 0 or ascending[-1] >= vocabulary:
        raise DamageError(
            f"{where} has a token twice, or one outside the vocabulary of {vocabulary}: download it again"
        )
    if rows not in (None, len(ids), vocabulary):
        raise DamageError(f"{where} has {len(ids)} tokens and its lm_head {rows} rows: download it again")
    if len(ids) == vocabulary:
        return None
    own_rows = rows == len(ids)
    origin = f"the drafter's {name}" + (" with an lm_head of its own" if own_rows else "")
    return DraftVocabulary(ids.long() if own_rows else ascending, origin, own_rows)
