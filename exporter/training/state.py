"""What training goes on from, and what it leaves: both are replaced as a whole, so that there always is one that is
intact."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from runtime.errors import DamageError, InputError, UnavailableError, reason, remedy

from .model import Drafter


def replace(file: Path, write: Callable[[Path], object]) -> None:
    """Has a new file written beside the old one, then puts it in its place. Raises UnavailableError for a full disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.new")
    try:
        beside.unlink(missing_ok=True)
        beside.touch()
        mode = beside.stat().st_mode
        write(beside)
        if beside.stat().st_mode != mode:
            beside.chmod(mode)  # safetensors makes files that only their owner can read
        with open(beside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(beside, file)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError for failing writes
        raise UnavailableError(
            f"'{file}' cannot be written ({reason(error)}): {remedy(error)}; the one before it is intact"
        ) from None
    finally:
        beside.unlink(missing_ok=True)


def save(file: Path, state: dict[str, Any]) -> None:
    replace(file, lambda path: torch.save(state, path))


def read(file: Path, known: dict[str, Any]) -> dict[str, Any] | None:
    """The state that ``save`` wrote, None if there is none.

    known: what must be as it was. Raises DamageError for a file that cannot be read, InputError if it belongs to
    another run.
    """
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        found = state["known"]
    except Exception as error:
        raise DamageError(f"'{file}' cannot be read ({reason(error)}): delete it, and training begins anew") from None
    for name, value in known.items():
        if found.get(name) != value:
            raise InputError(
                f"'{file}' was trained with {name} {found.get(name)}, and this run has {value}: give the same, or "
                "another folder with --work"
            )
    return state


def write_checkpoint(
    folder: Path, drafter: Drafter, weights: dict[str, Tensor], ids: Tensor | None, embed: Tensor, lm_head: Tensor
) -> None:
    """Writes the released layout: config.json, and weights in fp16.

    weights: of the drafter, by its names. ids: the draft vocabulary, None for all tokens. embed, lm_head: the target's.
    """
    state = {
        drafter.stored_as(name): weights[name].detach().to("cpu", torch.float16).contiguous()
        for name in drafter.state_dict()
    }
    state |= drafter.besides(ids, embed, lm_head)

    def write(path: Path) -> None:
        if drafter.file.endswith(".safetensors"):
            save_file(state, path, {"format": "pt"})
        else:
            torch.save(state, path)

    replace(folder / drafter.file, write)
    about = drafter.about()
    if "d2t" in state:  # other readers expect a row of lm_head per token of the target unless config.json says less
        about |= {"draft_vocab_size": len(state["d2t"])}
    replace(folder / "config.json", lambda path: path.write_text(json.dumps(about, indent=2), "utf-8"))
