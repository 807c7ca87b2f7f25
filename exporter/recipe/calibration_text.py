"""The text that a target is calibrated with."""

from pathlib import Path

import torch

from runtime.errors import InputError, reason

from ..checkpoints.pair import Pair

TOKENS = 512  # of a text that are read
_PAGE = """# Notes on the archive

The archive keeps one record per parcel: when it came in, who brought it, and where it lies now. Records are never deleted. If a
parcel leaves, its record says so, and the place becomes free. Why so strict? In 1987 a whole shelf was lost for nine months;
nobody had done anything wrong, but nobody could prove it either.

1. Weigh the parcel (in kg) and note the weight, e.g. 2.75.
2. Choose the lowest free place that is large enough.
3. Write the label *before* you walk to the shelf.

```python
def lowest_place(shelf: list[Place], size: float) -> Place | None:
    '''The first place that is free and large enough.'''
    for place in sorted(shelf, key=lambda p: p.height):
        if place.parcel is None and place.size >= size:
            return place
    return None
```

Questions? Ask Maria Keller (room 14, phone 555-0142) or write to archive@example.org. She will answer within two days, usually
sooner; on Fridays the office closes at 15:30."""


def usual_text(pair: Pair, capacity: int) -> tuple[int, ...]:
    """The token ids of a page of English and code, at most ``TOKENS`` or the capacity; random ones if there is no
    tokenizer to read it with."""
    if pair.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return tuple(
            torch.randint(0, pair.target_shape.vocabulary, (min(TOKENS, capacity),), generator=generator).tolist()
        )
    return tuple(pair.tokenizer(_PAGE).input_ids[:capacity])


def text_of(file: Path, pair: Pair, capacity: int) -> tuple[int, ...]:
    """The first token ids of a text, ``TOKENS`` or the capacity. Raises InputError if it cannot be read or has too
    few."""
    most = min(TOKENS, capacity)
    if pair.tokenizer is None:
        raise InputError(
            f"target '{pair.target.source}' has no tokenizer to read --calibrate with: leave the option out"
        )
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"--calibrate {file} cannot be read ({reason(error)}): give a readable UTF-8 file") from None
    ids = tuple(pair.tokenizer(text).input_ids[:most])
    if len(ids) < most:
        raise InputError(f"--calibrate {file} has {len(ids)} tokens: give a text of {most} or more")
    return ids
