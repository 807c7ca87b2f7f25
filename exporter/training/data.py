"""Text and prompts that the user gives."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import InputError, json_line, reason

from .store import ANSWER, Text

_PIECE = 1 << 20  # characters tokenized at once
_BYTES = 1 << 40  # numbers of texts begin here, those of prompts at 0


def _lines(files: Sequence[Path]) -> Iterator[tuple[int, str, Any]]:
    """Number, place and content of every record: an object of a .jsonl file, or a piece of a text file as a string."""
    number = 0
    for file in files:
        begun = number
        try:
            if file.exists() and not file.is_file():  # a pipe can be read once, and a device may have no end
                raise OSError("it is not a file")
            with file.open(encoding="utf-8") as opened:
                if file.suffix != ".jsonl":
                    while piece := opened.read(_PIECE):
                        yield number, str(file), piece
                        number += 1
                else:
                    for at, line in enumerate(opened, 1):
                        if line.strip():
                            yield number, f"{file}:{at}", json_line(line, at)
                        number += 1
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"--data '{file}' cannot be read ({reason(error)}): give text, or a JSON object a line"
            ) from None
        if number == begun:
            raise InputError(f"--data '{file}' is empty: give text, or a JSON object a line")


def _record(place: str, content: Any) -> tuple[str, list[str]]:
    """A record's text and its user turns, one of which is empty."""
    if isinstance(content, str):
        return content, []
    if isinstance(content, dict):
        text, prompt, turns = (content.get(name) for name in ("text", "prompt", "turns"))
        if isinstance(text, str):
            return text, []
        if isinstance(prompt, str):
            return "", [prompt]
        if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
            return "", turns
    raise InputError(f"--data: {place} has neither 'text' nor 'prompt' nor 'turns': give one of these, with strings")


def prompts(files: Sequence[Path]) -> list[tuple[int, list[str]]]:
    """The user turns of every record that has some, with its number. Raises InputError for files that cannot be
    read."""
    return [(number, turns) for number, place, content in _lines(files) if (turns := _record(place, content)[1])]


def plain(files: Sequence[Path], tokenizer: Any, text: Text, window: int, known: set[int]) -> None:
    """Appends the records that are text, cut into windows, all of it to be drafted. known: numbers that are there
    already.

    Raises InputError for files that cannot be read.
    """
    for number, place, content in _lines(files):
        written = _record(place, content)[0]
        if not written or _BYTES + number in known:
            continue
        ids = np.array(tokenizer(written, add_special_tokens=True, verbose=False)["input_ids"], np.uint32) | ANSWER
        text.append([(ids[begin : begin + window], _BYTES + number) for begin in range(0, len(ids), window)])
