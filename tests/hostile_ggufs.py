"""Spoiled GGUF files, and folders with SentencePiece's file, for ``tests.mutations``: what a dry run of
``gumiho-export`` makes of them."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter
from safetensors.numpy import save_file

from tests import gguf_files
from tests.hostile_checkpoints import _run
from tests.mutations import Apply, void
from tests.pairs import RandomPair
from tests.test_sentencepiece_bpe import fields, trained

_FORM = "as Llama 2"
_VALUES: tuple[Any, ...] = (
    0,
    1,
    2,
    7,
    2**32 - 1,
    True,
    False,
    0.0,
    1.5,
    -1.0,
    1e30,
    float("nan"),
    float("inf"),
    "",
    "x",
    "default",
    "two\nlines",
    "\0",
    ["a"],
    ["", ""],
    [0],
    [1.5, 2.5],
    [2**30, 1],
)


def prepare(folder: Path) -> None:
    """A file with a SentencePiece tokenizer, and a folder whose only tokenizer is SentencePiece's."""
    vocabulary = fields(_FORM)
    sizes = {
        "vocab_size": len(vocabulary["tokenizer.ggml.tokens"]),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = RandomPair(sizes).make_target()
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    folder.mkdir(exist_ok=True)
    gguf_files.write(model, folder / "m.gguf", fields=vocabulary | {"tokenizer.chat_template": template})
    model.save_pretrained(folder / "target")
    (folder / "target" / "tokenizer.model").write_bytes(trained(_FORM))
    (folder / "target" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False})
    )


def attempt(folder: Path) -> str:
    """A dry run with each. Returns which was refused."""
    refused = []
    for target in ("m.gguf", "target"):
        if _run(["--target", str(folder / target), "--out", str(folder.parent / "out"), "--dry-run"]):
            refused.append(target)
        assert [p.name for p in folder.parent.iterdir()] == [folder.name], "a dry run wrote something"
    return f"refused {' and '.join(refused)}" if refused else "fine"


def _written(file: Path, changes: Mapping[str, Any]) -> None:
    """The file anew with other metadata; a key is left out if its value is None."""
    reader = GGUFReader(file)
    found = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")} | dict(
        changes
    )
    writer = GGUFWriter(file.with_suffix(".new"), str(found.pop("general.architecture")))
    for name, value in found.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            (writer.add_uint32 if value >= 0 else writer.add_int32)(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".new").replace(file)


def _metadata(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    """Another value of a key, one element of a list changed or cut off, or a key that files of other models have."""
    if file.suffix != ".gguf":
        return None
    found = {name: field.contents() for name, field in GGUFReader(file).fields.items() if not name.startswith("GGUF.")}
    others = [
        "llama.logit_scale",
        "llama.rope.scaling.type",
        "llama.rope.scale_linear",
        "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.precompiled_charsmap",
        "split.count",
        "split.no",
        "general.alignment",
    ]
    name = rng.choice([*found, *others])
    value = old = found.get(name)
    if isinstance(old, list) and rng.random() < 0.7:
        at = rng.randrange(len(old))
        other = rng.choice(old)
        value = rng.choice([old[:at], [*old[:at], other, *old[at + 1 :]], [*old, other]]) or None
    else:
        value = rng.choice([None, *_VALUES])
    return f"{name} becomes {str(value)[:60]!r}", lambda path: _written(path, {name: value})


def _sentencepiece(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    """Another vocabulary of SentencePiece, or one that is none."""
    if file.name != "tokenizer.model":
        return None
    kind, content = rng.choice(
        [
            ("unigram", trained(_FORM, "unigram")),
            ("without bytes", trained("without bytes")),
            ("normalized", trained("trimmed and normalized")),
            ("tiktoken", b"IQ== 0\nIg== 1\n"),
            ("zeros", bytes(100)),
        ]
    )
    return f"becomes {kind}", lambda path: void(path.write_bytes(content))


def _missing(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    """A tensor less in the folder."""
    if file.suffix != ".safetensors":
        return None
    from safetensors.numpy import load_file

    state = load_file(file)
    name = rng.choice(sorted(state))
    return f"lacks {name}", lambda path: save_file(
        {n: t for n, t in state.items() if n != name}, path, {"format": "pt"}
    )


WAYS = [*[_metadata] * 12, *[_sentencepiece] * 4, _missing]
