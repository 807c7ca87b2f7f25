"""The KV cache of one model, and how it keeps the rows of an accepted path."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..bundle.graphs import BLOCK, Graph
from ..engines.devices import Array, Device
from ..errors import DamageError


class KVCache:
    """Keys and values by position. Those of all layers are one contiguous slab, [layers * 2 * kv heads, S, d], or one
    of keys and one of values if a graph splits values by columns.

    A graph either writes its new rows into the cache, after ``length``, or returns them in a buffer of its own.
    ``commit`` keeps some of them. A cache that no graph uses is empty and stays so.

    slabs: the arrays, each [n, S, columns]. moves: how often they have been laid out anew; calls that were bound before
    must be bound again. length: int64 [1] on the host, the positions filled so far; the graphs' ``past_length`` is
    bound to it.
    """

    def __init__(self, device: Device, *graphs: Graph, capacity: int = 0, dtype: str = "float32") -> None:
        """graphs: those that share the cache, if any. capacity: of the bundle, which counts if the graphs take caches
        of any length. dtype: of an empty cache; others have that of their graphs."""
        tensors = graphs[0].caches if graphs else ()
        self.capacity = graphs[0].cache_positions(capacity) if graphs else 0  # without tensors it only counts tokens
        self._device, self._graphs = device, graphs
        self._dtype = tensors[0].dtype if tensors else dtype
        self._count = len(tensors)
        # Of the caches of each slab: heads or parts, and columns.
        self._shapes = list(dict.fromkeys((int(tensor.shape[1]), int(tensor.shape[3])) for tensor in tensors))
        self.length = np.zeros(1, np.int64)
        self.moves = 0
        self._whole = self._zeros(self.capacity)
        # Where each appending graph leaves its rows, as in ``slabs``.
        self._new_rows: dict[tuple[str, int | str], list[Array]] = {}
        for graph in graphs:
            if graph.appends:
                self._new_rows[graph.sized] = self._zeros(int(graph.fresh[0].shape[2]))
        self._open = bool(graphs) and graphs[0].open_caches
        self._lay_out(BLOCK if self._open else self.capacity)

    def _zeros(self, positions: int) -> list[Array]:
        """Slabs for so many positions."""
        caches = self._count // max(1, len(self._shapes))  # in each
        return [
            self._device.zeros((caches * heads, positions, columns), self._dtype) for heads, columns in self._shapes
        ]

    def _lay_out(self, positions: int) -> None:
        """Makes ``slabs`` the first bytes of the whole ones, with so many positions, and binds the graphs to them."""
        whole = positions >= self.capacity
        self.slabs = self._whole if whole else [_leading(slab, positions) for slab in self._whole]
        self._bindings: dict[tuple[str, int | str], dict[str, Array]] = {}
        for graph in self._graphs:
            past = dict(zip((tensor.name for tensor in graph.caches), self._views(self.slabs), strict=True))
            if graph.appends:
                views = self._views(self._new_rows[graph.sized])
                written = {tensor.name: view for tensor, view in zip(graph.fresh, views, strict=True)}
            else:
                written = {name.replace("past", "present"): view for name, view in past.items()}
            self._bindings[graph.sized] = past | written | {"past_length": self.length}

    def _views(self, slabs: Sequence[Any]) -> list[Any]:
        """The caches, key and value of each layer in turn, [1, heads or parts, n, columns] each."""
        apart = []
        for slab, (heads, columns) in zip(slabs, self._shapes, strict=True):
            count, positions = slab.shape[0] // heads, slab.shape[1]
            caches = slab.reshape(count, 1, heads, positions, columns)
            apart.append([caches[i] for i in range(count)])
        return [cache for layer in zip(*apart, strict=True) for cache in layer]

    def fit(self, positions: int) -> None:
        """Has the caches hold so many positions, rounded up to whole blocks, if the graphs take caches of any length
        (on the host only).

        They grow by an eighth or more at a time. Since a pass reads all of them, they become smaller once less than
        half is wanted. Filled positions stay as far as they fit.
        """
        if not self._open:
            return
        old, have = self.slabs, self.slabs[0].shape[1]
        if positions > have:
            positions = max(positions, have + have // 8)
        elif 2 * (positions + BLOCK) > have:
            return
        self._lay_out(min(self.capacity, -(-positions // BLOCK) * BLOCK))
        new = self.slabs[0].shape[1]
        kept = min(int(self.length[0]), have, new)
        for slab, before in zip(self.slabs, old, strict=True):
            groups = range(len(slab))
            # in an order in which none overwrites one that is still to move
            for group in reversed(groups) if new > have else groups:
                slab[group, :kept] = before[group, :kept].copy()
        self.moves += 1

    def bindings(self, graph: Graph) -> Mapping[str, Array]:
        """The buffers of a graph's cache inputs and outputs."""
        return self._bindings[graph.sized]

    def commit(self, graph: Graph, path: Sequence[int]) -> None:
        """Appends the rows of a path to the cache, in the path's order. path: rows of the graph's last pass.

        ``path[i] >= i``, so copying in order never overwrites a row that is still needed.
        """
        start, new_rows = int(self.length[0]), self._new_rows.get(graph.sized, self.slabs)
        first = 0 if graph.appends else start
        for at, row, count in runs(path, graph.appends):
            if graph.appends or row != at:
                for slab, new in zip(self.slabs, new_rows, strict=True):
                    self._device.move(slab, start + at, new, first + row, count)
        self.length[0] = start + len(path)

    def wipe(self, begin: int) -> None:
        """Zeroes the positions from ``begin`` on, which may hold NaN, if the graphs take caches of any length: they
        read whole blocks and give positions that are not filled the weight 0, and 0 times NaN is NaN."""
        if self._open:
            for slab in self.slabs:
                slab[:, begin:] = 0

    def fill_garbage(self) -> None:
        """Fills the cache with random numbers. No graph's output may depend on them: it attends to positions below
        ``length`` only."""
        draw = np.random.default_rng(0)
        for slab in self.slabs:
            self._device.write(slab, draw.uniform(-30, 30, slab.shape).astype(self._dtype))

    def rows(self, count: int) -> np.ndarray:
        """A copy of the first ``count`` positions, [layers * 2 * kv heads, count, d]."""
        kv_heads, d = self._heads
        found = np.empty((self._count * kv_heads, count, d), self._dtype)
        for own, view in zip(self._by_head(found), self._views([*map(self._device.read, self.slabs)]), strict=True):
            own[:] = view[0, :, :count].reshape(own.shape)
        return found

    def fill(self, rows: np.ndarray) -> None:
        """Replaces the content by ``rows``, as the method of that name returns them. Raises DamageError if their dtype
        or shape does not fit the cache."""
        kv_heads, d = self._heads
        most = self._count * kv_heads, self.capacity, d
        if rows.dtype != self._dtype or rows.shape[::2] != most[::2] or rows.shape[1] > self.capacity:
            raise DamageError(
                f"saved rows {rows.dtype} {rows.shape} do not fit the cache {self._dtype} {most}: save them again"
            )
        count = rows.shape[1]
        self.fit(max(1, count))
        content = [np.zeros(slab.shape, self._dtype) for slab in self.slabs]
        for own, view in zip(self._by_head(rows), self._views(content), strict=True):
            view[0, :, :count] = own.reshape(view[0, :, :count].shape)
        for slab, values in zip(self.slabs, content, strict=True):
            self._device.write(slab, values)
        self.length[0] = count

    @property
    def _heads(self) -> tuple[int, int]:
        """The number of kv heads and their size; keys are never split."""
        return self._shapes[0] if self._shapes else (0, 0)

    def _by_head(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """What ``rows`` returns, cache by cache, as views [kv heads, parts, count, columns]."""
        kv_heads, d = self._heads
        for i in range(self._count):
            _, columns = self._shapes[i % len(self._shapes)]
            own = rows[i * kv_heads : (i + 1) * kv_heads]
            yield own.reshape(*own.shape[:2], d // columns, columns).transpose(0, 2, 1, 3)


def _leading(slab: Any, positions: int) -> Any:
    """The first bytes of a slab, as one with so many positions."""
    count, _, columns = slab.shape
    return slab.reshape(-1)[: count * positions * columns].reshape(count, positions, columns)


def runs(path: Sequence[int], separate: bool) -> Iterator[tuple[int, int, int]]:
    """Splits a path into runs of consecutive rows, which one copy can move: index in the path, first row, number of
    rows.

    separate: whether rows are copied to other memory; if not, a run ends before the rows that its copy would overwrite.
    """
    at = 0
    while at < len(path):
        row, count = path[at], 1
        longest = len(path) - at if separate or row == at else min(len(path) - at, row - at)
        while count < longest and path[at + count] == row + count:
            count += 1
        yield at, row, count
        at += count
