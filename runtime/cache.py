"""The KV slab, and what it means to keep a path."""

from collections.abc import Sequence

import numpy as np

from .bundle import Graph


class Slab:
    """The key-value cache of one model: one contiguous array [layers, 2, kv heads, S, d] that graphs write in place.

    ``length`` is int64 [1], the positions filled so far; it is itself bound to the graphs' ``past_length``.
    """

    def __init__(self, graph: Graph) -> None:
        ports = graph.caches
        _, kv_heads, capacity, head_dim = (int(n) for n in ports[0].shape)
        self.capacity = capacity
        self.data = np.zeros((len(ports) // 2, 2, kv_heads, capacity, head_dim), ports[0].dtype)
        self.length = np.zeros(1, np.int64)
        self._rows = self.data.reshape(-1, capacity, head_dim)
        views = [self.data[layer, part][None] for layer in range(len(ports) // 2) for part in range(2)]
        self.ports = {port.name: view for port, view in zip(ports, views, strict=True)}
        self.ports |= {name.replace("past", "present"): view for name, view in self.ports.items()}
        self.ports["past_length"] = self.length

    def keep(self, path: Sequence[int]) -> None:
        """Of the rows just written behind ``length``, keeps those of the path, in its order, and counts them.

        ``path[i] >= i``, so copying in order never overwrites a row that is still needed.
        """
        start = int(self.length[0])
        for i, row in enumerate(path):
            if row != i:
                self._rows[:, start + i] = self._rows[:, start + row]
        self.length[0] = start + len(path)
