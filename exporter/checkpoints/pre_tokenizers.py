"""How llama.cpp's pre-tokenizers (``tokenizer.ggml.pre``; src/llama-vocab.cpp) split a text before byte-pair encoding.

The patterns are those of the models' own tokenizers, which llama.cpp spells otherwise where its regular expressions
lack something.
"""

from dataclasses import dataclass, replace

_ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+"


def _cl100k(digits: str) -> str:
    return rf"(?i:{_ENDINGS})|{_WORD}|{digits}|{_PUNCTUATION}[\r\n]*|{_SPACES}"


def _cased(digits: str, ending: str) -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{_UPPER}*{_LOWER}+{ending}|{before}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}|{_PUNCTUATION}[\r\n/]*|{_SPACES}"


_DEEPSEEK_3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)
_LETTERS = (  # of alphabets with two cases, as DeepSeek lists them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """patterns: whose matches are split off, one after the other. whole_words: whether a word that is a token is not
    split into merges. begins: whether a text begins with the beginning-of-text token where the file does not say.
    composes: whether characters are composed first (NFC), which llama.cpp leaves out."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False
    composes: bool = False


_GPT = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA_3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), whole_words=True, begins=True)
_QWEN = PreTokenizer((_cl100k(r"\p{N}"),))
_DEEPSEEK = PreTokenizer((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_3))
_FAMILIES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 mellum gigachat a.x-4.0 jina-es jina-de jina-v1-en "
    "jina-v2-es "
    "jina-v2-de jina-v2-code roberta-bpe modern-bert": _GPT,
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _DIGITS,
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA_3,
    "glm4 glm5": replace(_LLAMA_3, begins=False),
    "dbrx smaug-bpe chatglm-bpe": replace(_LLAMA_3, whole_words=False, begins=False),
    "qwen2 stablelm2": replace(_QWEN, composes=True),
    "deepseek-r1-qwen megrez kormo f2llmv2 hunyuan solar-open grok-2": _QWEN,
    "tekken": PreTokenizer((_cased(r"\p{N}", ""),), whole_words=True, begins=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_cased(r"\p{N}{1,3}", rf"(?i:{_ENDINGS})?"),)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK,
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "seed-coder": PreTokenizer((rf"(?i:{_ENDINGS})|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
}
# By name. Those of llama.cpp that are missing belong to architectures that are no targets, or need more than regular
# expressions.
PRE_TOKENIZERS = {name: found for names, found in _FAMILIES.items() for name in names.split()}
