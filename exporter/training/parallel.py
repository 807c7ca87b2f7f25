"""Several processes on one machine, as torchrun starts them: one for each GPU, or on the CPU. In a lone process all of
this does nothing.

Collectives must be called by all processes in the same order. Flags and objects travel over gloo, gradients over nccl
where there is CUDA.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from runtime.errors import InputError, UnavailableError, reason

T = TypeVar("T")
_PATIENCE = timedelta(days=2)  # the others wait while the first one reads --data, fits the first drafter, or evaluates


def rank() -> int:
    """The number of this process. 0 is the one that reports, evaluates and saves."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Belongs to the other processes within the block, if torchrun or accelerate has started any. Yields the device to
    compute on.

    device: as the user gave it, may be empty. Raises InputError for a device that several processes cannot have,
    UnavailableError if there are too few GPUs, if processes are on other machines, or if another one ends.
    """
    count = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if count == "1":
        yield device or ("cuda" if torch.cuda.is_available() else "cpu")
        return
    if os.environ.get("LOCAL_WORLD_SIZE", count) != count:
        raise UnavailableError(
            "training uses the GPUs of one machine: start it with torchrun --nproc-per-node N, and no more nodes"
        )
    own = _own_device(device, count)
    try:
        dist.init_process_group("gloo" if own == "cpu" else "cpu:gloo,cuda:nccl", timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise UnavailableError(
            f"the {count} processes that RANK and WORLD_SIZE name do not find each other ({reason(error)}): start them "
            "with torchrun --nproc-per-node N, or unset both variables"
        ) from None
    try:
        yield own
    except RuntimeError as error:
        if "onnection" not in str(error):  # what gloo raises has no class of its own
            raise
        raise UnavailableError(
            "another process of this training has ended: its message or torchrun's says why; the same command goes on "
            "from the last saved state"
        ) from None
    finally:
        # Deleting a group waits for its threads and holds the GIL, which they may need to finish (PyTorch issue 56297):
        # it is left to the end of the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
        dist.destroy_process_group()


def _own_device(device: str, count: str) -> str:
    if device not in ("", "cpu", "cuda"):
        raise InputError(
            f"--device {device} is one device, and {count} processes train: leave it out, or give cpu or cuda"
        )
    if device == "cpu" or not (device or torch.cuda.is_available()):
        return "cpu"
    own, have = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), torch.cuda.device_count()
    if own >= have:
        raise UnavailableError(
            f"{count} processes need as many GPUs, and {have} are here: start fewer, or give --device cpu"
        )
    torch.cuda.set_device(own)
    return f"cuda:{own}"


def total(*values: int) -> list[int]:
    """The sum of each value over all processes."""
    if ranks() == 1:
        return [int(value) for value in values]
    sums = torch.tensor([int(value) for value in values])
    dist.all_reduce(sums)
    return sums.tolist()


def wait() -> None:
    """Until all processes are here."""
    total(0)


def same(value: T) -> T:
    """The first process's value."""
    if ranks() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, device=torch.device("cpu"))
    return shared[0]


def gathered(own: Sequence[T]) -> list[T]:
    """What all processes have, in their order: in the first one, and nothing in the others."""
    if ranks() == 1:
        return list(own)
    found: list[Sequence[T]] | None = None if rank() else [[] for _ in range(ranks())]
    dist.gather_object(own, found)
    return [item for part in found or () for item in part]


@contextmanager
def in_turn() -> Iterator[None]:
    """One process at a time, the first one first."""
    for _ in range(rank()):
        wait()
    yield
    for _ in range(ranks() - rank()):
        wait()


def shard(layer: nn.Module, device: str) -> None:
    """Splits a frozen layer's weights over the processes (FSDP). From then on it is called by all of them at once."""
    mesh = init_device_mesh(device.partition(":")[0], (ranks(),))
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def whole(weight: Tensor) -> Tensor:
    """All of a weight whose layer may be split, for all processes at once."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def wrapped(module: nn.Module) -> nn.Module:
    """The module to call in place of this one, which gets the first process's weights, and gradients averaged over all
    processes."""
    wait()
    return (
        module
        if ranks() == 1
        else DistributedDataParallel(module, forward_sync_buffers=False, gradient_as_bucket_view=True)
    )
