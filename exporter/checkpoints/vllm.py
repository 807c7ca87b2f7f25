"""Writes a drafter in the layout that vLLM's Gumiho method reads, and so does our plugin for released vLLMs
(``gumiho_vllm``).

The layout follows vLLM pull request 43544 (open; commit 7f27511) and, where marked *, vLLM's main branch; all paths are
under ``vllm/``:

- Tensors have the names of vLLM's modules (``model_executor/models/gumiho.py``, ``load_weights``): ``embed_tokens``,
  ``fc`` and ``layers`` with the prefix ``model.``, ``mlp.{head}.{block}.linear`` and ``lm_head`` without. vLLM uses the
  drafter's embedding only if it has the prefix; without it, vLLM replaces the embedding by the target's.
- ``fc`` has a bias if config.json has ``gumiho_fc_bias``; else vLLM silently drops ``fc.bias``. The field ``bias`` of
  the official config.json files means attention in vLLM (``model_executor/models/llama.py``*), so it is not copied.
- Each head has one block and five residual ones. vLLM uses ``num_speculative_tokens - 2`` heads, and runs heads that
  were never loaded if the drafter has fewer.
- If the embedding or ``lm_head`` is missing, vLLM uses the target's. ``lm_head`` must have a row per token
  (``model_executor/layers/vocab_parallel_embedding.py``*), so a trimmed one is left out; vLLM reads and ignores
  ``token_map``.
- config.json (``transformers_utils/configs/gumiho.py``) is ``GumihoConfig``: the decoder's configuration is nested
  under ``model``, and vLLM copies it to the top level. The rotary embedding uses the older fields, the only ones that
  transformers 4 and 5, both of which vLLM supports, read alike (measured with 4.57 and 5.23).
- vLLM stops drafting at the drafter's ``max_position_embeddings`` (``v1/worker/gpu_model_runner.py``), which in the
  released drafters is the length of their training texts. The target's is written instead: the rotary embedding works
  beyond it.
- vLLM reads a single weight file of any size (``model_executor/model_loader/weight_utils.py``*), so there are no
  shards.
"""

import json
import os
import shlex
import struct
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gumiho_vllm import RELEASES, RESIDUAL_BLOCKS, SERIAL_STEPS
from runtime.errors import InputError

from ..weights.source import require_fp16
from .checkpoint import Checkpoint
from .drafters.gumiho import GumihoReader
from .families import EAGLE_3, HYDRA, MEDUSA, SMALL
from .pair import Pair

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
# metadata of the weight file, by which ``is_export`` recognizes it
_MARK = {"format": "pt", "written_by": "gumiho-export"}
# What vLLM 0.32.0 does with the other families. A Medusa without lm_heads drafts from uninitialized ones, and one whose
# biases are not declared drafts without them; vLLM reports neither.
_OTHERS = {
    EAGLE_3: "which vLLM runs as it is: give it to vLLM",
    SMALL: "which vLLM runs as it is: give it to vLLM",
    MEDUSA: "which vLLM runs as it is, but only with lm_heads (it does not use the target's), and with hidden_size "
    "and, for biases, medusa_fc_bias in config.json: give it to vLLM",
    HYDRA: "which vLLM does not run: export it for another --backend",
}
_SLICE_ELEMENTS = 16 << 20
_OVERHEAD = 1 << 20  # bytes reserved for config.json and the header
_SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}


def _vllm_name(name: str) -> str:
    return name if name.startswith(("mlp.", "lm_head.", "token_map")) else f"model.{name}"


def _trimmed(pair: Pair) -> bool:
    """Whether the drafter has an ``lm_head`` that vLLM cannot take."""
    name, shape = "lm_head.weight", (pair.target_shape.vocabulary, pair.target_shape.hidden)
    return name in pair.drafter and pair.drafter.shape(name) != shape


def _reader(pair: Pair) -> GumihoReader:
    """The drafter's. Raises InputError for one of another family than Gumiho's."""
    if not isinstance(pair.reader, GumihoReader):
        raise InputError(f"drafter '{pair.drafter.source}' is of the family {pair.family}, {_OTHERS[pair.family]}")
    return pair.reader


def _tensors(pair: Pair, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtypes of the tensors to write, by the checkpoint's names. Raises InputError for a drafter that vLLM cannot
    run."""
    reader = _reader(pair)
    if reader.heads and reader.blocks != RESIDUAL_BLOCKS:
        raise InputError(
            f"drafter '{pair.drafter.source}' has heads of {reader.blocks} residual blocks, but vLLM supports only "
            f"{RESIDUAL_BLOCKS}: export it for another --backend"
        )
    drafter, dtypes = pair.drafter, dict[str, torch.dtype]()
    names = drafter.names() - ({"lm_head.weight"} if _trimmed(pair) else set())
    for name in names:
        if name != "token_map":
            drafter.check_dtype(name)
        stored = drafter.read(name, 0, 0).dtype
        dtypes[name] = dtype if dtype is not None and stored.is_floating_point else stored
        if dtypes[name] not in _SAFETENSORS_NAMES:
            raise InputError(
                f"drafter '{drafter.source}': tensor '{name}' is {stored}, expected torch.int64 or torch.int32"
            )
    # Widest dtype first, so that every tensor is aligned to its element size, as in the safetensors library.
    return {name: dtypes[name] for name in sorted(names, key=lambda n: (-dtypes[n].itemsize, n))}


def _config(pair: Pair) -> dict[str, Any]:
    """config.json, with every field that vLLM reads, so that nothing depends on its defaults."""
    shape, rope = pair.draft_shape, dict(pair.draft_config.rope_parameters)
    theta = rope.pop("rope_theta")
    rope.pop("type", None)  # an even older name of rope_type
    return {
        "architectures": ["GumihoLlamaForCausalLM"],
        "model_type": "gumiho",
        "gumiho_fc_bias": _reader(pair).fc_bias,
        "truncated_vocab_size": shape.vocabulary,
        "model": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "attention_bias": shape.qkv_bias,
            "mlp_bias": shape.mlp_bias,
            "vocab_size": shape.vocabulary,
            "rms_norm_eps": shape.eps,
            "max_position_embeddings": pair.target_config.max_position_embeddings,
            "rope_theta": theta,
            "rope_scaling": None if rope["rope_type"] == "default" else rope,
            "tie_word_embeddings": False,
        },
    }


def _slices(drafter: Checkpoint, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    shape = drafter.shape(name)
    rows = max(1, _SLICE_ELEMENTS // max(1, prod(shape[1:])))
    for start in range(0, shape[0], rows):
        stored = drafter.read(name, start, start + rows)
        values = stored.to(dtype)
        if dtype == torch.float16 != stored.dtype:
            require_fp16(values, f"drafter '{drafter.source}': tensor '{name}'")
        yield values.contiguous()


def size(pair: Pair, dtype: torch.dtype | None = None) -> int:
    """Bytes of disk space needed. Raises InputError for a drafter that vLLM cannot run."""
    return (
        sum(prod(pair.drafter.shape(name)) * stored.itemsize for name, stored in _tensors(pair, dtype).items())
        + _OVERHEAD
    )


def write(
    pair: Pair, folder: Path, dtype: torch.dtype | None = None, progress: Callable[[int], object] = lambda _: None
) -> int:
    """Writes config.json and model.safetensors into an empty folder, a slice at a time. Returns their size in bytes.

    dtype: that of all weights; None keeps the stored ones. progress: called with the bytes of every slice. Raises
    InputError for values too large for the dtype.
    """
    drafter, tensors = pair.drafter, _tensors(pair, dtype)
    header, end = dict[str, Any](__metadata__=_MARK), 0
    for name, stored in tensors.items():
        shape, start = drafter.shape(name), end
        end += prod(shape) * stored.itemsize
        header[_vllm_name(name)] = {"dtype": _SAFETENSORS_NAMES[stored], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / _CONFIG).open("wb") as out:
        out.write(json.dumps(_config(pair), indent=2).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())
    # Not with the safetensors library, because its writer needs all tensors in memory at once.
    with (folder / _WEIGHTS).open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, stored in tensors.items():
            for values in _slices(drafter, name, stored):
                progress(out.write(memoryview(values.view(torch.uint8).numpy()).cast("B")))  # type: ignore[arg-type]
        out.flush()
        os.fsync(out.fileno())
    return sum((folder / name).stat().st_size for name in (_CONFIG, _WEIGHTS))


def is_export(folder: Path) -> bool:
    """Whether a folder contains exactly the files that ``write`` writes, so that it can safely be replaced."""
    try:
        if {path.name for path in folder.iterdir()} != {_CONFIG, _WEIGHTS}:
            return False
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            return file.metadata() == _MARK
    except (OSError, SafetensorError):
        return False


def lines(pair: Pair, out: Path) -> list[str]:
    """How to serve ``out`` with vLLM, in Python and on the command line, and notes on limits."""
    local = Path(pair.target.source).expanduser()
    target = str(local.absolute()) if local.is_dir() else pair.target.source
    # Absolute paths: vLLM takes a name with a dot and no slash for a Python class, and other relative paths for hub
    # ids.
    drafter = {"method": "eagle", "model": str(out.absolute()), "num_speculative_tokens": SERIAL_STEPS + pair.heads}
    name, text = (json.dumps(value, ensure_ascii=False) for value in (target, drafter))
    messages = [
        f"LLM(model={name}, speculative_config={text})",
        f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(text)}",
        f"note: this needs vLLM {' or '.join(RELEASES)} with the plugin of gumiho-export, on its V1 model runner: "
        "pip install --no-deps gumiho-export where vLLM is installed",
        "note: a vLLM with pull request 43544 takes the method 'gumiho' instead of 'eagle', without the plugin",
    ]
    if _trimmed(pair):
        shape = list(pair.drafter.shape("lm_head.weight"))
        supported = [pair.target_shape.vocabulary, pair.target_shape.hidden]
        messages.append(
            f"note: its lm_head of shape {shape} is left out, because vLLM supports only {supported}; it uses the "
            "target's"
        )
    return messages
