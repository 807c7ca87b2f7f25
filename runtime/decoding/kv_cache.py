"""The KV cache of one model, and how it keeps the rows of an accepted path."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..bundle.manifest import Graph
from ..devices import Array, Device
from ..errors import DamageError


class KVCache:
    """Keys and values by position, in one contiguous array [layers, 2, kv heads, S, d].

    A graph either writes its new rows into the cache, after ``length``, or returns them in a buffer of its own. ``commit``
    keeps some of them. A cache that no graph uses is empty and stays so.

    data: the array, as [layers * 2 * kv heads, S, d]. length: int64 [1] on the host, the positions filled so far; the graphs'
    ``past_length`` is bound to it.
    """

    def __init__(self, device: Device, *graphs: Graph, dtype: str = "float32") -> None:
        """graphs: those that share the cache, if any. dtype: of an empty cache; others have that of their graphs."""
        tensors = graphs[0].caches if graphs else ()
        _, self._kv_heads, self.capacity, self.head_dim = (int(n) for n in tensors[0].shape) if tensors else (1, 0, 0, 0)
        self._device, self._groups = device, len(tensors) * self._kv_heads
        self._dtype = tensors[0].dtype if tensors else dtype
        self.length = np.zeros(1, np.int64)
        self.data, views = self._allocate(len(tensors), self.capacity)
        past = {tensor.name: view for tensor, view in zip(tensors, views, strict=True)}
        self._bindings: dict[str, dict[str, Array]] = {}
        self._new_rows: dict[str, Array] = {}  # where each graph leaves its rows, [layers * 2 * kv heads, n, d]
        for graph in graphs:
            if graph.appends:
                self._new_rows[graph.file], views = self._allocate(len(tensors), int(graph.fresh[0].shape[2]))
                written = {tensor.name: view for tensor, view in zip(graph.fresh, views, strict=True)}
            else:
                self._new_rows[graph.file] = self.data
                written = {name.replace("past", "present"): view for name, view in past.items()}
            self._bindings[graph.file] = past | written | {"past_length": self.length}

    def _allocate(self, caches: int, positions: int) -> tuple[Array, list[Array]]:
        data = self._device.zeros((self._groups, positions, self.head_dim), self._dtype)
        whole = data.reshape(caches, 1, self._kv_heads, positions, self.head_dim)
        return data, [whole[i] for i in range(caches)]

    def bindings(self, graph: Graph) -> Mapping[str, Array]:
        """The buffers of a graph's cache inputs and outputs."""
        return self._bindings[graph.file]

    def commit(self, graph: Graph, path: Sequence[int]) -> None:
        """Appends the rows of a path to the cache, in the path's order. path: rows of the graph's last pass.

        ``path[i] >= i``, so copying in order never overwrites a row that is still needed.
        """
        start, new_rows = int(self.length[0]), self._new_rows[graph.file]
        first = 0 if graph.appends else start
        for at, row, count in runs(path, graph.appends):
            if graph.appends or row != at:
                self._device.move(self.data, start + at, new_rows, first + row, count)
        self.length[0] = start + len(path)

    def fill_garbage(self) -> None:
        """Fills the cache with random numbers. No graph's output may depend on them: it attends to positions below ``length``
        only."""
        views = [
            view
            for name, view in next(iter(self._bindings.values())).items()
            if name.startswith("past_") and view is not self.length
        ]
        garbage = np.random.default_rng(0).uniform(-30, 30, views[0].shape).astype(self._dtype)
        for view in views:
            self._device.write(view, garbage)

    def rows(self, count: int) -> np.ndarray:
        """A copy of the first ``count`` positions, [layers * 2 * kv heads, count, d]."""
        return self._device.read(self.data)[:, :count].copy()

    def fill(self, rows: np.ndarray) -> None:
        """Replaces the content by ``rows``, as the method of that name returns them. Raises DamageError if their dtype or shape
        does not fit the cache."""
        content = np.zeros(self.data.shape, self._dtype)
        if rows.dtype != content.dtype or rows.shape[::2] != content.shape[::2] or rows.shape[1] > content.shape[1]:
            raise DamageError(
                f"saved rows {rows.dtype} {rows.shape} do not fit the cache {content.dtype} {content.shape}: save them again"
            )
        content[:, : rows.shape[1]] = rows
        self._device.write(self.data, content)
        self.length[0] = rows.shape[1]


def runs(path: Sequence[int], separate: bool) -> Iterator[tuple[int, int, int]]:
    """Splits a path into runs of consecutive rows, which one copy can move: index in the path, first row, number of rows.

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
