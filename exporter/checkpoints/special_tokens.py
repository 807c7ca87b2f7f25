"""Special tokens of a tokenizer that is built here: those that a text may hold, and those around every text."""

from collections.abc import Collection, Sequence
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, processors


class Kind(IntEnum):
    """What a token is: the numbers of SentencePiece's model file, and of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def add_special(tokenizer: Tokenizer, texts: Sequence[str], kinds: Sequence[int], strips: Collection[str] = ()) -> None:
    """Makes control tokens special, and those that a user defined whole: both are found in a text before it is split.
    texts, kinds: by token id. strips: which of them take the spaces behind them."""
    for special, of in ((True, (Kind.CONTROL, Kind.UNKNOWN)), (False, (Kind.USER_DEFINED,))):
        found = [text for text, kind in zip(texts, kinds, strict=True) if kind in of]
        tokenizer.add_tokens(
            [AddedToken(text, special=special, normalized=False, rstrip=text in strips) for text in found]
        )


def surround(
    tokenizer: Tokenizer, bos: str | None, eos: str | None, first: Sequence[processors.PostProcessor] = ()
) -> None:
    """Puts a token before and one after every text, if there are any. first: what else is done to a text before
    that."""
    if bos or eos:
        special = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text]
        single, other = ([text for text in (bos, of, eos) if text] for of in ("$A", "$B"))
        template = processors.TemplateProcessing(single=single, pair=single + other, special_tokens=special)
        tokenizer.post_processor = processors.Sequence([*first, template])
