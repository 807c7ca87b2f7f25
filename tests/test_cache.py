"""The slab against plain lists of rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.bundle import Graph, Port
from runtime.cache import Slab


def slab(layers: int, kv_heads: int, capacity: int, head_dim: int) -> Slab:
    ports = [
        Port(f"past_{part}.{i}", "float32", (1, kv_heads, capacity, head_dim))
        for i in range(layers)
        for part in ("key", "value")
    ]
    return Slab(Graph("x", (Port("tokens", "int64", ("rows",)), *ports), ()))


@given(st.data())
def test_keeping_paths_equals_a_list(data: st.DataObject) -> None:
    """Whatever is written and whichever rows are kept, the cache holds what a list of kept rows holds."""
    layers, heads, capacity, dim = (data.draw(st.integers(1, n)) for n in (3, 3, 40, 4))
    cache, kept, stamp = slab(layers, heads, capacity, dim), [], 0.0
    while len(kept) < capacity and data.draw(st.booleans()):
        rows = data.draw(st.integers(1, min(9, capacity - len(kept))))
        start = int(cache.length[0])
        written = []
        for row in range(rows):
            stamp += 1
            value = stamp + np.arange(layers * 2 * heads * dim, dtype=np.float32).reshape(layers, 2, heads, dim) / 1000
            cache.data[:, :, :, start + row] = value
            written.append(value)
        path = sorted(data.draw(st.sets(st.integers(1, rows - 1))) if rows > 1 else set())
        cache.keep([0, *path])
        kept += [written[row] for row in [0, *path]]
    assert int(cache.length[0]) == len(kept)
    for position, value in enumerate(kept):
        np.testing.assert_array_equal(cache.data[:, :, :, position], value)


def test_ports_are_views_of_one_slab() -> None:
    cache = slab(2, 3, 8, 4)
    assert set(cache.ports) == {f"{t}_{p}.{i}" for t in ("past", "present") for p in ("key", "value") for i in (0, 1)} | {
        "past_length"
    }
    cache.ports["past_value.1"][0, 2, 5] = 7
    assert (cache.data[1, 1, 2, 5] == 7).all()
    assert cache.ports["present_value.1"].ctypes.data == cache.ports["past_value.1"].ctypes.data
