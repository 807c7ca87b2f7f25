"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder, with llama.cpp's defaults (src/llama-vocab.cpp)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.errors import DamageError, InputError

from .end_tokens import end_tokens, looks_like_an_end
from .json_config import shown
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from .sentencepiece_bpe import Pieces, tokenizer_of
from .special_tokens import Kind, add_special, surround

_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": dict[str, int]()}  # where the file does not say
_NO_PRE = (
    "the file does not say how its tokenizer splits a text (tokenizer.ggml.pre), so that it is split by llama.cpp's default, with which "
    "the text may get worse: convert the model again"
)


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and the chat templates; nothing if the metadata has no
    tokenizer. Returns what its user should know, as clauses.

    Raises InputError for a kind of tokenizer that is not supported, and DamageError for metadata that contradicts itself.
    """
    if "tokenizer.ggml.tokens" not in fields:
        return []
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(fields["tokenizer.ggml.tokens"])]
    kind = fields.get("tokenizer.ggml.model")
    if kind not in _IDS:
        raise InputError(f"the tokenizer is of kind {shown(kind)}, expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)")
    kinds = [
        Kind.CONTROL if looks_like_an_end(text) else own
        for text, own in zip(tokens, _each(fields, "token_type", tokens, Kind.NORMAL), strict=True)
    ]
    if len(set(tokens)) < len(tokens):
        raise DamageError("the tokenizer has a token twice: download the file again")

    fields = {f"tokenizer.ggml.{name}_token_id": i for name, i in _IDS[kind].items()} | dict(fields)

    def token(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None

    notes = list[str]()
    if kind == "gpt2":
        pre = fields.get("tokenizer.ggml.pre")
        if pre is None:
            notes.append(_NO_PRE)
        splitting = PRE_TOKENIZERS.get(pre or "default")
        if splitting is None:
            raise InputError(f"the tokenizer splits text as {shown(pre)} does, expected one of {', '.join(PRE_TOKENIZERS)}")
        tokenizer, begins = _byte_level(fields["tokenizer.ggml.merges"], tokens, splitting), splitting.begins
        add_special(tokenizer, tokens, kinds)
    else:
        prefix, trims = (fields.get(f"tokenizer.ggml.{key}") for key in ("add_space_prefix", "remove_extra_whitespaces"))
        charsmap = bytes(byte % 256 for byte in fields.get("tokenizer.ggml.precompiled_charsmap", ()))
        scores = _each(fields, "scores", tokens, 0.0)
        tokenizer = tokenizer_of(Pieces(tokens, scores, kinds, prefix is not False, bool(trims), charsmap))
        begins = True
    bos = token("bos") if fields.get("tokenizer.ggml.add_bos_token", begins) else None
    eos = token("eos") if fields.get("tokenizer.ggml.add_eos_token") else None
    surround(tokenizer, bos, eos, [processors.ByteLevel(trim_offsets=False)] if kind == "gpt2" else ())
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **{name: token(stored) for name, stored in names.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}), "utf-8")
    _write_templates(fields, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_tokens(fields, tokens)}), "utf-8")
    return notes


def _each(fields: Mapping[str, Any], key: str, tokens: Sequence[str], default: float) -> list[Any]:
    """A number for every token."""
    found = fields.get(f"tokenizer.ggml.{key}", [default] * len(tokens))
    if not isinstance(found, list) or len(found) < len(tokens):
        raise DamageError(f"the tokenizer has {len(tokens)} tokens and fewer tokenizer.ggml.{key}: download the file again")
    return found[: len(tokens)]


def _byte_level(merges: Sequence[str], tokens: Sequence[str], pre: PreTokenizer) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(merge[:space], merge[space + 1 :]) for merge in merges for space in [merge.index(" ", 1)]]
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
    files = {key: folder / "chat_template.jinja"}
    for name in fields:
        own = name.removeprefix(f"{key}.")
        if own != name and own.isidentifier():  # a file's name too
            files[name] = others / f"{own}.jinja"
    for name, file in files.items():
        if isinstance(fields.get(name), str):
            file.parent.mkdir(exist_ok=True)
            file.write_text(fields[name], "utf-8")
