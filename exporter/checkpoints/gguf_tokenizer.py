"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder.

transformers' own conversion ignores ``tokenizer.ggml.pre``, the way text is split before byte-pair encoding, so byte-level tokenizers
are built here, with llama.cpp's patterns (src/llama-vocab.cpp). SentencePiece ones have no such choice and use transformers'.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.errors import InputError

from .json_config import shown

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> patterns whose matches are split off, one after the other.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "llama-bpe": (_CL100K % "{1,3}",),
    "llama3": (_CL100K % "{1,3}",),
    "dbrx": (_CL100K % "{1,3}",),
    "smaug-bpe": (_CL100K % "{1,3}",),
    "qwen2": (_CL100K % "",),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "dbrx", "smaug-bpe", "tekken")  # a word that is a token is not split into merges
_CONTROL, _USER_DEFINED = 3, 4  # token types


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json; nothing if the metadata has no tokenizer.

    Raises InputError for a kind of tokenizer that is not supported.
    """
    if "tokenizer.ggml.tokens" not in fields:
        return
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(fields, tokens)
    elif kind == "llama":
        from transformers.integrations.ggml import convert_gguf_tokenizer

        tokenizer, _ = convert_gguf_tokenizer(
            "llama",
            {key.removeprefix("tokenizer.ggml."): v for key, v in fields.items() if key.startswith("tokenizer.ggml.")}
            | {"tokenizer_type": "llama"},
        )
    else:
        raise InputError(f"the tokenizer is of kind {shown(kind)}, expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)")

    def token(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None

    kinds = fields.get("tokenizer.ggml.token_type", [])
    for number, name in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokenizer.add_tokens(
            [AddedToken(tokens[i], special=name, normalized=False) for i, k in enumerate(kinds) if k == number]
        )
    bos = token("bos")
    if fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and bos:
        begin = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
        tokenizer.post_processor = (
            begin if kind == "llama" else processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": fields.get("tokenizer.chat_template"),
              **{f"{name}_token": token(stored) for name, stored in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}), "utf-8")
    ends = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(dict.fromkeys(ends))}), "utf-8")


def _byte_level(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PATTERNS:
        raise InputError(f"the tokenizer splits text as {shown(pre)} does, expected one of {', '.join(_PATTERNS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
