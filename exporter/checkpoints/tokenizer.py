"""The target's tokenizer: loads it with transformers, or recognizes without transformers that it can be loaded."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runtime.bundle.files import read_regular
from runtime.decoding.text.template_files import templates
from runtime.errors import DamageError, GumihoError, InputError, UnavailableError, reason, unreadable

from .json_config import document, is_whole, shown
from .llama import LlamaConfig, transformers_config

_SENTENCEPIECE, _CONFIG = "tokenizer.model", "tokenizer_config.json"
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_SPECIAL, _ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
_USUAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # those of Llama, where a folder does not say
# Files of older layouts, which transformers merges into the tokenizer.
_OLDER = (_SPECIAL, _ADDED_TOKENS, _TEMPLATES)
_FURTHER = ("additional_special_tokens", "extra_special_tokens")
_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # both take tokenizer.json as it is
# Fields of tokenizer_config.json: special tokens, and others with the types of values with which loading cannot fail.
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_FIELDS: dict[str, tuple[type, ...]] = {
    "tokenizer_class": (str,),
    "clean_up_tokenization_spaces": (bool,),
    "model_max_length": (int, float),
    "chat_template": (str,),
}
_ADDED = {
    "id": int,
    "content": str,
    "single_word": bool,
    "lstrip": bool,
    "rstrip": bool,
    "normalized": bool,
    "special": bool,
}
_MOST_TOKENS = 1 << 24
_MOST_BYTES = 1 << 20  # of a chat template
_LARGEST = 100_000  # tokens; transformers looks for known defects of larger ones


def damaged(error: BaseException, what: str) -> BaseException:
    """The exception to raise for a library's error: DamageError, unless it is an interruption, has a message of its own
    or means that a package is missing. what: is the matter, without the cause."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GumihoError):
        return error
    if isinstance(error, PermissionError):
        return unreadable(error.filename, error)
    said = f"{what} ({reason(error)})"
    if isinstance(error, ImportError):
        return UnavailableError(f"{said}: install the package that is missing")
    return DamageError(f"{said}: download it again")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", _SENTENCEPIECE, "vocab.json"))


def load_tokenizer(folder: Path, config: LlamaConfig) -> Any:
    """transformers' tokenizer of a target. Raises DamageError if it cannot be loaded, InputError for settings of
    another kind and tokens whose ids are not supported, and UnavailableError for lack of a package."""
    from transformers import AutoTokenizer

    _check(folder)
    try:
        with _complete(folder) as complete:
            # The configuration is passed so that config.json is not read again. No code of the checkpoint is run.
            return AutoTokenizer.from_pretrained(
                complete,
                config=transformers_config(config),
                use_fast=True,
                trust_remote_code=False,
                local_files_only=True,
            )
    except BaseException as error:  # the library raises exceptions of any type for missing converters and damaged files
        raise damaged(error, f"the tokenizer in {folder} cannot be loaded") from None


@contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """The folder, or if SentencePiece's file is all it has, a copy with a tokenizer.json of the same ids.
    (transformers' own conversion has others for several spaces.)"""
    if (folder / "tokenizer.json").is_file() or not (folder / _SENTENCEPIECE).is_file():
        yield folder
        return
    from tokenizers import AddedToken

    from .sentencepiece_bpe import read, tokenizer_of
    from .special_tokens import surround

    settings, pieces = _optional(folder / _CONFIG), read(folder / _SENTENCEPIECE)
    tokenizer = tokenizer_of(replace(pieces, again=settings.get("legacy") is not False))
    if "added_tokens_decoder" not in settings:
        settings |= _optional(folder / _SPECIAL)
    usual = {name: token for name, token in _USUAL.items() if token in pieces.texts}
    settings = usual | {name: _spelled(value) for name, value in settings.items() if value is not None}
    added = _added(folder, settings)
    for index, token in sorted(added.items()):
        tokenizer.add_tokens([AddedToken(**token)])
        if (own := tokenizer.token_to_id(token["content"])) != index:
            raise InputError(
                f"the tokenizer in {folder} gives {shown(token['content'])} the id {index}, but {_SENTENCEPIECE} and "
                f"the tokens before it leave {own} for it, which is not supported: put the model's tokenizer.json into "
                "the folder, as transformers saves it"
            )
    bos, eos = (settings.get(name) for name in ("bos_token", "eos_token"))
    bos, eos = bos if settings.get("add_bos_token", True) else None, eos if settings.get("add_eos_token") else None
    for token in filter(None, (bos, eos)):
        if tokenizer.token_to_id(token) is None:
            raise InputError(
                f"{folder / _CONFIG} puts {shown(token)} around every text, which is no token of {_SENTENCEPIECE}: "
                "correct its bos_token and eos_token"
            )
    surround(tokenizer, bos, eos)
    with TemporaryDirectory(prefix="tokenizer-") as name:
        copy = Path(name)
        if (folder / _TEMPLATES).is_dir():
            shutil.copytree(folder / _TEMPLATES, copy / _TEMPLATES)
        if (folder / _TEMPLATE).is_file():
            shutil.copyfile(folder / _TEMPLATE, copy / _TEMPLATE)
        tokenizer.save(str(copy / "tokenizer.json"))
        settings |= {
            "tokenizer_class": _CLASSES[0],
            "added_tokens_decoder": {str(i): token for i, token in added.items()},
        }
        (copy / _CONFIG).write_text(json.dumps(settings), "utf-8")
        yield copy


def _check(folder: Path) -> None:
    """Refuses settings that no tokenizer has, of which transformers would speak in its own terms."""
    for text, index in _optional(folder / _ADDED_TOKENS).items():
        if not is_whole(index, 0, _MOST_TOKENS):
            raise _refusal(folder / _ADDED_TOKENS, text, index, "a token id")
    for file in (folder / _CONFIG, folder / _SPECIAL):
        for name, value in _optional(file).items():
            valid, expected = _KINDS.get(name, (None, ""))
            if valid and value is not None and not valid(value, file):
                raise _refusal(file, name, value, expected)
    templates(folder)


def _is_token(value: Any, file: Path) -> bool:
    if isinstance(value, dict) and (file.name == _SPECIAL or value.get("__type") == "AddedToken"):
        value = value.get("content")
    return _is(value, str)


def _are_tokens(value: Any, file: Path) -> bool:
    return isinstance(value, list | dict) and all(
        _is_token(one, file) for one in (value.values() if isinstance(value, dict) else value)
    )


def _are_described(value: Any, _: Path) -> bool:
    return isinstance(value, dict) and all(
        index.isdecimal() and isinstance(token, dict) and _is(token.get("content"), str)
        for index, token in value.items()
    )


_Valid = Callable[[Any, Path], bool]
_KINDS: dict[str, tuple[_Valid, str]] = {
    **dict.fromkeys((*_TOKENS, "sep_token", "cls_token", "mask_token"), (_is_token, "the text of a token")),
    **dict.fromkeys(_FURTHER, (_are_tokens, "the texts of tokens")),
    "added_tokens_decoder": (_are_described, "tokens, each with its content, by id"),
    "tokenizer_class": (lambda value, _: _is(value, str), "the name of a class"),
}


def _refusal(file: Path, name: str, value: object, expected: str) -> InputError:
    return InputError(f"{file} has {shown(value)} as {shown(name)}, expected {expected}: correct it")


def _optional(file: Path) -> dict[str, Any]:
    return document(file) if file.exists() else {}


def _spelled(value: Any) -> Any:
    """A setting with the texts of tokens in place of descriptions of them."""
    if isinstance(value, list):
        return [_spelled(entry) for entry in value]
    return value["content"] if isinstance(value, dict) and _is(value.get("content"), str) else value


def _added(folder: Path, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The tokens that a folder adds to SentencePiece's, by id. None is normalized: the normalizer would put a space
    before it, and it would be found behind a space only. settings: with the texts of special tokens."""
    if (described := settings.get("added_tokens_decoder")) is not None:
        return {int(i): token | {"normalized": False} for i, token in described.items()}
    special = {token for name, token in settings.items() if name.endswith("_token") and isinstance(token, str)}
    for name in _FURTHER:
        named = settings.get(name) or ()
        special |= set(named.values() if isinstance(named, dict) else named)
    return {
        index: {"content": text, "special": text in special, "normalized": False}
        for text, index in _optional(folder / _ADDED_TOKENS).items()
    }


def surely_loads(folder: Path, vocabulary: int) -> bool:
    """Whether ``load_tokenizer`` certainly succeeds and takes tokenizer.json as it is. False means: try it.

    folder: has a tokenizer.json that the tokenizers library can read, if it has one. vocabulary: its tokens, at most,
    without the added ones.
    """
    if any((folder / name).exists() for name in _OLDER):
        return False
    try:
        settings, tokenizer = document(folder / _CONFIG), document(folder / "tokenizer.json")
        if (template := folder / _TEMPLATE).exists():
            read_regular(template, _MOST_BYTES).decode("utf-8")
    except (OSError, ValueError, GumihoError):
        return False
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and token.keys() == _ADDED.keys() for token in added
    ):
        return False
    words = model.get("vocab") if isinstance(model, dict) else None
    # transformers fails on some special tokens that the vocabulary lacks.
    known = {token["content"] for token in added if _is(token["content"], str)} | (
        words.keys() if isinstance(words, dict) else set()
    )
    return (
        settings.get("tokenizer_class") in _CLASSES
        and all(
            value is None or (_is(value, str) and value in known)
            if key in _TOKENS
            else _is(value, *_FIELDS.get(key, ()))
            for key, value in settings.items()
        )
        and tokenizer.get("truncation") is None
        and tokenizer.get("padding") is None
        and vocabulary + len(added) <= _LARGEST
        and all(_is(value, _ADDED[key]) for token in added for key, value in token.items())
    )


def _is(value: object, *types: type) -> bool:
    """Whether a JSON value has one of the types. true and false are no numbers; text may not hold half a surrogate
    pair."""
    if isinstance(value, str):
        return str in types and not any("\ud800" <= c <= "\udfff" for c in value)
    return type(value) in types
