"""Spoiled checkpoints for ``tests.mutations``: what ``gumiho-export`` makes of them."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import exporter.writing.bundle
from exporter.cli import main
from runtime.bundle.reader import Bundle
from tests.mutations import Apply, captured
from tests.pairs import RandomPair

_SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
OPTIONS = ["--rows", "4", "--capacity", "64", "--draft-weights", "none"]
_traced: dict[Any, Any] = {}


def prepare(folder: Path) -> None:
    """A pair in the two containers, the target sharded, with a tokenizer and what lies beside it."""
    RandomPair(_SMALL, layers=1, heads=1).write(folder)
    target, drafter = folder / "target", folder / "drafter"
    state = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    places = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(state)}
    for file in set(places.values()):
        save_file({n: t for n, t in state.items() if places[n] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
    )
    drafted = torch.load(drafter / "pytorch_model.bin")
    torch.save(drafted | {"token_map": torch.arange(40)}, drafter / "pytorch_model.bin")
    words = {token: i for i, token in enumerate(sorted(ByteLevel.alphabet())[:60])}
    tokenizer = Tokenizer(BPE(words | {"".join(sorted(words)[:2]): 60}, [tuple(sorted(words)[:2])]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!"})
    )
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5], "temperature": 0.6}))


def attempt(folder: Path) -> str:
    """A dry run, and an export where that was content. Returns ``refused`` or ``exported``."""
    out = folder.parent / "out"
    argv = ["--ckpt", str(folder / "drafter"), "--target", str(folder / "target"), "--out", str(out), *OPTIONS]
    if _run([*argv, "--dry-run"]):
        assert [p.name for p in folder.parent.iterdir()] == [folder.name], "a dry run wrote something"
        return "refused by the dry run"
    trace, exporter.writing.bundle.trace = exporter.writing.bundle.trace, _once
    try:
        status = _run(argv)
    finally:
        exporter.writing.bundle.trace = trace
    beside = {p.name for p in folder.parent.iterdir()} - {folder.name}
    if status:
        assert not beside, f"a failed export left {beside}"
        return "refused by the export"
    assert beside == {"out"}, f"an export left {beside}"
    bundle = Bundle(out)
    bundle.verify()
    assert all(0 <= i < bundle.manifest.vocabulary for i in bundle.manifest.eos_token_ids)
    with np.load(out / "golden.npz") as golden:
        assert all(np.isfinite(golden[name]).all() for name in golden.files), "a golden run of NaN was exported"
    return "exported"


def _run(argv: list[str]) -> int:
    with captured() as read, warnings.catch_warnings():
        status = main(argv)
    error = read()[1]
    assert status in (0, 1), f"status {status}"
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == status, error
    if status:
        # Nothing but the error and, where work had begun, its progress.
        rest = [
            line
            for line in error.replace("\r", "\n").splitlines()
            if line and not line.startswith("error: ") and "%|" not in line and not line.endswith("so far")
        ]
        assert not rest, error
        assert error.endswith("\n")
        assert len(lines[0]) < 2000, f"a sentence of {len(lines[0])} characters"
    return status


_trace = exporter.writing.bundle.trace


def _once(module: Any, places: Any, folder: Any, dtype: Any, pinned: Any) -> Any:
    """Traces each graph once: tracing takes most of the time of a small export."""
    eps = [float(m.eps) for m in module.modules() if hasattr(m, "eps")]
    key = repr(
        (
            type(module),
            module.ops,
            getattr(module, "tree", None),
            module.capacity,
            eps,
            sorted(places.items()),
            dtype,
            pinned,
        )
    )
    if key not in _traced:
        _traced[key] = _trace(module, places, folder, dtype, pinned)
    return _traced[key]


# --- mutations of tensors ---------------------------------------------------------------------------------------------


def _tensors(file: Path, rng: random.Random) -> tuple[str, Apply] | None:
    if file.suffix not in (".safetensors", ".bin"):
        return None
    state: dict[Any, Any] = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    name = rng.choice(sorted(state))
    tensor = state[name]
    value = rng.choice((float("nan"), float("inf"), -float("inf"), 1e30, 0.0))
    way = rng.choice(
        ("value", "value", "all", "delete", "rename", "dtype", "transpose", "empty", "integer key", "object")
    )
    if way == "value" and tensor.is_floating_point():
        tensor.view(-1)[rng.randrange(tensor.numel())] = value
    elif way == "all":
        tensor.fill_(value if tensor.is_floating_point() else rng.choice((-1, 10**9)))
    elif way == "delete":
        del state[name]
    elif way == "rename":
        odd = (
            "mlp.999999999.0.linear.weight",
            "layers.999999999.x",
            "two\nlines",
            "",
            "model.model.fc.weight",
            "fc.weight",
        )
        state[rng.choice(odd)] = state.pop(name)
    elif way == "dtype":
        state[name] = tensor.to(rng.choice((torch.float64, torch.int8, torch.bfloat16, torch.float16, torch.bool)))
    elif way == "transpose":
        state[name] = tensor.T.contiguous() if tensor.ndim == 2 else tensor.reshape(1, -1)
    elif way == "empty":
        state[name] = tensor.flatten()[:0]
    elif file.suffix == ".safetensors":
        return None
    elif way == "integer key":
        state[7] = state.pop(name)
    else:
        state[name] = rng.choice(
            (3, "text", None, tensor.to_sparse(), torch.nn.Parameter(tensor.float()), tensor.to("meta"), [tensor])
        )
    return (
        f"{way} of '{name}', {value}",
        lambda f: save_file(state, f) if f.suffix == ".safetensors" else torch.save(state, f),
    )


WAYS = (_tensors, _tensors, _tensors)
