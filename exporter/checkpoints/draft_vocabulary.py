"""Which tokens the drafter may draft, where that is not all of them (FR-Spec, arXiv 2502.14856).

Its ``lm_head`` then has a row for each of these alone. What is left out is never drafted, which costs acceptance, never a token:
the target chooses among all of them.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import GumihoError

_PIECE = 1 << 20  # characters tokenized at once: where two pieces meet, a token may be counted as two


@dataclass(frozen=True)
class DraftVocabulary:
    """ids: int64 [N], the target's id of each row of the drafter's lm_head. origin: how they were found, for the reader.
    own_rows: whether those rows are the drafter's own; else they are the target's.
    """

    ids: Tensor
    origin: str
    own_rows: bool = False


def frequent(
    size: int, vocabulary: int, tokenizer: Any, files: Sequence[Path] = (), ends: Iterable[int] = ()
) -> DraftVocabulary:
    """The most frequent tokens of the files' text, in ascending order, so that ties in the tree stay what they were.

    size: N. vocabulary: how many ids there are. tokenizer: transformers' of the target, or None. files: see ``count``; what they
    leave open is filled up in the order of ``by_age``. ends: ids that end a text, of which the text of a file has none: they are
    drafted in any case. Raises GumihoError for files that cannot be counted.
    """
    counts = count(files, tokenizer)
    if files and not counts:
        raise GumihoError("the files of --draft-text hold no text: give others, or leave the option out")
    known = {i: n for i, n in counts.items() if i < vocabulary}
    ids = choose(size, known, by_age(tokenizer, vocabulary), (end for end in ends if 0 <= end < vocabulary))
    covered = sum(known.get(i, 0) for i in ids) / max(1, counts.total())
    origin = f"which are {covered:.1%} of the given text" if files else "the oldest, as no --draft-text was given"
    return DraftVocabulary(torch.tensor(ids), origin)


def choose(size: int, counts: Mapping[int, int], order: Iterable[int], always: Iterable[int]) -> list[int]:
    """``size`` ids, ascending: those that are always there, then by falling count, of equal ones the lower, then by ``order``."""
    ranked = sorted(counts, key=lambda i: (-counts[i], i))
    return sorted(islice(dict.fromkeys(chain(always, ranked, order)), size))


def by_age(tokenizer: Any, vocabulary: int) -> list[int]:
    """All ids, roughly by frequency: the alphabet, then what pairs were merged to, in the order of merging.

    Byte-level tokenizers number their tokens so; SentencePiece's have letters and digits last. Where nothing was merged, by id.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"] if tokenizer else {}
    if model.get("type") != "BPE":
        return list(range(vocabulary))
    ids: dict[str, int] = model["vocab"]
    merged = dict.fromkeys(ids[token] for pair in model["merges"] if (token := "".join(pair)) in ids)
    alphabet = sorted(set(ids.values()) - merged.keys())
    return [i for i in dict.fromkeys(chain(alphabet, merged, range(vocabulary))) if i < vocabulary]


def count(files: Iterable[Path], tokenizer: Any) -> Counter[int]:
    """How often each token comes in the text of files: of plain ones, and of the fields ``prompt``, ``text`` and ``turns`` of
    those that end in .jsonl. Raises GumihoError for what cannot be read.
    """
    counts = Counter[int]()
    for file in files:
        for text in _texts(file):
            counts.update(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return counts


def _texts(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as opened:
            if file.suffix != ".jsonl":
                while piece := opened.read(_PIECE):
                    yield piece
                return
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield from _fields(line, f"{file}, line {number}")
    except OSError as error:
        raise GumihoError(f"{file} cannot be read ({error.strerror or error}): give another --draft-text") from None
    except UnicodeDecodeError as error:
        raise GumihoError(f"{file} is no text in UTF-8 ({error}): give another --draft-text") from None


def _fields(line: str, where: str) -> list[str]:
    """The texts of a line of JSON."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    values = [record[key] for key in ("prompt", "text", "turns") if key in record] if isinstance(record, dict) else []
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    if not values or not all(isinstance(text, str) for text in texts):
        raise GumihoError(f"{where}: a text, or a list of texts, is expected under 'prompt', 'text' or 'turns'")
    return texts


def token_map(ids: Tensor, vocabulary: int, rows: int | None, source: str) -> DraftVocabulary | None:
    """What a drafter's own ``token_map`` means: the target's id of each row of a trimmed lm_head. None where it names all tokens.

    ids: as stored; rows: of the drafter's own lm_head, None where it has none. Such an lm_head is used with its rows as they are; a
    whole one, and none, leave them to the target, as vLLM does (``models/eagle.py`` of its V0 engine; its Gumiho ignores the map).
    Raises GumihoError for a map that is none.
    """
    where = f"drafter '{source}': its token_map"
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64) or not len(ids):
        raise GumihoError(f"{where} is {ids.dtype} of shape {list(ids.shape)}, expected a list of token ids")
    found = ids.long().unique()  # sorted
    if len(found) != len(ids) or found[0] < 0 or found[-1] >= vocabulary:
        raise GumihoError(f"{where} names a token twice, or one outside the vocabulary of {vocabulary}: download it again")
    if rows not in (None, len(ids), vocabulary):
        raise GumihoError(f"{where} has {len(ids)} tokens and its lm_head {rows} rows: download it again")
    if len(ids) == vocabulary:
        return None
    own = rows == len(ids)
    origin = "the drafter's token_map" + (" with an lm_head of its own" if own else "")
    return DraftVocabulary(ids.long() if own else found, origin, own)
