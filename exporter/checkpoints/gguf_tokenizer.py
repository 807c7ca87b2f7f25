"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder, with llama.cpp's defaults
(src/llama-vocab.cpp)."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.errors import DamageError, InputError

from .end_tokens import OF_CODE, end_tokens, looks_like_an_end
from .gguf_keys import TOKENIZER_READ
from .json_config import shown
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from .sentencepiece_bpe import Pieces, tokenizer_of
from .special_tokens import Kind, add_special, surround

_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": dict[str, int]()}  # where the file does not say
_SPELLED = {  # tokens around a gap in code, which are special where the file does not name another
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    **OF_CODE,
}
_OLDER_KEYS = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid"}
# special in a text, and part of what is decoded
_SHOWN = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
_WITHIN = {"<|end|>": Kind.USER_DEFINED, "</s>": Kind.NORMAL}  # where they end no text, beside certain others
_KEEP_SPACES = frozenset(("<unk>", "<s>", "<|endoftext|>"))  # of the special tokens of Phi-3, which a file's name tells
_NO_PRE = (
    "the file does not say how its tokenizer splits a text (tokenizer.ggml.pre), so that it is split by llama.cpp's "
    "default, with which the text may get worse: convert the model again"
)
_WAY_OUT = "convert the model again, or name its folder in the Hugging Face layout"


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and the chat templates; nothing if the
    metadata has no tokenizer. Returns what its user should know, as clauses.

    Raises InputError for a tokenizer or a value that is not supported, and DamageError for metadata that contradicts
    itself.
    """
    if "tokenizer.ggml.tokens" not in fields:
        return []
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(_list(fields, "tokens", str))]
    kind = fields.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _IDS:
        raise InputError(
            f"tokenizer.ggml.model is {shown(kind)}, expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece): name "
            "another target"
        )
    if len(set(tokens)) < len(tokens):
        raise DamageError("the tokenizer has a token twice: download the file again")
    notes = list[str]()
    ids = _token_ids(fields, kind, len(tokens), notes)
    ends = end_tokens({f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}, tokens)
    kinds = _kinds(fields, tokens, ids, ends)
    prefix, trims = _flag(fields, "add_space_prefix", True), _flag(fields, "remove_extra_whitespaces", False)
    strips = set(tokens) - _KEEP_SPACES if re.search("phi-?3", str(fields.get("general.name")).lower()) else ()
    if kind == "gpt2":
        splitting = _pre_tokenizer(fields, notes)
        tokenizer, begins = _byte_level(_list(fields, "merges", str), tokens, splitting), splitting.begins
        add_special(tokenizer, tokens, kinds, strips)
    else:
        charsmap = bytes(byte % 256 for byte in _list(fields, "precompiled_charsmap", int, ()))
        scores = _each(fields, "scores", tokens, float | int)
        if not all(map(isfinite, scores)):
            raise InputError(f"tokenizer.ggml.scores holds NaN or infinity: {_WAY_OUT}")
        tokenizer, begins = tokenizer_of(Pieces(tokens, scores, kinds, prefix, trims, charsmap, strips)), True

    def around(name: str, default: bool) -> str | None:
        if not _flag(fields, f"add_{name}_token", default):
            return None
        return tokens[_required(ids, name)]

    first = [processors.ByteLevel(trim_offsets=False)] if kind == "gpt2" else ()
    surround(tokenizer, around("bos", begins), around("eos", False), first)
    _required(ids, "eos")
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {name: tokens[ids[stored]] for name, stored in names.items() if stored in ids}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    _write_templates(fields, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), "utf-8")
    return notes


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    found = fields.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(found, bool):
        raise InputError(f"tokenizer.ggml.{name} is {shown(found)}, expected true or false: {_WAY_OUT}")
    return found


def _list(fields: Mapping[str, Any], name: str, of: Any, default: Sequence[Any] | None = None) -> Sequence[Any]:
    found = fields.get(f"tokenizer.ggml.{name}", default)
    if found is None:
        raise InputError(f"the tokenizer has no tokenizer.ggml.{name}, without which it is not supported: {_WAY_OUT}")
    if not isinstance(found, list | tuple) or not all(
        isinstance(value, of) and not isinstance(value, bool) for value in found
    ):
        expected = "texts" if of is str else "whole numbers" if of is int else "numbers"
        raise InputError(f"tokenizer.ggml.{name} is {shown(found)}, expected a list of {expected}: {_WAY_OUT}")
    return found


def _each(fields: Mapping[str, Any], name: str, tokens: Sequence[str], of: Any) -> Sequence[Any]:
    """A number for every token."""
    found = _list(fields, name, of)
    if len(found) < len(tokens):
        raise DamageError(
            f"the tokenizer has {len(tokens)} tokens and fewer tokenizer.ggml.{name}: download the file again"
        )
    return found[: len(tokens)]


def _token_ids(fields: Mapping[str, Any], kind: str, count: int, notes: list[str]) -> dict[str, int]:
    """The ids of special tokens, by the names of their keys. Those that no token has are left out, as by llama.cpp."""
    found = {name: i for name, i in _IDS[kind].items() if i < count}
    for key in sorted(TOKENIZER_READ):
        name = key.removesuffix("_token_id")
        value = fields.get(f"tokenizer.ggml.{key}")
        if name == key or value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"tokenizer.ggml.{key} is {shown(value)}, expected the id of a token: {_WAY_OUT}")
        if 0 <= value < count:
            found[_OLDER_KEYS.get(name, name)] = value
        else:
            notes.append(
                f"tokenizer.ggml.{key} is {value}, the id of none of its {count} tokens, so that it counts for "
                "nothing, as in llama.cpp: if texts need that token, convert the model again"
            )
    return found


def _required(ids: Mapping[str, int], name: str) -> int:
    """llama.cpp takes token 11 for one that a byte-level tokenizer lacks, whatever it is."""
    if name not in ids:
        raise InputError(
            f"the tokenizer has no tokenizer.ggml.{name}_token_id, without which it is not supported: say which token "
            f"it is (gguf-new-metadata --special-token-by-id {name} ID)"
        )
    return ids[name]


def _kinds(
    fields: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int], ends: Collection[int]
) -> list[int]:
    """What each token is: what the file says, unless llama.cpp knows better by its spelling."""
    if "tokenizer.ggml.token_type" in fields or fields["tokenizer.ggml.model"] == "llama":
        kinds = list(_each(fields, "token_type", tokens, int))
    else:
        kinds = [Kind.NORMAL] * len(tokens)
    if odd := set(kinds) - set(Kind):
        raise InputError(
            f"tokenizer.ggml.token_type holds {min(odd)}, expected numbers from {min(Kind):d} to {max(Kind):d}: "
            f"{_WAY_OUT}"
        )
    numbers = {text: i for i, text in enumerate(tokens)}
    for name, spellings in _SPELLED.items():
        if name not in ids:
            for i in [numbers[text] for text in spellings if text in numbers][:1]:
                kinds[i] = Kind.CONTROL
    for text, i in numbers.items():
        if looks_like_an_end(text):
            kinds[i] = Kind.CONTROL if i in ends else _WITHIN[text]
        elif text in _SHOWN:
            kinds[i] = Kind.USER_DEFINED
    return kinds


def _pre_tokenizer(fields: Mapping[str, Any], notes: list[str]) -> PreTokenizer:
    pre = fields.get("tokenizer.ggml.pre", "")
    if pre == "":
        notes.append(_NO_PRE)
        return PRE_TOKENIZERS["default"]
    if isinstance(pre, str) and pre in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[pre]
    close = ", ".join(get_close_matches(str(pre), PRE_TOKENIZERS, cutoff=0.5))
    raise InputError(
        f"tokenizer.ggml.pre is {shown(pre)}, a way of splitting a text that is not supported"
        f"{f' (closest: {close})' if close else ''}: name the model's folder in the Hugging Face layout, or, if you "
        "know that the model splits as another name says, give that (gguf-new-metadata --pre-tokenizer NAME)"
    )


def _byte_level(merges: Sequence[str], tokens: Sequence[str], pre: PreTokenizer) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = list[tuple[str, str]]()
    for merge in merges:
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or not {left, right, left + right} <= vocabulary.keys():
            raise InputError(
                f"tokenizer.ggml.merges holds {shown(merge)}, which is no pair of tokens that are a token together: "
                f"{_WAY_OUT}"
            )
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre.whole_words))
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_templates(fields: Mapping[str, Any], folder: Path) -> None:
    """The chat template, and those that have a name, ``tokenizer.chat_template.NAME``."""
    key, others = "tokenizer.chat_template", folder / "additional_chat_templates"
    for name, content in fields.items():
        own = name.removeprefix(f"{key}.")
        if name != key and own == name:
            continue
        if own != name and not re.fullmatch(r"\w[\w.-]{0,63}", own, re.ASCII):  # a file's name too
            raise InputError(
                f"the chat template {shown(name)} has a name with other characters than letters, digits, '_', '-' and "
                f"'.': take it out (gguf-new-metadata --remove-metadata {shown(name)})"
            )
        if not isinstance(content, str):
            raise InputError(f"{name} is {shown(content)}, expected a text: {_WAY_OUT}")
        file = folder / "chat_template.jinja" if name == key else others / f"{own}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, "utf-8")
