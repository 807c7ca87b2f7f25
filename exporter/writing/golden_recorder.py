"""Records the golden run: eager PyTorch over the packed weights, which are read slice by slice."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
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
from graphs.tree import TreeConfig
from runtime.engines.golden_file import TREE, noise
from runtime.errors import DamageError

from ..tracing.signature import signature
from ..weights.ahead import one_thread
from ..weights.source import Location, is_finite

_PROMPT, _TOP = 12, 8
_SLICE_ELEMENTS = 1 << 20
_FLOATS = {torch.float16, torch.bfloat16, torch.float32}
_MAX_WORKERS = 16  # each holds a slice


class Weights:
    """Multiplies with parameters in the weight files. It reads them slice by slice, so that memory holds a slice per
    worker.

    The modules' own parameters are memory maps of the files, of which only shapes and a few rows of tables are read.
    """

    def __init__(self, bundle: Path, workers: int, progress: Callable[[int], object]) -> None:
        self._bundle, self._local, self._progress = bundle, threading.local(), progress
        self._workers, self._pool = workers, ThreadPoolExecutor(workers)
        self._places: dict[int, tuple[str, Location]] = {}  # by a parameter's address

    def close(self) -> None:
        self._pool.shutdown()

    def fill(self, module: Target | Drafter, locations: Mapping[str, Location]) -> None:
        """Gives a module on the meta device its parameters."""
        state = {name: locations[name].mapped(self._bundle) for name, _ in module.named_parameters()}
        module.load_state_dict(state, assign=True)
        self._places |= {parameter.data_ptr(): (name, locations[name]) for name, parameter in state.items()}

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """The calling worker's buffers: one for stored bytes, one for their fp32 values or for the scales of codes."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = torch.empty(4 * _SLICE_ELEMENTS, dtype=torch.uint8), torch.empty(_SLICE_ELEMENTS)
        buffers: tuple[Tensor, Tensor] = self._local.buffers
        return buffers

    def _rows(self, matrix: Tensor, start: int, stop: int, buffer: Tensor) -> Tensor:
        """Rows [start, stop) of a parameter or of a matrix in a stack, in a buffer. Raises DamageError for NaN and
        infinity."""
        base, part = matrix.untyped_storage().data_ptr(), matrix[start:stop]
        name, place = self._places[base]
        into = buffer.view(torch.uint8)[: part.numel() * part.itemsize]
        with (self._bundle / place.file).open("rb", buffering=0) as file:
            file.seek(place.offset + part.data_ptr() - base)
            file.readinto(into.numpy().data)
        self._progress(into.numel())
        rows = into.view(part.dtype).reshape(part.shape)
        # Linked weights were not checked while packing.
        if rows.dtype in _FLOATS and not is_finite(rows):
            raise DamageError(f"'{place.file}': tensor '{name}' holds NaN or infinity: download the checkpoint again")
        return rows

    def product(
        self, x: Tensor, weight: Tensor, scale: Tensor | None, zero: Tensor | None = None, transposed: bool = False
    ) -> Tensor:
        """x @ weight.T, or x @ weight if it is stored transposed, accumulated in fp32. x: [n, K] -> fp32 [n, N].

        Workers take slices in turn, so that some compute while others read.
        """
        x, by_input = x.float(), transposed or input_major(weight)
        rows = max(1, _SLICE_ELEMENTS // prod(weight.shape[1:]) // (1 if scale is None else 2))
        starts = range(0, weight.shape[0], rows)

        def values(start: int) -> Tensor:
            (raw, wide), stop = self._buffers(), start + rows
            stored = self._rows(weight, start, stop, raw)
            if scale is None or by_input:
                numbers = wide[: stored.numel()].view(stored.shape).copy_(stored)
                return numbers.sub_(128) if stored.dtype == torch.uint8 else numbers
            own = self._rows(scale, start, stop, wide)
            # The last quarter of the bytes is free: codes take at most a byte for each of half as many numbers as fit
            # into all.
            middle = None if zero is None else self._rows(zero, start, stop, raw[3 * _SLICE_ELEMENTS :])
            return dequantize(stored, own, bits_of(stored, x.shape[1]), middle).float()

        @torch.inference_mode()
        def partial_sum(starts: Iterable[int]) -> Tensor:
            total = torch.zeros(len(x), weight.shape[1])
            for start in starts:
                total.addmm_(x[:, start : start + rows], values(start))
            return total

        @torch.inference_mode()
        def columns(start: int) -> None:
            product[:, start : start + rows] = x @ values(start).T

        if by_input:
            shares = [starts[i :: self._workers] for i in range(self._workers)]
            return reduce(torch.add, self._pool.map(partial_sum, shares)) * (1.0 if scale is None else scale)
        # Allocated once and filled: small results between freed slices would fragment the heap.
        product = torch.empty(len(x), weight.shape[0])
        for _ in self._pool.map(columns, starts):
            pass
        return product

    def dialect(self) -> type[Plain]:
        """``Plain`` with the products of this class."""
        product = self.product

        class Streaming(Plain):
            @classmethod
            def linear(
                cls, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, zero: Tensor | None = None
            ) -> Tensor:
                y = product(x, weight, scale, zero)
                return (y if bias is None else y + bias.float()).to(x.dtype)

            @classmethod
            def residual(
                cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
            ) -> Tensor:
                outputs = []
                for i, head in enumerate(x):
                    for j, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                        # Unquantized heads are stored input-major, codes output-major.
                        y = product(head, weight[i], scales[j][i] if scales else None, transposed=not scales)
                        head = head + F.silu((y + bias[i].float()).to(x.dtype))
                    outputs.append(head)
                return torch.stack(outputs)

        return Streaming


@contextmanager
def weights(bundle: Path, progress: Callable[[int], object] = lambda _: None) -> Iterator[Weights]:
    """``Weights`` with as many workers as torch has threads, instead of torch's own threads within each small
    product."""
    with one_thread() as threads, closing(Weights(bundle, min(threads, _MAX_WORKERS), progress)) as opened:
        yield opened


def empty(module: Target | Drafter, dtype: torch.dtype) -> list[Tensor]:
    """Empty caches for a module: key and value of each layer, [1, kv heads, S, d]."""
    return [example for name, example, _ in signature(module, dtype)[0] if name.startswith(("past_key", "past_value"))]


@contextmanager
def _log_probs(drafter: Drafter) -> Iterator[list[Tensor]]:
    """Collects the log-probabilities, fp32 [n, V], among which the drafter chooses the tokens of a chain, level by
    level."""
    found, own = list[Tensor](), drafter.ops

    class Collecting(own):  # type: ignore[valid-type, misc]
        @staticmethod
        def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
            if x.dim() > 1:  # else among nodes
                found.append(x.reshape(-1, x.shape[-1]))
            return own.top_k(x, k)

    drafter.ops = Collecting
    try:
        yield found
    finally:
        drafter.ops = own


def positions(rows: int) -> int:
    """Upper bound of the positions that the golden run takes, for a tree of ``rows``."""
    return 2 * _PROMPT + rows


def _tree(rows: int, depth: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A random tree: depths int64 [rows], mask bool [rows, rows], and the longest path, int64 [at most depth + 1]."""
    depths, mask = [0], torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        # First a path of full depth, then rows with random parents.
        parents = [r for r, d in enumerate(depths) if d < depth]
        parent = (
            parents[-1] if row <= depth else parents[int(torch.randint(0, len(parents), (1,), generator=generator))]
        )
        depths.append(depths[parent] + 1)
        mask[row] |= mask[parent]
    return torch.tensor(depths), mask, torch.arange(min(rows, depth + 1))


@torch.inference_mode()
def record(target: Target, drafter: Drafter | None, tree: TreeConfig, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The inputs and outputs that ``runtime.engines.golden_replay.replay`` reads, by name. tree: the drafter's; without
    a drafter its rows and depth are those that a pass verifies. dtype: of the caches.

    Reading the weights takes most of the time, so there are few passes: the prompt and the tree after it are rows of
    one pass here, but of two on engines, and so are the prompt and the pending token that the drafter reads. The tree
    is random instead of drafted, since the drafter needs the prompt's hidden rows. Raises DamageError for outputs with
    NaN or infinity.
    """
    run, path = _target_passes(target, drafter.ahead if drafter else 0, tree, dtype)
    _require_finite(run)  # before drafting: a choice among logits with NaN is not a token
    drafted = {} if drafter is None else _draft_passes(drafter, tree, dtype, run, path)
    _require_finite(drafted)
    return {name: value.numpy() for name, value in (run | drafted).items()}


def _target_passes(
    target: Target, ahead: int, tree: TreeConfig, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """The target's part of the run: the passes "prompt" and "verify", and the longest path of the verified tree. ahead:
    see ``Drafter``."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.embed_tokens.vocabulary
    # No longer than the tree: a pass of that many rows fits every backend.
    capacity = target.capacity - ahead
    n = min(_PROMPT, capacity // 2, tree.rows)
    depths, ancestors, path = _tree(min(tree.rows, capacity - n), tree.depth, generator)
    tokens = torch.randint(0, vocabulary, (n + len(depths),), generator=generator)
    depth = torch.cat((torch.arange(n), n + depths))
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    mask[n:, n:] = ancestors
    choice, logits, hidden, *_ = target(tokens, depth, mask, None, torch.tensor([0]), empty(target, dtype))
    top = logits.topk(min(_TOP, vocabulary), dim=-1)
    run: dict[str, Tensor] = {}
    for name, part in (("prompt", slice(n)), ("verify", slice(n, None))):
        run |= {
            f"{name}.{k}": v
            for k, v in {
                "tokens": tokens[part],
                "depth": depth[part] - depth[part][0],
                "mask": mask[part, part],
                "choice": choice[part],
                "hidden": hidden[part],
                "top_ids": top.indices[part],
                "top_logits": top.values[part].float(),
            }.items()
        }
    starts = [part.start for part in target.returns.parts(target.norm.weight.shape[0])]
    run["prompt.parts"] = torch.tensor([*starts, hidden.shape[1]])
    return run, path


def _draft_passes(
    drafter: Drafter, tree: TreeConfig, dtype: torch.dtype, run: Mapping[str, Tensor], path: Tensor
) -> dict[str, Tensor]:
    """The drafter's part of the run: the passes "tree", after the prompt, and "next", after an accepted path. run: the
    target's part."""
    drafted: dict[str, Tensor] = {}
    drawn = torch.from_numpy(noise(tree.depth, drafter.drafted)) if drafter.noisy else None

    def draft_pass(
        name: str, read: Tensor, path: Tensor, hidden: Tensor, past: int, caches: list[Tensor], drawn: Tensor | None
    ) -> list[Tensor]:
        with _log_probs(drafter) if tree.is_chain else nullcontext() as levels:
            outputs = drafter(read, hidden, path, torch.tensor([len(read)]), torch.tensor([past]), caches, drawn)
        drafted.update({f"{name}.{part}": value for part, value in zip(TREE, outputs, strict=False)})
        if levels:
            best = torch.cat(levels).topk(min(_TOP, levels[0].shape[1]), dim=-1)
            ids = best.indices if drafter.token_ids is None else drafter.token_ids[best.indices]
            scores = drafted[f"{name}.score"][:-1, None] + best.values
            drafted.update({f"{name}.top_ids": ids, f"{name}.top_scores": scores})
        return list(outputs[len(TREE) :])  # the caches follow the tree

    prompt, pending = run["prompt.tokens"], run["verify.tokens"][:1]  # the pending token is the tree's root
    n, accepted = len(prompt), run["verify.choice"][path]
    read = torch.cat((prompt[1:], pending))
    caches = draft_pass("tree", read, torch.arange(n), run["prompt.hidden"], 0, empty(drafter, dtype), None)
    drafted |= {"tree.read": pending, "tree.path": torch.tensor([n - 1])}
    draft_pass("next", accepted, path, run["verify.hidden"], n, caches, drawn)
    return drafted | {"next.read": accepted, "next.path": path}


def _require_finite(run: Mapping[str, Tensor]) -> None:
    """Raises DamageError naming the first recorded output that holds NaN or infinity."""
    if name := next(
        (name for name, value in run.items() if value.is_floating_point() and not value.isfinite().all()), None
    ):
        raise DamageError(
            f"the golden run's '{name}' holds NaN or infinity: the checkpoints' weights are damaged, or too large for "
            "this --dtype; download them again, or choose another --dtype"
        )
