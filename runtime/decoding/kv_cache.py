"""The KV cache of one model, and how it keeps the rows of an accepted path."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..bundle.graphs import BLOCK, Graph
from ..engines.devices import Array, Device
from ..errors import DamageError


class KVCache:
    """Keys and values by position, in one contiguous array [layers, 2, kv heads, S, d].

    A graph either writes its new rows into the cache, after ``length``, or returns them in a buffer of its own.
    ``commit`` keeps some of them. A cache that no graph uses is empty and stays so.

    data: the array, as [layers * 2 * kv heads, S, d]. moves: how often it has been laid out anew; calls that were bound
    before must be bound again. length: int64 [1] on the host, the positions filled so far; the graphs' ``past_length``
    is bound to it.
    """

    def __init__(self, device: Device, *graphs: Graph, capacity: int = 0, dtype: str = "float32") -> None:
        """graphs: those that share the cache, if any. capacity: of the bundle, which counts if the graphs take caches
        of any length. dtype: of an empty cache; others have that of their graphs."""
        tensors = graphs[0].caches if graphs else ()
        self._kv_heads, self.head_dim = (int(tensors[0].shape[i]) for i in (1, 3)) if tensors else (0, 0)
        self.capacity = graphs[0].cache_positions(capacity) if graphs else 0  # without tensors it only counts tokens
        self._device, self._graphs, self._groups = device, graphs, len(tensors) * self._kv_heads
        self._dtype = tensors[0].dtype if tensors else dtype
        self.length = np.zeros(1, np.int64)
        self.moves = 0
        self._slab = device.zeros((self._groups, self.capacity, self.head_dim), self._dtype)
        # Where each appending graph leaves its rows, [layers * 2 * kv heads, n, d].
        self._new_rows: dict[tuple[str, int | str], Array] = {}
        for graph in graphs:
            if graph.appends:
                shape = self._groups, int(graph.fresh[0].shape[2]), self.head_dim
                self._new_rows[graph.sized] = device.zeros(shape, self._dtype)
        self._open = bool(graphs) and graphs[0].open_caches
        self._lay_out(BLOCK if self._open else self.capacity)

    def _lay_out(self, positions: int) -> None:
        """Makes ``data`` the first bytes of the slab, with so many positions, and binds the graphs to it."""
        whole = self._slab
        if positions < self.capacity:
            whole = whole.reshape(-1)[: self._groups * positions * self.head_dim]
        self.data = whole.reshape(self._groups, positions, self.head_dim)
        self._bindings: dict[tuple[str, int | str], dict[str, Array]] = {}
        for graph in self._graphs:
            past = dict(zip((tensor.name for tensor in graph.caches), self._views(self.data), strict=True))
            if graph.appends:
                views = self._views(self._new_rows[graph.sized])
                written = {tensor.name: view for tensor, view in zip(graph.fresh, views, strict=True)}
            else:
                written = {name.replace("past", "present"): view for name, view in past.items()}
            self._bindings[graph.sized] = past | written | {"past_length": self.length}

    def _views(self, data: Array) -> list[Array]:
        count = self._groups // max(1, self._kv_heads)
        caches = data.reshape(count, 1, self._kv_heads, data.shape[1], self.head_dim)
        return [caches[i] for i in range(count)]

    def fit(self, positions: int) -> None:
        """Has the caches hold so many positions, rounded up to whole blocks, if the graphs take caches of any length
        (on the host only).

        They grow by an eighth or more at a time. Since a pass reads all of them, they become smaller once less than
        half is wanted. Filled positions stay as far as they fit.
        """
        old, have = self.data, self.data.shape[1]
        if not self._open:
            return
        if positions > have:
            positions = max(positions, have + have // 8)
        elif 2 * (positions + BLOCK) > have:
            return
        self._lay_out(min(self.capacity, -(-positions // BLOCK) * BLOCK))
        wider = self.data.shape[1] > have
        kept = min(int(self.length[0]), have, self.data.shape[1])
        groups = range(self._groups)
        # in an order in which none overwrites one that is still to move
        for group in reversed(groups) if wider else groups:
            self.data[group, :kept] = old[group, :kept].copy()
        self.moves += 1

    def bindings(self, graph: Graph) -> Mapping[str, Array]:
        """The buffers of a graph's cache inputs and outputs."""
        return self._bindings[graph.sized]

    def commit(self, graph: Graph, path: Sequence[int]) -> None:
        """Appends the rows of a path to the cache, in the path's order. path: rows of the graph's last pass.

        ``path[i] >= i``, so copying in order never overwrites a row that is still needed.
        """
        start, new_rows = int(self.length[0]), self._new_rows.get(graph.sized, self.data)
        first = 0 if graph.appends else start
        for at, row, count in runs(path, graph.appends):
            if graph.appends or row != at:
                self._device.move(self.data, start + at, new_rows, first + row, count)
        self.length[0] = start + len(path)

    def wipe(self, begin: int) -> None:
        """Zeroes the positions from ``begin`` on, which may hold NaN, if the graphs take caches of any length: they
        read whole blocks and give positions that are not filled the weight 0, and 0 times NaN is NaN."""
        if self._open:
            self.data[:, begin:] = 0

    def fill_garbage(self) -> None:
        """Fills the cache with random numbers. No graph's output may depend on them: it attends to positions below
        ``length`` only."""
        views = self._views(self.data)
        if not views:
            return
        garbage = np.random.default_rng(0).uniform(-30, 30, views[0].shape).astype(self._dtype)
        for view in views:
            self._device.write(view, garbage)

    def rows(self, count: int) -> np.ndarray:
        """A copy of the first ``count`` positions, [layers * 2 * kv heads, count, d]."""
        return self._device.read(self.data)[:, :count].copy()

    def fill(self, rows: np.ndarray) -> None:
        """Replaces the content by ``rows``, as the method of that name returns them. Raises DamageError if their dtype
        or shape does not fit the cache."""
        most = self._groups, self.capacity, self.head_dim
        if rows.dtype != self._dtype or rows.shape[::2] != most[::2] or rows.shape[1] > self.capacity:
            raise DamageError(
                f"saved rows {rows.dtype} {rows.shape} do not fit the cache {self._dtype} {most}: save them again"
            )
        self.fit(max(1, rows.shape[1]))
        content = np.zeros(self.data.shape, self._dtype)
        content[:, : rows.shape[1]] = rows
        self._device.write(self.data, content)
        self.length[0] = rows.shape[1]


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
