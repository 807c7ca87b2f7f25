"""GGUF targets: transformers' reading of the same file, the checkpoint it was made from, and naive loops over ggml's
blocks."""

import json
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from exporter import cli
from exporter.checkpoints import gguf_file as gguf_file_module
from exporter.checkpoints import gguf_keys
from exporter.checkpoints.gguf_file import GgufCheckpoint, gguf_file
from exporter.checkpoints.gguf_metadata import metadata
from exporter.checkpoints.gguf_tokenizer import write_tokenizer
from exporter.checkpoints.llama import llama_config
from exporter.checkpoints.lone_target import LoneTarget
from exporter.training.target import model_of
from runtime import DamageError, GumihoError, InputError, UnavailableError
from runtime.decoding.text.chat_template import ChatTemplate
from tests import gguf_files
from tests.pairs import RandomPair

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 32},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 5e5,
        },
        "head_dim": 64,
    },
}


def opened(file: Path) -> GgufCheckpoint:
    return GgufCheckpoint(str(file), file)


@pytest.mark.parametrize("shape", SHAPES)
def test_names_numbers_and_configuration_are_the_checkpoint_s(shape: str, tmp_path: Path) -> None:
    model = RandomPair({**SIZES, **SHAPES[shape]}).make_target()
    checkpoint = opened(gguf_files.write(model, tmp_path / "m.gguf"))
    expected = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert checkpoint.names() == expected.keys()
    for name, value in expected.items():
        assert checkpoint.shape(name) == tuple(value.shape)
        assert torch.equal(checkpoint.read(name), value), name
    config = llama_config(checkpoint)
    for field in (
        "hidden_size",
        "head_dim",
        "num_key_value_heads",
        "vocab_size",
        "tie_word_embeddings",
        "max_position_embeddings",
    ):
        assert getattr(config, field) == getattr(model.config, field), field
    assert config.rope_parameters == pytest.approx(model.config.rope_parameters)
    assert config.rms_norm_eps == pytest.approx(model.config.rms_norm_eps, rel=1e-6)


def test_metadata_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    fields = tokenizer_fields() | {
        "some.flags": [True, False],
        "some.numbers": [-1.5, 2.0],
        "some.text": "é",
        "some.number": 3,
    }
    file = gguf_files.write(RandomPair(SIZES).make_target(), tmp_path / "m.gguf", "Q8_0", fields=fields)
    (found, tensors), reader = metadata(file), GGUFReader(file)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert (found, {n: type(v) for n, v in found.items()}) == (expected, {n: type(v) for n, v in expected.items()})
    assert {"some.flags", "some.text", "tokenizer.ggml.tokens"} <= found.keys()
    assert [(t.name, t.kind, t.shape, t.offset, t.size) for t in tensors] == [
        (t.name, t.tensor_type, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes) for t in reader.tensors
    ]


@pytest.mark.parametrize("shape", ["tied", "llama3"])
@torch.inference_mode()
def test_a_drafter_is_trained_for_the_same_model(shape: str, tmp_path: Path) -> None:
    model, ids = RandomPair({**SIZES, **SHAPES[shape]}).make_target(), torch.arange(30)[None]
    found = model_of(LoneTarget(opened(gguf_files.write(model, tmp_path / "m.gguf"))))
    # the file rounds frequencies' factors
    torch.testing.assert_close(found(ids).logits, model(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_rows_stay_where_they_were(kind: str, tmp_path: Path) -> None:
    """Rows are quantized one by one, so the checkpoint's, quantized and back, are expected, wherever the file keeps
    them."""
    model = RandomPair(SIZES).make_target()
    checkpoint = opened(gguf_files.write(model, tmp_path / "m.gguf", kind))
    for name, value in model.state_dict().items():
        own = GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        expected = dequantize(quantize(value.numpy(), own), own)
        assert torch.equal(
            checkpoint.read(name.removeprefix("model.")).float(), torch.from_numpy(expected).reshape(value.shape)
        ), name


@pytest.fixture(scope="module")
def q8(tmp_path_factory: pytest.TempPathFactory) -> GgufCheckpoint:
    return opened(gguf_files.write(RandomPair(SIZES).make_target(), tmp_path_factory.mktemp("q8") / "m.gguf", "Q8_0"))


@given(
    st.sampled_from(["embed_tokens.weight", "layers.1.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"]),
    st.data(),
)
def test_any_slice_is_the_whole_s(q8: GgufCheckpoint, name: str, data: st.DataObject) -> None:
    rows = q8.shape(name)[0]
    start, stop = data.draw(st.integers(0, rows)), data.draw(st.integers(0, rows + 5))
    assert torch.equal(q8.read(name, start, stop), q8.read(name)[start:stop])


def half(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def naive_q4_k(block: bytes) -> list[float]:
    """ggml's ``dequantize_row_q4_K`` of one block of 144 bytes."""
    d, low, scales, codes = half(block[:2]), half(block[2:4]), block[4:16], block[16:]
    out = []
    for j in range(8):
        if j < 4:
            scale, least = scales[j] & 63, scales[j + 4] & 63
        else:
            scale = (scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4)
            least = (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4)
        part = codes[32 * (j // 2) : 32 * (j // 2) + 32]
        out += [d * scale * (byte >> 4 if j % 2 else byte & 15) - low * least for byte in part]
    return out


def naive_q6_k(block: bytes) -> list[float]:
    """ggml's ``dequantize_row_q6_K`` of one block of 210 bytes."""
    low, high, scales, d = block[:128], block[128:192], struct.unpack("16b", block[192:208]), half(block[208:])
    out = [0.0] * 256
    for part in range(2):
        ql, qh, sc = low[64 * part :], high[32 * part :], scales[8 * part :]
        for i in range(32):
            for quarter, (byte, shift) in enumerate(
                ((ql[i] & 15, 0), (ql[i + 32] & 15, 2), (ql[i] >> 4, 4), (ql[i + 32] >> 4, 6))
            ):
                code = (byte | ((qh[i] >> shift & 3) << 4)) - 32
                out[128 * part + 32 * quarter + i] = d * sc[i // 16 + 2 * quarter] * code
    return out


@pytest.mark.parametrize(
    ("kind", "size", "scales", "naive"),
    [
        ("Q4_K", 144, (0, 2), naive_q4_k),
        ("Q6_K", 210, (208,), naive_q6_k),
    ],
)
def test_k_quants_equal_a_naive_loop(kind: str, size: int, scales: tuple[int, ...], naive: Any, tmp_path: Path) -> None:
    draw, rows = np.random.default_rng(0), 300
    blocks = draw.integers(0, 256, (rows, 1, size), np.uint8)
    for at in scales:
        blocks[..., at : at + 2] = draw.normal(size=(rows, 1, 1)).astype(np.float16).view(np.uint8)
    model = RandomPair({**SIZES, "hidden_size": 256}).make_target()
    file = gguf_files.write(model, tmp_path / "m.gguf", raw={"lm_head.weight": (blocks.reshape(rows, -1), kind)})
    expected = [naive(block.tobytes()) for block in blocks[:, 0]]
    assert opened(file).read("lm_head.weight").numpy() == pytest.approx(np.array(expected), rel=1e-5, abs=1e-6)


# --- tokenizers -------------------------------------------------------------------------------------------------------

TEXT = [
    "The quick brown fox's 12345 jumps, over 678 lazy dogs!\n\n  def f(x):\n\treturn x\n",
    "naïve café — déjà vu 2024 \U0001f98a\U0001f98a  ok",
] * 4
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
PRE = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    ),
}


def trained(pre: str) -> Tokenizer:
    """A byte-level tokenizer whose pre-tokenizer is transformers' own for a family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE[pre], decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    return tokenizer


def tokenizer_fields(pre: str = "smollm", template: str = "{{ messages[0].content }}") -> dict[str, Any]:
    content = json.loads(trained(pre).to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }


@pytest.fixture(scope="module", params=PRE)
def tokenizers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    file = tmp_path_factory.mktemp("pre") / "m.gguf"
    gguf_files.write(RandomPair(SIZES).make_target(), file, fields=tokenizer_fields(request.param))
    checkpoint = opened(file)  # its folder is gone when it is
    return trained(request.param), Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))


@given(
    text=st.text(st.sampled_from("ab Tx'sS12.9\n\té—é\U0001f98a,!_"), max_size=40)
    | st.text(max_size=20)
    | st.sampled_from(TEXT)
)
def test_ids_equal_those_of_the_family_s_own_tokenizer(tokenizers: tuple[Tokenizer, Tokenizer], text: str) -> None:
    original, ours = tokenizers
    assert ours.encode(text).ids == original.encode(text).ids


def test_special_tokens_template_and_ends_come_from_the_metadata(tmp_path: Path) -> None:
    fields = tokenizer_fields() | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 0}
    folder = opened_folder = opened(
        gguf_files.write(RandomPair(SIZES).make_target(), tmp_path / "m.gguf", fields=fields)
    )
    tokenizer = Tokenizer.from_file(str(folder.folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_end|>a").ids[:2] == [1, 2]
    assert tokenizer.decode([1, *tokenizer.encode("a b").ids]) == "a b"
    config = json.loads((opened_folder.folder / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert json.loads((folder.folder / "generation_config.json").read_text()) == {"eos_token_id": [2, 0]}


# --- exports ----------------------------------------------------------------------------------------------------------


def test_chat_templates_are_those_that_transformers_chooses(tmp_path: Path) -> None:
    """A default, and one with a name for conversations with tools."""
    fields = tokenizer_fields(template="plain {{ messages[0].content }}") | {
        "tokenizer.chat_template.tool_use": "tools {{ tools | length }}",
        "tokenizer.chat_template.2-a.b": "other",
    }
    folder = opened_checkpoint = opened(
        gguf_files.write(RandomPair(SIZES).make_target(), tmp_path / "m.gguf", fields=fields)
    )
    tokenizer, ours = AutoTokenizer.from_pretrained(folder.folder), ChatTemplate.of(opened_checkpoint.folder)
    messages = [{"role": "user", "content": "hi"}]
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    assert ours is not None
    for offered in (None, tools):
        expected = tokenizer.apply_chat_template(messages, tools=offered, tokenize=False)
        assert ours.render(messages, tools=offered) == expected
        assert expected == ("tools 1" if offered else "plain hi")
    assert tokenizer.chat_template["2-a.b"] == "other"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            ".../odd",
            "odd",
            "the chat template 'tokenizer.chat_template.../odd' has a name with other characters than letters, digits, "
            "'_', '-' and '.'",
        ),
        ("", 3, "tokenizer.chat_template is 3, expected a text: convert the model again"),
    ],
)
def test_chat_templates_that_are_none_are_refused(name: str, value: Any, message: str, tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    with pytest.raises(InputError) as raised:
        write_tokenizer(tokenizer_fields() | {f"tokenizer.chat_template{name}": value}, inner)
    assert str(raised.value).startswith(message)
    assert not list(tmp_path.rglob("odd*"))


def test_an_export_of_a_gguf_equals_that_of_the_folder_it_was_made_from(tmp_path: Path) -> None:
    pair = RandomPair({**SIZES, "num_hidden_layers": 1}, heads=1, layers=1)
    _, drafter = pair.write(tmp_path)
    (tmp_path / "gguf").mkdir()
    gguf_files.write(pair.make_target(), tmp_path / "gguf/m.gguf", fields=tokenizer_fields())
    hashes = []
    for target in ("target", "gguf"):
        out = tmp_path / f"out-{target}"
        assert (
            cli.main(
                [
                    "--ckpt",
                    str(drafter),
                    "--target",
                    str(tmp_path / target),
                    "--out",
                    str(out),
                    "--draft-weights",
                    "none",
                ]
            )
            == 0
        )
        manifest = json.loads((out / "gumiho.json").read_text())
        hashes.append(
            {
                name: file["sha256"]
                for name, file in manifest["files"].items()
                if name.startswith(("weights/", "graphs/"))
            }
        )
    assert hashes[0] == hashes[1]
    assert (tmp_path / "out-gguf/tokenizer.json").exists()


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),  # llama.cpp's default is linear
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, 2.0),
        ({"rope.scale_linear": 4.0, "rope.scaling.type": "none"}, None),
        ({"attention.causal": True, "logit_scale": 1.0, "attention.head_count_kv": [2, 2]}, None),
        ({}, None),
    ],
)
def test_rotary_scaling_is_what_llama_cpp_reads(tmp_path: Path, fields: dict[str, Any], factor: float | None) -> None:
    """``llama_model_base::load_hparams``: the factor, or its old key, divides positions unless the type is none."""
    file = gguf_files.write(
        RandomPair(SIZES).make_target(),
        tmp_path / "m.gguf",
        fields={f"llama.{name}": value for name, value in fields.items()},
    )
    rotary = llama_config(opened(file)).rope_parameters
    assert (rotary["rope_type"], rotary.get("factor")) == (("default", None) if factor is None else ("linear", factor))


@pytest.mark.parametrize(
    "key",
    [
        v
        for k in vars(gguf.Keys).values()
        if isinstance(k, type)
        for v in vars(k).values()
        if isinstance(v, str) and "{" + "arch}" in v
    ],
)
def test_every_key_of_the_format_is_read_or_known_or_refused(key: str) -> None:
    """The list is gguf's own. What is neither read nor known to change nothing must not get past, zero and false
    included."""
    name = key.removeprefix("{arch}.")
    if name in gguf_keys.READ | gguf_keys.UNUSED:
        return
    neutral = repr(gguf_keys.NEUTRAL.get(name))
    for value in (2, 0, 0.0, 1.0, False, True, "", []):
        if repr(value) == neutral:
            gguf_keys.require_known({f"llama.{name}": value}, "llama", "m.gguf")
        else:
            with pytest.raises(InputError, match=re.escape(f"has llama.{name} {value!r}, which is not supported")):
                gguf_keys.require_known({f"llama.{name}": value}, "llama", "m.gguf")


def test_a_key_whose_value_is_false_is_named_with_its_way_out() -> None:
    for key, value in {
        "llama.attention.causal": False,
        "tokenizer.ggml.new_thing": False,
        "llama.rope.scaling.attn_factor": 0.0,
        "llama.rope.scaling.yarn_ext_factor": 1.0,
    }.items():
        with pytest.raises(InputError) as raised:
            gguf_keys.require_known({key: value}, "llama", "m.gguf")
        assert str(raised.value) == (
            f"'m.gguf' has {key} {value}, which is not supported: name another file, or take the key out of this one "
            f"if you know that the model does not need it (gguf-new-metadata --remove-metadata {key})"
        )


def split(file: Path, folder: Path, parts: int) -> list[Path]:
    """As llama.cpp's ``gguf-split`` lays them out: all metadata in the first part, each tensor in one."""
    reader, files = GGUFReader(file), []
    for part in range(parts):
        files.append(folder / f"m-{part + 1:05}-of-{parts:05}.gguf")
        writer = GGUFWriter(files[-1], "llama")
        if part == 0:
            for name, field in reader.fields.items():
                if not name.startswith(("GGUF.", "general.architecture")):
                    kind = field.types[0], field.types[-1] if len(field.types) > 1 else None
                    writer.add_key_value(name, field.contents(), *kind)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[part::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


def test_a_model_in_several_files(tmp_path: Path) -> None:
    file = gguf_files.write(RandomPair(SIZES).make_target(), tmp_path / "whole.gguf", "Q8_0", fields=tokenizer_fields())
    (tmp_path / "parts").mkdir()
    parts = split(file, tmp_path / "parts", 3)
    whole = opened(file)
    for source in (tmp_path / "parts", *parts):
        found = gguf_file(str(source))
        assert found is not None
        model = opened(found)
        assert model.names() == whole.names()
        assert model.config == whole.config
        assert all(torch.equal(model.read(name), whole.read(name)) for name in whole.names())
    assert len(model.identity()) == 3
    elsewhere = parts[1].rename(tmp_path / "parts" / "elsewhere.gguf")
    with pytest.raises(
        InputError,
        match="holds 2 models in GGUF files: name one, such as '.*', or give the part 'm-00002-of-00003.gguf' of",
    ):
        gguf_file(str(tmp_path / "parts"))
    with pytest.raises(
        InputError, match="lacks the part 'm-00002-of-00003.gguf' of a model in 3 files: put all of them"
    ):
        opened(parts[0])
    with pytest.raises(InputError, match=r"elsewhere.gguf' says that it is part 1 .from 0. of 3, and has another name"):
        opened(elsewhere)


def test_a_package_that_is_missing_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf_files.write(RandomPair(SIZES).make_target(), tmp_path / "m.gguf", fields=tokenizer_fields())

    def missing(*_: Any) -> None:
        raise ImportError("cannot import name 'moved' from 'somewhere'")

    monkeypatch.setattr(gguf_file_module, "write_tokenizer", missing)
    with pytest.raises(UnavailableError, match="needs a package .cannot import name 'moved'"):
        opened(file)


def changed(**fields: Any) -> dict[str, Any]:
    return {"fields": {name.replace("__", "."): value for name, value in fields.items()}}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            {"architecture": "falcon"},
            "has architecture 'falcon', but Gumiho supports only 'llama', 'qwen2', 'qwen3': name another",
        ),
        (changed(llama__expert_count=8), "is a mixture of experts, which is not supported: name another target"),
        (
            changed(llama__rope__scaling__type="yarn"),
            "rotary scaling 'yarn', expected none, linear or llama3: name another target",
        ),
        (changed(llama__logit_scale=0.5), "has llama.logit_scale 0.5, which is not supported"),
        (changed(llama__attention__causal=True, llama__attention__clamp_kqv=8), "has llama.attention.clamp_kqv 8"),
        (changed(tokenizer__ggml__suppress_tokens=[3]), r"has tokenizer.ggml.suppress_tokens \[3\]"),
        (
            changed(llama__attention__head_count_kv=[2, 1]),
            r"has llama.attention.head_count_kv \[2, 1\], not the same for every layer, which is not supported: name "
            r"another target",
        ),
        (
            changed(llama__rope__dimension_count=4),
            "has llama.rope.dimension_count 4, not the size of a head, 16, which is not supported: name another",
        ),
        (
            changed(tokenizer__ggml__tokens=3),
            "m.gguf': tokenizer.ggml.tokens is 3, expected a list of texts: convert the model",
        ),
        (
            changed(general__alignment=0),
            "m.gguf' has general.alignment 0, expected a power of two: convert the model again",
        ),
        (
            {"fields": tokenizer_fields() | {"tokenizer.ggml.model": "rwkv"}},
            "m.gguf': tokenizer.ggml.model is 'rwkv', expected 'gpt2' ",
        ),
        (
            {"raw": {"lm_head.weight": (np.zeros((300, 2 * 17), np.uint8), "MXFP4")}},
            "of type MXFP4, which is not supported",
        ),
    ],
)
def test_unsupported_files_are_refused_by_name(tmp_path: Path, written: dict[str, Any], message: str) -> None:
    file = gguf_files.write(RandomPair(SIZES).make_target(), tmp_path / "m.gguf", **written)
    with pytest.raises(InputError, match=message):
        opened(file)


@pytest.mark.parametrize(
    ("at", "content", "message"),
    [
        (4, struct.pack("<I", 1), "' has version 1 of GGUF, expected 2 or 3: convert the model again"),
        (4, struct.pack("<I", 4), "' has version 4 of GGUF, expected 2 or 3: convert the model again"),
        (4, struct.pack(">I", 3), "' has its bytes in big-endian order: convert it (gguf-convert-endian '"),
        (
            b"token_embd.weight",
            struct.pack("<I", 50),
            "' holds 'token_embd.weight' in the type 50 of tensors, which is not supported: convert the model "
            "again, to Q8_0 for example",
        ),
        (
            b"token_embd.weight",
            struct.pack("<I", 4),
            "' holds 'token_embd.weight' in the type 4 of tensors, which is not supported: convert",
        ),
    ],
)
def test_what_is_unknown_is_not_called_damaged(at: int | bytes, content: bytes, message: str, tmp_path: Path) -> None:
    start = at if isinstance(at, int) else SMALL.index(at) + len(at) + 4 + 2 * 8  # behind the name: the shape
    file = tmp_path / "m.gguf"
    file.write_bytes(SMALL[:start] + content + SMALL[start + 4 :])
    with pytest.raises(InputError) as raised:
        opened(file)
    assert str(raised.value).startswith(f"'{file}{message}")


def test_rotary_factors_of_another_type_are_refused(tmp_path: Path) -> None:
    file = gguf_files.write(RandomPair({**SIZES, **SHAPES["llama3"]}).make_target(), tmp_path / "m.gguf")
    content = bytearray(file.read_bytes())
    content[content.index(b"rope_freqs.weight") + 17 + 4 + 8] = GGMLQuantizationType.F16
    file.write_bytes(content)
    with pytest.raises(InputError) as raised:
        opened(file)
    assert (
        str(raised.value)
        == f"'{file}' has 'rope_freqs.weight' in F16 and shape [32], expected one row in F32: convert the model again"
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (
            "block_count",
            0,
            "0 as 'llama.block_count', expected a whole number from 1 to 65536: correct it, or name another checkpoint",
        ),
        (
            "attention.head_count",
            0,
            "0 as 'llama.attention.head_count', expected a whole number from 1 to 65536: correct it, or name another "
            "checkpoint",
        ),
        (
            "context_length",
            0,
            "0 as 'llama.context_length', expected a whole number from 1 to 2147483648: correct it, or name another "
            "checkpoint",
        ),
        (
            "attention.layer_norm_rms_epsilon",
            -1.0,
            "-1.0 as 'llama.attention.layer_norm_rms_epsilon', expected a number from 1e-12 to 0.1: correct it, or "
            "name another checkpoint",
        ),
        (
            "rope.freq_base",
            "x",
            "'x' as 'llama.rope.freq_base', expected a number from 1 to 1e+15: correct it, or name another checkpoint",
        ),
        (
            "rope.scaling.factor",
            ["", ""],
            "'' as 'llama.rope.scaling.factor', expected a number from 1 to 1e+09: correct it, or name another "
            "checkpoint",
        ),
        (
            "rope.scaling.factor",
            -1.0,
            "-1.0 as 'llama.rope.scaling.factor', expected a number from 1 to 1e+09: correct it, or name another "
            "checkpoint",
        ),
    ],
)
def test_values_out_of_range_are_named_as_in_the_file(key: str, value: Any, expected: str, tmp_path: Path) -> None:
    file = gguf_files.write(RandomPair(SIZES).make_target(), tmp_path / "m.gguf", fields={f"llama.{key}": value})
    with pytest.raises(InputError) as raised:
        llama_config(opened(file))
    assert str(raised.value) == f"target '{file}': it has {expected}"


AGAIN = "convert the model again, or name its folder in the Hugging Face layout"
NO_ID = "without which it is not supported: say which token it is (gguf-new-metadata --special-token-by-id"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("padding_token_id", "x", "tokenizer.ggml.padding_token_id is 'x', expected the id of a token"),
        ("fim_pre_token_id", True, "tokenizer.ggml.fim_pre_token_id is True, expected the id of a token"),
        ("eos_token_id", None, f"the tokenizer has no tokenizer.ggml.eos_token_id, {NO_ID} eos ID)"),
        ("add_bos_token", "no", f"tokenizer.ggml.add_bos_token is 'no', expected true or false: {AGAIN}"),
        ("add_eos_token", 0, f"tokenizer.ggml.add_eos_token is 0, expected true or false: {AGAIN}"),
        ("tokens", [1, 2], f"tokenizer.ggml.tokens is [1, 2], expected a list of texts: {AGAIN}"),
        ("token_type", [0] * 300, f"tokenizer.ggml.token_type holds 0, expected numbers from 1 to 6: {AGAIN}"),
        ("token_type", "x", f"tokenizer.ggml.token_type is 'x', expected a list of whole numbers: {AGAIN}"),
        (
            "model",
            ["gpt2"],
            "tokenizer.ggml.model is ['gpt2'], expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece): name "
            "another target",
        ),
        ("merges", None, f"the tokenizer has no tokenizer.ggml.merges, without which it is not supported: {AGAIN}"),
        (
            "merges",
            ["ab"],
            f"tokenizer.ggml.merges holds 'ab', which is no pair of tokens that are a token together: {AGAIN}",
        ),
        (
            "merges",
            ["a zz"],
            f"tokenizer.ggml.merges holds 'a zz', which is no pair of tokens that are a token together: {AGAIN}",
        ),
        (
            "pre",
            "qwen",
            "tokenizer.ggml.pre is 'qwen', a way of splitting a text that is not supported (closest: qwen2): name the "
            "model's folder in the Hugging Face layout, or, if you know that the model splits as another name says, "
            "give that (gguf-new-metadata --pre-tokenizer NAME)",
        ),
        ("pre", 3, "tokenizer.ggml.pre is 3, a way of splitting a text that is not supported: name the model's folder"),
    ],
)
def test_values_of_a_tokenizer_are_refused_by_name(tmp_path: Path, name: str, value: Any, message: str) -> None:
    fields = tokenizer_fields() | {f"tokenizer.ggml.{name}": value}
    with pytest.raises(InputError) as raised:
        write_tokenizer({key: own for key, own in fields.items() if own is not None}, tmp_path)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("value", [300, -1, 1 << 32])
def test_an_id_of_no_token_counts_for_nothing(tmp_path: Path, value: int) -> None:
    """As in llama.cpp ("bad special token"), whose converters have written such ids."""
    notes = write_tokenizer(tokenizer_fields() | {"tokenizer.ggml.eot_token_id": value}, tmp_path)
    # 0 by its spelling
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [2, 0]}
    assert [note.partition(", so that")[0] for note in notes] == [
        f"tokenizer.ggml.eot_token_id is {value}, the id of none of its 300 tokens"
    ]


def test_a_beginning_that_is_put_before_every_text_is_needed(tmp_path: Path) -> None:
    """llama.cpp puts token 11."""
    fields = tokenizer_fields() | {"tokenizer.ggml.add_bos_token": True}
    del fields["tokenizer.ggml.bos_token_id"]
    with pytest.raises(InputError, match="^the tokenizer has no tokenizer.ggml.bos_token_id, without which"):
        write_tokenizer(fields, tmp_path)


@given(st.data())
def test_damaged_files_are_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = SMALL
    # The headers come first; most of the file is numbers.
    at = data.draw(st.integers(0, 2500) | st.integers(0, len(content) - 1))
    cut = data.draw(st.booleans())
    file = tmp_path_factory.mktemp("damaged") / "m.gguf"
    file.write_bytes(
        content[:at]
        if cut
        else content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    )
    with suppress(GumihoError):  # a flipped bit of a number is not noticed
        checkpoint = opened(file)
        for name in checkpoint.names():
            checkpoint.read(name)


def _small() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "vocab_size": 8,
            "num_hidden_layers": 1,
        }
        return gguf_files.write(RandomPair(sizes).make_target(), Path(folder) / "m.gguf", "Q8_0").read_bytes()


SMALL = _small()


def test_folders(tmp_path: Path) -> None:
    assert gguf_file(str(tmp_path)) is None
    (tmp_path / "a.gguf").write_bytes(b"")
    assert gguf_file(str(tmp_path)) == gguf_file(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    with pytest.raises(DamageError, match=r"a.gguf is truncated or damaged \(it is empty\): download it again"):
        opened(tmp_path / "a.gguf")
    (tmp_path / "blob").write_bytes(SMALL)
    assert gguf_file(str(tmp_path / "blob")) == tmp_path / "blob"  # by its content
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="holds 2 models in GGUF files: name one"):
        gguf_file(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert gguf_file(str(tmp_path)) is None


def test_a_file_of_a_cached_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real hub cache on disk, and no network."""
    repo, commit = tmp_path / "hub" / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    file = repo / "snapshots" / commit / "sub" / "m.Q4_0.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(SMALL)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert gguf_file("owner/name/sub/m.Q4_0.gguf") == file
    with pytest.raises(
        UnavailableError,
        match=r"^'owner/name/other.gguf' is not in the local hub cache and the hub cannot be reached: name a local "
        r"file$",
    ):
        gguf_file("owner/name/other.gguf")
    with pytest.raises(InputError, match=r"^'own er/na--me/m.gguf' is neither a file nor a hub id with a file"):
        gguf_file("own er/na--me/m.gguf")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for missing in ("./owner/name/m.gguf", "owner/name/m.gguf", "name/m.gguf", "m.gguf", "/m.gguf"):
        with pytest.raises(InputError, match=f"^there is no file '{missing}': check --ckpt and --target$"):
            gguf_file(missing)


def test_a_file_that_a_hub_model_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(repo: str, file: str) -> str:
        assert (repo, file) == ("owner/name", "sub/m.gguf")
        raise EntryNotFoundError("404")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)
    with pytest.raises(InputError, match="^the hub's model has no file 'sub/m.gguf'"):
        gguf_file("owner/name/sub/m.gguf")
