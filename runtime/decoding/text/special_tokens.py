"""Special tokens that a conversation spells out: what a user, a system message or a tool writes is text, whatever it
says.

Their first characters are replaced by marks before a template is rendered, so that only what the template writes itself
is still spelled like a special token. A second tokenizer, in which special tokens have names that no text holds, then
encodes the text without the marks.
"""

import json
import re
from collections.abc import Collection, Iterable
from functools import cached_property
from itertools import takewhile
from secrets import token_hex
from typing import Any

MARKS = range(0xD8C0, 0xDB40)  # first halves of surrogate pairs, which are in no valid text


class SpecialTokens:
    """The special tokens that a chat template can write. Safe to use from any thread."""

    def __init__(self, tokenizer: Any, template: str, ends: Collection[int]) -> None:
        """tokenizer: a ``tokenizers.Tokenizer``. template: its text; tokens in it are special even if the tokenizer
        takes them for text, as transformers' ``sanitize_control_tokens`` has it. ends: token ids that end a text."""
        added = {number: token for number, token in tokenizer.get_added_tokens_decoder().items() if token.content}
        special = {
            token.content: number
            for number, token in added.items()
            if token.special or number in ends or (token.content in template and not token.content.isspace())
        }
        self._tokenizer, self._special = tokenizer, special
        self._marks = {
            first: chr(mark) for mark, first in zip(MARKS, sorted({content[0] for content in special}), strict=False)
        }
        self._any = _Spelled(special, self._marks)
        self._ends = _Spelled([content for content, number in special.items() if number in ends], self._marks)
        self._added = re.compile(_longest([token.content for token in added.values()]) or r"(?!)")
        self._marked = re.compile(f"[{''.join(self._marks.values())}]" if self._marks else r"(?!)")

    def marked(self, text: str, assistant: bool) -> str:
        """Text of the caller's, with marks. assistant: whether an assistant wrote it: then only tokens that end texts
        are marked, since an answer ends before them."""
        return (self._ends if assistant else self._any).marked(text)

    def unmarked(self, text: str) -> tuple[str, Any]:
        """A rendered text without its marks, and the tokenizer that encodes it."""
        if not self._marked.search(text):
            return text, self._tokenizer
        names, tokenizer = self._renamed
        text = self._added.sub(lambda found: names.get(found[0], found[0]), text)
        return text.translate({ord(mark): first for first, mark in self._marks.items()}), tokenizer

    @cached_property
    def _renamed(self) -> tuple[dict[str, str], Any]:
        """The special tokens' names, which nobody can guess, and the tokenizer that knows them by these names only."""
        from tokenizers import Tokenizer

        secret = token_hex(16)
        names = {content: f"<{secret} {i}>" for i, content in enumerate(self._special)}
        spec = json.loads(self._tokenizer.to_str())
        model = spec["model"]
        for token in spec["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        # Otherwise the model could compose them of their letters.
        if isinstance(words := model["vocab"], dict):
            model["vocab"] = {names.get(word, word): number for word, number in words.items()}
        else:
            model["vocab"] = [[names.get(word, word), score] for word, score in words]
        if "merges" in model:
            model["merges"] = [
                pair for pair in model["merges"] if not names.keys() & {*_parts(pair), "".join(_parts(pair))}
            ]
        if model.get("unk_token") is not None:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        return names, Tokenizer.from_str(json.dumps(spec))


class _Spelled:
    """Finds words in texts."""

    def __init__(self, words: Collection[str], marks: dict[str, str]) -> None:
        """marks: by the words' first characters."""
        rests: dict[str, list[str]] = {}
        for word in words:
            rests.setdefault(word[0], []).append(word[1:])
        self._pattern = re.compile("|".join(f"{re.escape(c)}(?={_longest(r)})" for c, r in rests.items()) or r"(?!)")
        self._beginnings = {word[:size] for word in words for size in range(1, len(word))}
        self._most = max(map(len, self._beginnings), default=0)
        self._marks = marks

    def marked(self, text: str) -> str:
        """With the first character of each word replaced, and of one that the end of the text cuts off, as what follows
        may complete it."""
        text = self._pattern.sub(lambda found: self._marks[found[0]], text)
        end = len(text.rstrip())
        cut = {start for start in range(max(0, end - self._most), end) if text[start:end] in self._beginnings}
        if not cut:
            return text
        first = min(cut)
        marked = (self._marks[c] if i in cut else c for i, c in enumerate(text[first:end], first))
        return text[:first] + "".join(marked) + text[end:]


def _longest(words: Iterable[str]) -> str:
    """A regular expression for the longest of some words at a place, in time that does not grow with their number."""
    known = set(words)
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*known, strict=False))
    if prefix := "".join(column[0] for column in shared):
        return re.escape(prefix) + _longest(word[len(prefix) :] for word in known)
    branches = {
        first: _longest(word[1:] for word in known if word[:1] == first)
        for first in {word[0] for word in known if word}
    }
    if not branches:
        return ""
    listed = "|".join(re.escape(first) + rest for first, rest in branches.items())
    return f"(?:{listed}){'?' * ('' in known)}"


def _parts(pair: str | list[str]) -> list[str]:
    return pair.split(" ") if isinstance(pair, str) else pair
