"""Records the golden run with eager PyTorch over the packed weights."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graphs.dialects.plain import Plain
from graphs.dialects.quantization import bits_of, dequantize, input_major
from graphs.drafter import Drafter
from graphs.target import Target
from runtime.errors import GumihoError

from .trace import signature
from .weights.source import Location, is_finite

_PROMPT, _TOP = 12, 8
_TREE = ("tokens", "depth", "parent", "mask", "score")  # what a draft graph returns first
_SLICE_ELEMENTS = 1 << 20
_NUMBERS = {torch.float16, torch.bfloat16, torch.float32}
_WORKERS = 16  # at most: each holds a slice


class Weights:
    """Parameters that lie in the weight files and are read a slice at a time, so that little more than a slice is ever held.

    The modules' own parameters are maps of the files, which nothing looks into but for shapes and a few rows of tables.
    """

    def __init__(self, bundle: Path, workers: int, progress: Callable[[int], object]) -> None:
        self._bundle, self._own, self._progress = bundle, threading.local(), progress
        self._workers, self._pool = workers, ThreadPoolExecutor(workers)
        self._places: dict[int, tuple[str, Location]] = {}  # by a parameter's address

    def close(self) -> None:
        self._pool.shutdown()

    def fill(self, module: Target | Drafter, locations: Mapping[str, Location]) -> None:
        """Gives a module of the meta device its parameters."""
        state = {name: locations[name].mapped(self._bundle) for name, _ in module.named_parameters()}
        module.load_state_dict(state, assign=True)
        self._places |= {parameter.data_ptr(): (name, locations[name]) for name, parameter in state.items()}

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """The calling worker's: for bytes as they are read, and for the numbers they stand for, or the scales that codes have."""
        if not hasattr(self._own, "buffers"):
            self._own.buffers = torch.empty(4 * _SLICE_ELEMENTS, dtype=torch.uint8), torch.empty(_SLICE_ELEMENTS)
        found: tuple[Tensor, Tensor] = self._own.buffers
        return found

    def _rows(self, matrix: Tensor, start: int, stop: int, buffer: Tensor) -> Tensor:
        """Rows of a parameter, or of one of the matrices stacked in it, read into a buffer."""
        base, part = matrix.untyped_storage().data_ptr(), matrix[start:stop]
        name, place = self._places[base]
        into = buffer.view(torch.uint8)[: part.numel() * part.itemsize]
        with (self._bundle / place.file).open("rb", buffering=0) as file:
            file.seek(place.offset + part.data_ptr() - base)
            file.readinto(into.numpy().data)
        self._progress(into.numel())
        found = into.view(part.dtype).reshape(part.shape)
        if found.dtype in _NUMBERS and not is_finite(
            found
        ):  # of linked weights, which were not packed, this is the first reading
            raise GumihoError(f"'{place.file}': tensor '{name}' holds NaN or infinity: download the checkpoint again")
        return found

    def product(self, x: Tensor, weight: Tensor, scale: Tensor | None, transposed: bool = False) -> Tensor:
        """x @ weight.T, or with the matrix itself where it is kept transposed; added up in fp32. x: [n, K] -> fp32 [n, N].

        Workers take slices in turn: while one reads, others compute.
        """
        x, turned = x.float(), transposed or input_major(weight)
        rows = max(1, _SLICE_ELEMENTS // prod(weight.shape[1:]) // (1 if scale is None else 2))
        starts = range(0, weight.shape[0], rows)

        def numbers(start: int) -> Tensor:
            (raw, wide), stop = self._buffers(), start + rows
            found = self._rows(weight, start, stop, raw)
            if scale is None or turned:
                return wide[: found.numel()].view(found.shape).copy_(found)
            return dequantize(found, self._rows(scale, start, stop, wide), bits_of(found, x.shape[1])).float()

        @torch.inference_mode()
        def summand(own: Iterable[int]) -> Tensor:
            made = torch.zeros(len(x), weight.shape[1])
            for start in own:
                made.addmm_(x[:, start : start + rows], numbers(start))
            return made

        @torch.inference_mode()
        def columns(start: int) -> None:
            made[:, start : start + rows] = x @ numbers(start).T

        if turned:
            shares = [starts[i :: self._workers] for i in range(self._workers)]
            return reduce(torch.add, self._pool.map(summand, shares)) * (1.0 if scale is None else scale)
        # Filled, not put together of parts: small ones that are kept lie between what is freed, and hold it.
        made = torch.empty(len(x), weight.shape[0])
        for _ in self._pool.map(columns, starts):
            pass
        return made

    def dialect(self) -> type[Plain]:
        """``Plain``, its products made so."""
        product = self.product

        class Streaming(Plain):
            @classmethod
            def linear(cls, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
                made = product(x, weight, scale)
                return (made if bias is None else made + bias.float()).to(x.dtype)

            @classmethod
            def residual(
                cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
            ) -> Tensor:
                done = []
                for i, head in enumerate(x):
                    for j, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                        # Numbers are kept input-major, codes output-major.
                        made = product(head, weight[i], scales[j][i] if scales else None, transposed=not scales)
                        head = head + F.silu((made + bias[i].float()).to(x.dtype))
                    done.append(head)
                return torch.stack(done)

        return Streaming


@contextmanager
def weights(bundle: Path, progress: Callable[[int], object] = lambda _: None) -> Iterator[Weights]:
    """``Weights``, whose products are made by as many threads as torch has, instead of by torch's own within each of many small
    ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    opened = Weights(bundle, min(threads, _WORKERS), progress)
    try:
        yield opened
    finally:
        opened.close()
        torch.set_num_threads(threads)


def empty(module: Target | Drafter, dtype: torch.dtype) -> list[Tensor]:
    """Caches for a module."""
    return [example for name, example, _ in signature(module, dtype)[0] if name.startswith(("past_key", "past_value"))]


def positions(rows: int) -> int:
    """That the golden run takes at most, for a tree of so many rows."""
    return 2 * _PROMPT + rows


def _tree(rows: int, depth: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A tree: depths int64 [rows], mask bool [rows, rows], and its longest path, int64 [at most depth + 1]."""
    depths, mask = [0], torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        # First a path as long as there can be one, then rows anywhere beside it.
        inner = [r for r, d in enumerate(depths) if d < depth]
        parent = inner[-1] if row <= depth else inner[int(torch.randint(0, len(inner), (1,), generator=draw))]
        depths.append(depths[parent] + 1)
        mask[row] |= mask[parent]
    return torch.tensor(depths), mask, torch.arange(min(rows, depth + 1))


@torch.inference_mode()
def record(target: Target, drafter: Drafter, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The inputs and outputs that ``runtime.engines.golden_replay.replay`` reads; target and drafter run eagerly over empty caches of dtype.

    What costs time is reading the weights, so it happens as rarely as can be: the prompt and a tree behind it, which engines read
    in two passes, are rows of one pass here, and so are the prompt and the pending token that the drafter extends its caches with.
    The tree is drawn instead of drafted, since the drafter needs the prompt's hidden rows.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = target.embed_tokens.num_embeddings
    assert drafter.tree
    # No longer than the tree: a pass of that many rows fits every backend.
    n = min(_PROMPT, target.capacity // 2, drafter.tree.rows)
    depths, tree, path = _tree(min(drafter.tree.rows, target.capacity - n), drafter.tree.depth, draw)
    tokens = torch.randint(0, vocabulary, (n + len(depths),), generator=draw)
    depth, mask = torch.cat((torch.arange(n), n + depths)), torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    mask[n:, n:] = tree
    choice, logits, hidden, *_ = target(tokens, depth, mask, torch.tensor([0]), empty(target, dtype))
    top = logits.topk(min(_TOP, vocabulary), dim=-1)
    run: dict[str, Tensor] = {}
    for name, part in (("prompt", slice(n)), ("verify", slice(n, None))):
        run |= {f"{name}.{k}": v for k, v in {
            "tokens": tokens[part], "depth": depth[part] - depth[part][0], "mask": mask[part, part], "choice": choice[part],
            "hidden": hidden[part], "top_ids": top.indices[part], "top_logits": top.values[part].float(),
        }.items()}  # fmt: skip

    _require_finite(run)  # a choice among other logits is no token, and cannot be drafted from

    def draft_pass(name: str, read: Tensor, path: Tensor, hidden: Tensor, past: int, caches: list[Tensor]) -> list[Tensor]:
        made = drafter(read, hidden, path, torch.tensor([len(read)]), torch.tensor([past]), caches)
        run.update({f"{name}.{part}": value for part, value in zip(_TREE, made, strict=False)})
        return list(made[len(_TREE) :])

    # The pending token is the tree's root.
    caches = draft_pass("tree", tokens[1 : n + 1], torch.arange(n), hidden[:n], 0, empty(drafter, dtype))
    run |= {"tree.read": tokens[n : n + 1], "tree.path": torch.tensor([n - 1])}
    draft_pass("next", choice[n:][path], path, hidden[n:], n, caches)
    run |= {"next.read": choice[n:][path], "next.path": path}
    _require_finite(run)
    return {name: value.numpy() for name, value in run.items()}


def _require_finite(run: Mapping[str, Tensor]) -> None:
    """Raises GumihoError naming the first recorded output that holds NaN or infinity."""
    if odd := next((name for name, value in run.items() if value.is_floating_point() and not value.isfinite().all()), None):
        raise GumihoError(
            f"the golden run's '{odd}' holds NaN or infinity: the checkpoints' weights are damaged, or too large for this --dtype"
        )
