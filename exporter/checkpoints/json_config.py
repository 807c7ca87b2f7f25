"""Reads the JSON files of a checkpoint and checks the types and ranges of their values, so that no other code has
to."""

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import DamageError, InputError, reason, unreadable

from .architectures import ARCHITECTURES, Architecture

_LARGEST_FILE = 64 << 20  # bytes; the index of the largest released checkpoints has 200 KB

# Integers of config.json with their smallest and largest plausible values. Products of any two fit into 64 bits.
_REQUIRED = {
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 24),
    "num_hidden_layers": (1, 1 << 16),
    "num_attention_heads": (1, 1 << 16),
    "vocab_size": (1, 1 << 24),
}
_OPTIONAL = {"num_key_value_heads": (1, 1 << 16), "head_dim": (2, 1 << 16), "max_position_embeddings": (1, 1 << 31)}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_CORRECT = "correct it, or name another checkpoint"
_WINDOW = 4, 1 << 31  # 4 is the least capacity
_EPS = 1e-12, 0.1
_THETA = 1.0, 1e15
_FACTOR = 1.0, 1e9  # of positions; transformers requires at least 1
_ROTARY: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "default": {},
    "linear": {"factor": _FACTOR},
    "llama3": {
        "factor": _FACTOR,
        "low_freq_factor": (1e-3, 1e9),
        "high_freq_factor": (1e-3, 1e9),
        "original_max_position_embeddings": (1, 1 << 31),
    },
}


def shown(value: object) -> str:
    """A value for an error message: its representation, at most about 60 characters of it."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."


def document(path: Path) -> dict[str, Any]:
    """The JSON object in a regular file. All its numbers are finite.

    Raises FileNotFoundError, UnavailableError without permission to read it, and DamageError for anything else: a pipe
    or a folder, another encoding, nesting too deep to parse, NaN and Infinity, which Python's parser would accept.
    """
    try:
        status = path.stat()  # before opening, because opening a pipe waits for its writer
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > _LARGEST_FILE:
            raise ValueError(f"it has {status.st_size} bytes, more than {_LARGEST_FILE}")
        content = json.loads(path.read_text("utf-8"), parse_constant=_refused, parse_float=_finite)
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise unreadable(path, error) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamageError(f"{path} cannot be read as JSON ({reason(error)}): download it again") from None
    if not isinstance(content, dict):
        raise DamageError(f"{path} does not hold a JSON object: download it again")
    return content


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:60]} is too large a number")
    return value


def is_whole(value: object, least: float, most: float) -> bool:
    """Whether a JSON value is an integer from ``least`` to ``most``; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


class _Reader:
    """Reads the fields of a config.json. raw: its content, with the architecture's defaults; where: the checkpoint, for
    errors; called: as ``llama_fields``."""

    def __init__(self, raw: Mapping[str, Any], where: str, called: Mapping[str, str]) -> None:
        self.raw, self.where, self.called = raw, where, called

    def refuse(self, key: str, value: object, expected: str) -> InputError:
        file, name = ("it", self.called.get(key, key)) if self.called else ("config.json", key)
        return InputError(f"{self.where}: {file} has {shown(value)} as '{name}', expected {expected}: {_CORRECT}")

    def whole(self, key: str, least: int, most: int) -> int:
        value = self.raw.get(key)
        if not is_whole(value, least, most):
            raise self.refuse(key, value, f"a whole number from {least} to {most}")
        return int(value)  # type: ignore[arg-type]

    def flag(self, key: str) -> bool:
        value = self.raw.get(key, False)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def window(self, kind: str, layers: int) -> int | None:
        """The window of some of the layers, as transformers decides about it, or None. kind:
        ``Architecture.window``."""
        if kind == "never" or self.raw.get("sliding_window") is None:
            return None
        return self.whole("sliding_window", *_WINDOW) if kind == "always" or self._slides(layers) else None

    def _slides(self, layers: int) -> bool:
        """Whether some layers of a Qwen have a window."""
        if not self.flag("use_sliding_window"):
            return False
        types = self.raw.get("layer_types")
        if types is None:
            return self.whole("max_window_layers", 0, 1 << 16) < layers
        if not isinstance(types, list) or any(name not in _LAYER_TYPES for name in types):
            raise self.refuse("layer_types", types, f"a list of {' and '.join(map(repr, _LAYER_TYPES))}")
        return "sliding_attention" in types


def llama_fields(
    raw: Mapping[str, Any],
    where: str,
    architecture: Architecture = ARCHITECTURES["llama"],
    called: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The fields of a config.json that describe the model, checked for type and range, for ``LlamaConfig``.

    raw: config.json. where: the checkpoint, for errors. called: the names that its fields have in the file they were
    read from, if that is no config.json. The result always has the newer field of the rotary embedding,
    ``rope_parameters``. Raises InputError with the name of the field.
    """
    raw = {**architecture.defaults, **raw}
    read = _Reader(raw, where, called or {})
    refuse = read.refuse
    fields: dict[str, Any] = {"hidden_act": raw.get("hidden_act", "silu")}
    if fields["hidden_act"] != "silu":
        raise InputError(
            f"{where} has hidden_act {shown(fields['hidden_act'])}, expected 'silu': name another checkpoint"
        )
    for key, (least, most) in (_REQUIRED | _OPTIONAL).items():
        if key in _REQUIRED or raw.get(key) is not None:
            fields[key] = read.whole(key, least, most)
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        fields[key] = key in ("tie_word_embeddings", *architecture.biases) and read.flag(key)
    if window := read.window(architecture.window, fields["num_hidden_layers"]):
        fields["sliding_window"] = window
    eps = raw.get("rms_norm_eps", 1e-6)
    if not _is_number(eps, *_EPS):
        raise refuse("rms_norm_eps", eps, f"a number from {_EPS[0]:g} to {_EPS[1]:g}")
    fields["rms_norm_eps"] = float(eps)

    heads = fields["num_attention_heads"]
    kv_heads = fields.setdefault("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(
            f"{where}: {heads} attention heads cannot share {kv_heads} key-value heads, expected a divisor: {_CORRECT}"
        )
    if fields["hidden_size"] % heads:
        raise InputError(
            f"{where}: hidden_size is {fields['hidden_size']}, expected a multiple of the {heads} attention heads: "
            f"{_CORRECT}"
        )
    head_dim = fields.setdefault("head_dim", fields["hidden_size"] // heads)
    if head_dim % 2:
        raise refuse("head_dim", head_dim, "an even number, for the rotary embedding")

    fields["rope_parameters"] = _rope_parameters(read, raw, where, fields.get("max_position_embeddings", 2048))
    return fields


def _rope_parameters(read: _Reader, raw: Mapping[str, Any], where: str, positions: int) -> dict[str, Any]:
    """positions: trained ones, if the rotary embedding's own fields do not say so, as in transformers."""
    rotary: Any = {}
    for key in ("rope_parameters", "rope_scaling"):  # the older field wins, as in transformers
        rotary = raw.get(key) or rotary
        if not isinstance(rotary, dict):
            raise read.refuse(key, rotary, "an object")
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROTARY:
        raise InputError(
            f"{where} has rotary scaling {shown(kind)}, expected plain, linear or llama3: name another checkpoint"
        )
    theta = rotary.get("rope_theta", raw.get("rope_theta", 10000.0))
    rotary = {"original_max_position_embeddings": positions} | rotary
    values = {"rope_theta": (theta, _THETA)} | {key: (rotary.get(key), bounds) for key, bounds in _ROTARY[kind].items()}
    for key, (value, bounds) in values.items():
        valid = is_whole(value, *bounds) if isinstance(bounds[0], int) else _is_number(value, *bounds)
        if not valid:
            raise read.refuse(key, value, f"a number from {bounds[0]:g} to {bounds[1]:g}")
    if kind == "llama3" and rotary["high_freq_factor"] <= rotary["low_freq_factor"]:
        raise read.refuse("high_freq_factor", rotary["high_freq_factor"], "more than low_freq_factor")
    partial = rotary.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise read.refuse("partial_rotary_factor", partial, "1, as only whole heads can be rotated")
    return {"rope_type": kind, **{key: value for key, (value, _) in values.items()}}


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def end_ids(value: object, vocabulary: int, file: Path) -> tuple[int, ...]:
    """The end-of-text ids in the value of ``eos_token_id``: an id, a list of ids, or None.

    Raises InputError for ids that are not below ``vocabulary``.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if not is_whole(i, 0, vocabulary - 1):
            raise InputError(
                f"{file}: eos_token_id is {shown(value)}, expected a token id or a list of them, from 0 to "
                f"{vocabulary - 1}: correct it"
            )
    return tuple(dict.fromkeys(ids))
