"""Reads files of ``torch.save`` that hold tensors by name and nothing that could run code."""

import re
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from runtime.errors import DamageError, InputError

_ZIP, _MAGIC = b"PK", b"l\xfc\x9cF\xf9 j\xa8P\x19"  # which newer and older files begin with
_CONVERT = "convert it to .safetensors where its origin is trusted, or name another checkpoint"


def load(file: Path, mapped: bool) -> tuple[dict[str, Tensor], bool]:
    """The tensors, and whether they are mapped. mapped: whether to map them, if the file's format allows it.

    Raises InputError for a file that holds anything else, DamageError for one of another format, and whatever torch
    raises for damage.
    """
    with file.open("rb") as opened:
        head = opened.read(64)
    if not head.startswith(_ZIP) and _MAGIC not in head:
        raise DamageError(f"{file} is {'no file of torch.save' if head else 'empty'}: download it again")
    try:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # Files from before PyTorch 1.6 cannot be mapped, so they are read whole.
            state, mapped = torch.load(file, map_location="cpu", weights_only=True), False
    except UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise InputError(
                f"{file} holds an object of {found[1]}, which is not supported, as reading it could run code: "
                f"{_CONVERT}"
            ) from None
        raise DamageError(f"{file} holds no pickled tensors: download it again, or name another checkpoint") from None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise InputError(f"{file} does not hold tensors by name, which is all that is supported: {_CONVERT}")
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise InputError(
                f"{file} holds '{name}' as a tensor that is sparse, quantized or without numbers: {_CONVERT}"
            )
    return tensors, mapped
