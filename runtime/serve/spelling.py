"""The spelling of single tokens in responses that list them."""

from collections.abc import Mapping
from typing import Any

from ..decoding.token_bytes import spell
from ..errors import GumihoError


class Spelling:
    """The texts and bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a ``tokenizers.Tokenizer``."""
        self._tokenizer = tokenizer
        try:
            self._bytes: Mapping[int, bytes] = spell(tokenizer.to_str())
        except GumihoError:  # the tokenizer does not define bytes of tokens
            self._bytes = {}

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """A token's text, with replacement characters for incomplete ones, and its bytes."""
        spelled = self._bytes.get(token)
        if spelled is None:
            text = (
                self._tokenizer.decode([token], skip_special_tokens=False) or self._tokenizer.id_to_token(token) or ""
            )
            spelled = text.encode("utf-8", "replace")
        return spelled.decode("utf-8", "replace"), list(spelled)
