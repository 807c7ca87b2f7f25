"""Records how llama.cpp tokenizes texts and reads vocabularies, for tests/test_llama_cpp.py: python -m
tools.record_llama_cpp tests/recorded

Needs llama-cpp-python and gguf, which the tests do not install. It makes two vocabularies: byte pairs merged across
words, digits and punctuation, so that ids show where a text was split; and one like SentencePiece's with special
tokens.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exporter.checkpoints.pre_tokenizers import PRE_TOKENIZERS

TEXTS = [
    "The quick brown fox's 12345 jumps, over 678 lazy dogs! I'LL say we'Ve  seen it.",
    "  two,   three    spaces \n\n\n  and lines\r\n\r\n x",
    "def f(x: int = 7) -> str:\n\treturn f'{x:>10}' + \"...\" # 3.14e-5\n\n\n        y",
    "naïve café — déjà vu, ÜBER Ñandú ǅ Ωμέγα Привет",
    "e\u0301 composed é; ﬁ ﬀ Å ſ ’s ‘t",
    "日本語のテスト、中文 한국어 ภาษาไทย हिन्दी العربية",
    "🙂🙃 👩‍👩‍👧 ½ ² ٣ ௧ 1a2b3c",
    "[INST] <<SYS>>\n{{ x }}\n<</SYS>> [/INST] |_|~^`$+=<>@",
    "https://example.org/a_b?c=d&e=%20f#g/h",
    "CamelCaseWords XMLHttpRequest iPhone15 A1 b2 C3",
    "\xa0\u2003\u3000spaces of other kinds\u200b.\t\t\t",
    "a",
    " ",
    "\n",
    "   ",
    "<s>x</s> y <unk>z",
    "a [X] b[X]c <0x41> ▁▁ d▁e",
]
ENDS = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|fim_pad|>",
    "<PAD>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<reponame>",
    "<|file_sep|>",
    "<|im_start|>",
    "<bos>",
    "<|fim_prefix|>",
]
# Vocabularies and keys whose end-of-text tokens are recorded, in addition to those of every token alone.
OF_ENDS: list[tuple[list[str], dict[str, int]]] = [
    (["<|end|>", "<|return|>", "<|call|>"], {}),
    (["<|end|>", "<|return|>"], {}),
    (["<|end|>", "<|call|>", "<|flush|>"], {}),
    (["<|end|>", "<|calls|>", "<|flush|>"], {}),
    (["</s>", "<|tool_response>"], {}),
    (["</s>", "<eos>"], {}),
    (["<|im_start|>", "<bos>"], {"eos": 1}),
    (["<|im_start|>", "<bos>", "<|im_end|>"], {"eot": 1}),
    (["<|im_start|>", "<bos>"], {"eom": 0}),
    (["<|file_sep|>", "<bos>"], {"fim_sep": 1}),
    (["<|fim_pad|>", "<bos>"], {"fim_pad": 1, "eos": 0}),
]
# Tokens, their type in the file (3: control), and keys. llama.cpp changes the type of some tokens because of their
# spelling.
SPELLED: list[tuple[list[str], int, dict[str, int]]] = [
    *(
        ([text], 1, dict[str, int]())
        for text in (
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
            "<|fim_pad|>",
            "<fim-pad>",
            "<fim_pad>",
            "<PAD>",
            "[PAD]",
            "<|fim_repo|>",
            "<|repo_name|>",
            "<fim-repo>",
            "<REPO>",
            "<reponame>",
            "<|file_sep|>",
            "<|channel|>",
            "<|message|>",
            "<|start|>",
            "<|constrain|>",
            "<|im_end|>",
            "</s>",
            "<|im_start|>",
            "<fim_repo>",
        )
    ),
    (["<PRE>", "<other>"], 1, {"fim_pre": 1}),
    (["<PRE>", "<other>"], 1, {"prefix": 1}),
    (["<|fim_pad|>", "<other>"], 1, {"fim_pad": 1}),
    (["</s>", "<|tool_response>"], 3, {}),
    (["</s>", "<eos>"], 3, {}),
    (["<|end|>", "<|return|>", "<|call|>"], 1, {}),
]


def byte_level() -> dict[str, Any]:
    """256 bytes and 700 merges, learned from the texts without splitting them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=956, initial_alphabet=alphabet, show_progress=False, max_token_length=12)
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    # The last token is one that no merge produces.
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "ĠXMLHttpRequest"]
    return {
        "model": "gpt2",
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def sentencepiece(special: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """Bytes, characters, merges with descending scores, and special tokens."""
    words = [
        "▁▁",
        "▁▁▁▁",
        "in",
        "▁a",
        "▁t",
        "he",
        "▁the",
        "re",
        "on",
        "er",
        "▁x",
        "ing",
        "[X",
        "s>",
        "▁<",
        "</",
        "▁</",
        "▁[",
        "nk",
    ]
    characters = sorted({c for text in TEXTS[:4] + TEXTS[-2:] for c in text.replace(" ", "▁") if c.isprintable()})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "[X]", *words, *characters, *special]
    kinds = [2, 3, 3, *[6] * 256, 4, *[1] * (len(words) + len(characters)), *[3] * len(special)]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [-float(max(0, i - 259)) for i in range(len(tokens))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | more


def write(fields: Mapping[str, Any], file: Path) -> None:
    """Writes a GGUF file with only a vocabulary."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_feed_forward_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in fields.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[
            type(value)
        ]
        add(name if "." in name else f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def recorded(fields: Mapping[str, Any], texts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """The ids of each text, including those that llama.cpp adds, and the tokens that end a text."""
    import llama_cpp

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocabulary.gguf"
        write(fields, file)
        model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
        vocabulary = llama_cpp.llama_model_get_vocab(model.model)
        ends = [i for i in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocabulary, i)]
        return [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts], ends


def record() -> dict[str, Any]:
    base, pieces = byte_level(), sentencepiece()
    found = {name: recorded(base | ({"pre": name} if name else {}), TEXTS)[0] for name in ("", *PRE_TOKENIZERS)}
    distinct = list(dict.fromkeys(map(json.dumps, found.values())))
    ends = [([text, "<other>"], dict[str, int]()) for text in ENDS] + OF_ENDS
    return {
        "texts": TEXTS,
        "byte level": base,
        "splits": [json.loads(ids) for ids in distinct],
        "pre": {name: distinct.index(json.dumps(ids)) for name, ids in found.items()},
        "sentencepiece": [
            {"fields": fields, **dict(zip(("ids", "ends"), recorded(fields, TEXTS), strict=True))}
            for fields in (
                pieces,
                pieces | {"add_space_prefix": False, "add_bos_token": False},
                pieces | {"add_eos_token": True},
                {name: value for name, value in pieces.items() if not name.endswith("_id")},
                {**sentencepiece(("<|endoftext|>",)), "general.name": "A Phi-3 by another"},
            )
        ],
        "ends": [
            {"tokens": tokens, "keys": keys, "ids": recorded(_of_ends(tokens, keys), [])[1]} for tokens, keys in ends
        ],
        "spelled": [
            {
                "tokens": tokens,
                "kind": kind,
                "keys": keys,
                **dict(
                    zip(
                        ("ids", "ends"),
                        recorded(_of_ends(tokens, keys, kind), [f"a{text}b" for text in tokens]),
                        strict=True,
                    )
                ),
            }
            for tokens, kind, keys in SPELLED
        ],
    }


def _of_ends(tokens: Sequence[str], keys: Mapping[str, int], kind: int = 3) -> dict[str, Any]:
    """A vocabulary of these tokens after byte tokens, so that llama.cpp's default ids do not point to them."""
    fields = sentencepiece()
    at = len(fields["tokens"])
    fields["tokens"] = ["<none>" if text == "</s>" else text for text in fields["tokens"]] + list(tokens)
    fields["token_type"] += [kind] * len(tokens)
    fields["scores"] += [0.0] * len(tokens)
    return fields | {f"{name}_token_id": at + i for name, i in keys.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write llama_cpp.json")
    folder: Path = parser.parse_args().folder
    (folder / "llama_cpp.json").write_text(
        json.dumps(record(), ensure_ascii=True, separators=(",", ":")) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
