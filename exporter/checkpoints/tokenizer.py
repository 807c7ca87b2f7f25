"""The target's tokenizer: loads it with transformers, or recognizes without transformers that it can be loaded."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runtime.bundle.files import read_regular
from runtime.errors import DamageError, GumihoError, UnavailableError, reason

from .json_config import document
from .llama import LlamaConfig, transformers_config

_SENTENCEPIECE, _TEMPLATE = "tokenizer.model", "chat_template.jinja"
_USUAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # those of Llama, where a folder does not say
# Files of older layouts, which transformers merges into the tokenizer.
_OLDER = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # both take tokenizer.json as it is
# Fields of tokenizer_config.json: special tokens, and others with the types of values with which loading cannot fail.
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_FIELDS: dict[str, tuple[type, ...]] = {
    "tokenizer_class": (str,),
    "clean_up_tokenization_spaces": (bool,),
    "model_max_length": (int, float),
    "chat_template": (str,),
}
_ADDED = {"id": int, "content": str, "single_word": bool, "lstrip": bool, "rstrip": bool, "normalized": bool, "special": bool}
_MOST_BYTES = 1 << 20  # of a chat template
_LARGEST = 100_000  # tokens; transformers looks for known defects of larger ones


def damaged(error: BaseException, what: str) -> BaseException:
    """The exception to raise for a library's error: DamageError, unless it is an interruption, has a message of its own or means that a
    package is missing. what: is the matter, without the cause."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GumihoError):
        return error
    said = f"{what} ({reason(error)})"
    if isinstance(error, ImportError):
        return UnavailableError(f"{said}: install the package that is missing")
    return DamageError(f"{said}: download it again")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", _SENTENCEPIECE, "vocab.json"))


def load_tokenizer(folder: Path, config: LlamaConfig) -> Any:
    """transformers' tokenizer of a target. Raises DamageError if it cannot be loaded, and UnavailableError for lack of a package."""
    from transformers import AutoTokenizer

    try:
        with _complete(folder) as complete:
            # The configuration is passed so that config.json is not read again. No code of the checkpoint is run.
            return AutoTokenizer.from_pretrained(
                complete, config=transformers_config(config), use_fast=True, trust_remote_code=False, local_files_only=True
            )
    except BaseException as error:  # the library raises exceptions of any type for missing converters and damaged files
        raise damaged(error, f"the tokenizer in {folder} cannot be loaded") from None


@contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """The folder, or if SentencePiece's file is all it has, a copy with a tokenizer.json of the same ids. (transformers' own conversion
    has others for several spaces.)"""
    if (folder / "tokenizer.json").is_file() or not (folder / _SENTENCEPIECE).is_file():
        yield folder
        return
    from .sentencepiece_bpe import read, tokenizer_of
    from .special_tokens import surround

    pieces = read(folder / _SENTENCEPIECE)
    file = folder / "tokenizer_config.json"
    settings = document(file) if file.exists() else {}
    tokenizer, tokens = tokenizer_of(pieces), dict[str, str | None]()
    for name, usual in _USUAL.items():
        token = settings.get(name, usual if usual in pieces.texts else None)
        tokens[name] = token.get("content") if isinstance(token, dict) else token
    surround(
        tokenizer,
        tokens["bos_token"] if settings.get("add_bos_token", True) else None,
        tokens["eos_token"] if settings.get("add_eos_token") else None,
    )
    with TemporaryDirectory(prefix="tokenizer-") as name:
        copy = Path(name)
        for other in (*_OLDER, _TEMPLATE):
            if (folder / other).is_dir():
                shutil.copytree(folder / other, copy / other)
            elif (folder / other).is_file():
                shutil.copyfile(folder / other, copy / other)
        tokenizer.save(str(copy / "tokenizer.json"))
        settings |= {**tokens, "tokenizer_class": _CLASSES[0]}
        (copy / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}), "utf-8")
        yield copy


def surely_loads(folder: Path, vocabulary: int) -> bool:
    """Whether ``load_tokenizer`` certainly succeeds and takes tokenizer.json as it is. False means: try it.

    folder: has a tokenizer.json that the tokenizers library can read, if it has one. vocabulary: its tokens, at most, without
    the added ones.
    """
    if any((folder / name).exists() for name in _OLDER):
        return False
    try:
        settings, tokenizer = document(folder / "tokenizer_config.json"), document(folder / "tokenizer.json")
        if (template := folder / _TEMPLATE).exists():
            read_regular(template, _MOST_BYTES).decode("utf-8")
    except (OSError, ValueError, GumihoError):
        return False
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    if not isinstance(added, list) or not all(isinstance(token, dict) and token.keys() == _ADDED.keys() for token in added):
        return False
    words = model.get("vocab") if isinstance(model, dict) else None
    # transformers fails on some special tokens that the vocabulary lacks.
    known = {token["content"] for token in added if _is(token["content"], str)} | (
        words.keys() if isinstance(words, dict) else set()
    )
    return (
        settings.get("tokenizer_class") in _CLASSES
        and all(
            value is None or (_is(value, str) and value in known) if key in _TOKENS else _is(value, *_FIELDS.get(key, ()))
            for key, value in settings.items()
        )
        and tokenizer.get("truncation") is None
        and tokenizer.get("padding") is None
        and vocabulary + len(added) <= _LARGEST
        and all(_is(value, _ADDED[key]) for token in added for key, value in token.items())
    )


def _is(value: object, *types: type) -> bool:
    """Whether a JSON value has one of the types. true and false are no numbers; text may not hold half a surrogate pair."""
    if isinstance(value, str):
        return str in types and not any("\ud800" <= c <= "\udfff" for c in value)
    return type(value) in types
