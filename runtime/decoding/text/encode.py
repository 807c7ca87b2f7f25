"""Text to token ids, with the errors of the tokenizer's library translated."""

from collections.abc import Sequence
from operator import index
from typing import Any

from ...bundle.reader import Bundle
from ...errors import DamageError, InputError

_LONG = 1 << 15  # characters, which take about ten milliseconds


def encode(bundle: Bundle, text: str, special: bool = True, tokenizer: Any = None) -> list[int]:
    """Token ids of a text. special: add the tokenizer's special tokens, such as a beginning-of-text id. tokenizer: if
    not the bundle's.

    Raises InputError if the text holds lone surrogates or a token that the target lacks, DamageError if the tokenizer
    fails or belongs to another model.
    """
    tokenizer = tokenizer or bundle.tokenizer
    try:
        # A batch is encoded without Python's lock, which everything else in the process would wait for.
        long = len(text) > _LONG
        found = (
            tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
            if long
            else tokenizer.encode(text, add_special_tokens=special)
        )
        ids = list(found.ids)
    except (UnicodeEncodeError, TypeError):
        raise InputError(
            "the prompt is not Unicode (it has a byte that is not UTF-8, or half a character): give UTF-8 text"
        ) from None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics derive from BaseException
        raise DamageError(f"the bundle's tokenizer fails on this text ({error}): copy the bundle again") from None
    if (most := max(ids, default=0)) >= bundle.manifest.vocabulary:
        if token := bundle.tokenizer.get_added_tokens_decoder().get(most):
            raise InputError(
                f"the text holds '{token.content}' (token id {most}), which the target does not know: its vocabulary "
                f"is {bundle.manifest.vocabulary}; write something else"
            )
        raise DamageError(
            f"the bundle's tokenizer gives token id {most}, outside the vocabulary of {bundle.manifest.vocabulary}: "
            "it belongs to another model; copy the bundle again"
        )
    return ids


def token_ids(prompt: Sequence[int]) -> list[int]:
    """A prompt that is no text, as Python's numbers. Raises InputError if it is no list of token ids either."""
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [index(token) for token in prompt]
    except TypeError:
        raise InputError("the prompt is neither text nor a list of token ids: give one of the two") from None
