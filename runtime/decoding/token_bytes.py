"""The bytes that each token stands for, read from the text of a tokenizer.json."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import GumihoError, reason

# How byte-level tokenizers write bytes as characters (GPT-2's table): printable Latin-1 as itself, the others from 256
# on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# To the characters of Latin-1, which are bytes; a character that stands for no byte becomes one that Latin-1 lacks.
_LATIN = dict.fromkeys(_OTHERS, 0xFFFF) | {256 + i: byte for i, byte in enumerate(_OTHERS)}


def spell(tokenizer_json: str) -> dict[int, bytes]:
    """Token id -> its bytes behind other text; special tokens are left out, as they stand for none.

    Raises GumihoError where the text is no tokenizer.json, or its decoder does not work token by token.
    """
    try:
        raw = json.loads(tokenizer_json)
        vocabulary, added = raw["model"]["vocab"], raw.get("added_tokens") or ()
        # Unigram models list their pieces with scores, all others map them to ids.
        pieces = (
            vocabulary.items()
            if isinstance(vocabulary, dict)
            else ((piece, i) for i, (piece, _) in enumerate(vocabulary))
        )
        texts = {int(i): str(piece) for piece, i in pieces} | {
            int(token["id"]): str(token["content"]) for token in added
        }
        special = {int(token["id"]) for token in added if token["special"]}
        decode = _decoder(raw.get("decoder") or {"type": "none"})
        return {i: decode(text) for i, text in texts.items() if i not in special}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise GumihoError(f"the tokenizer is damaged ({reason(error)}): copy the bundle again") from None


def _decoder(raw: Mapping[str, Any]) -> Callable[[str], bytes]:
    steps = []
    for step in raw["decoders"] if raw["type"] == "Sequence" else [raw]:
        if step["type"] == "Fuse":
            break  # what follows works on the whole text: it trims its start, which is the prompt's
        steps.append(_step(step))

    def decode(piece: str) -> bytes:
        for step in steps:
            turned = step(piece)
            if isinstance(turned, bytes):
                return turned
            piece = turned
        return piece.encode()

    return decode


def _step(raw: Mapping[str, Any]) -> Callable[[str], str | bytes]:
    kind = raw["type"]
    if kind == "ByteLevel":
        return _byte_level
    if kind == "ByteFallback":
        return _byte_fallback
    if kind == "Metaspace":
        return lambda piece: piece.replace(raw["replacement"], " ")
    if kind == "Replace" and "String" in raw["pattern"]:
        return lambda piece: piece.replace(raw["pattern"]["String"], raw["content"])
    raise GumihoError(
        f"what the tokens of this tokenizer spell depends on their neighbours (its decoder is {kind}), "
        "which no grammar can follow: generate without one"
    )


def _byte_level(piece: str) -> bytes:
    try:
        return piece.translate(_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()  # an added token may hold characters that stand for no byte: it is written as it is


def _byte_fallback(piece: str) -> str | bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece
