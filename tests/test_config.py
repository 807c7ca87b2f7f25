"""What a checkpoint's JSON may hold is read; anything else is one sentence that names the place."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from exporter.checkpoints.json_config import document, end_ids, llama_fields
from runtime.errors import GumihoError

GOOD: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WHOLE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def test_a_good_one_comes_out_as_it_is() -> None:
    fields = llama_fields(GOOD | {"unknown": [1], "num_labels": 10**9}, "it")
    assert fields.pop("rope_parameters") == {"rope_type": "default", "rope_theta": 1e4}
    assert fields == {k: v for k, v in GOOD.items() if k != "rope_theta"} | {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    assert llama_fields(GOOD | {"rope_scaling": LLAMA3}, "it")["rope_parameters"] == LLAMA3 | {"rope_theta": 1e4}


@pytest.mark.parametrize("key", WHOLE)
@pytest.mark.parametrize("value", [-1, 0, 2**63, 10**40, 16.0, 0.5, True, "16", [16], {}, float("nan")], ids=str)
def test_whole_numbers(key: str, value: Any) -> None:
    with pytest.raises(
        GumihoError,
        match=rf"^it: config.json has .* as '{key}', expected a whole number from \d+ to \d+: correct it, or name "
        rf"another checkpoint$",
    ):
        llama_fields(GOOD | {key: value}, "it")


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", [None, 0, 1, "false", []], ids=repr)
def test_flags(key: str, value: Any) -> None:
    with pytest.raises(GumihoError, match=f"as '{key}', expected true or false"):
        llama_fields(GOOD | {key: value}, "it")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-5, 0, 0.0, 1e-300, 2.0, True, "1e-5", None], ids=repr)
def test_epsilon(value: Any) -> None:
    with pytest.raises(GumihoError, match="as 'rms_norm_eps', expected a number from 1e-12 to 0.1"):
        llama_fields(GOOD | {"rms_norm_eps": value}, "it")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0, 0.5, 1e300, True, "10000", None, 10**40], ids=repr)
@pytest.mark.parametrize(
    "key", ["rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
)
def test_rotary_numbers(key: str, value: Any) -> None:
    if key == "low_freq_factor" and value == 0.5:
        pytest.skip("a good one")
    with pytest.raises(GumihoError, match=f"'{key}'"):
        llama_fields(GOOD | {"rope_parameters": {"rope_theta": 1e4, **LLAMA3} | {key: value}}, "it")


@pytest.mark.parametrize("rotary", ["x", 7, [1], True], ids=repr)
def test_rotary_objects(rotary: Any) -> None:
    with pytest.raises(GumihoError, match="as 'rope_scaling', expected an object"):
        llama_fields(GOOD | {"rope_scaling": rotary}, "it")


def test_heads_that_are_rotated_in_part_only() -> None:
    with pytest.raises(
        GumihoError,
        match="'partial_rotary_factor', expected 1, as only whole heads can be rotated: correct it, or name another",
    ):
        llama_fields(GOOD | {"partial_rotary_factor": 0.5}, "it")


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(GumihoError) as caught:
        llama_fields(GOOD | {"hidden_size": "x" * 5000}, "it")
    assert len(str(caught.value)) < 220


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e400}',
        "[]",
        "",
        '{"a": ' + "9" * 5000 + "}",
        "{",
        "null",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path / "config.json")


def refused(file: Path) -> None:
    with pytest.raises(GumihoError) as caught:
        document(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "latin").write_bytes(b'{"a": "\xff"}')
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    for name in ("pipe", "folder", "zero", "loop", "latin", "large"):
        refused(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        document(tmp_path / "nothing")


@pytest.mark.parametrize("found", [10**9, -5, 61, True, "1", [1, 61], [[1]], 1.0, {}], ids=repr)
def test_ends_that_are_no_tokens(found: Any) -> None:
    with pytest.raises(GumihoError, match="^file: eos_token_id is .*, from 0 to 60: correct it$"):
        end_ids(found, 61, Path("file"))


def test_ends() -> None:
    file = Path("file")
    assert [end_ids(found, 61, file) for found in (None, [], 60, [0, 7, 0])] == [(), (), (60,), (0, 7)]


def test_every_spelling_of_a_number_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD | {"rope_theta": 500000}))
    assert llama_fields(document(tmp_path / "config.json"), "it")["rope_parameters"]["rope_theta"] == 500000
