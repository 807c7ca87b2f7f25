"""The slabs against plain lists of rows, grown in place and by appending, on the host and on an accelerator."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.bundle.graphs import BLOCK, Graph, TensorSpec
from runtime.decoding.kv_cache import KVCache
from runtime.engines.devices import Device, Host
from tests.accelerator import Lazy

ROWS = 9


def graph(
    name: str,
    layers: int,
    kv_heads: int,
    capacity: int | str,
    head_dim: int,
    rows: int | None = None,
    parts: int = 1,
) -> Graph:
    """rows: of an appending graph, None for one that writes in place. parts: of values."""

    def tensors(prefix: str, positions: int | str) -> list[TensorSpec]:
        shapes = {
            "key": (1, kv_heads, positions, head_dim),
            "value": (1, kv_heads * parts, positions, head_dim // parts),
        }
        return [
            TensorSpec(f"{prefix}_{part}.{i}", "float32", shape)
            for i in range(layers)
            for part, shape in shapes.items()
        ]

    written = tensors("new", rows) if rows else tensors("present", capacity)
    return Graph(
        name, 0, 0, "float32", (TensorSpec("tokens", "int64", ("rows",)), *tensors("past", capacity)), tuple(written)
    )


def cached(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    """[heads, n, d], with the heads split by columns as those of a cache [1, heads or parts, S, columns]."""
    columns = like.shape[3]
    return np.concatenate(
        [head[None, :, at : at + columns] for head in values for at in range(0, values.shape[2], columns)]
    )


def write(device: Device, array: object, values: np.ndarray) -> None:
    """What an engine does to its output."""
    if isinstance(device, Lazy):
        device.copy(array.address, values.ctypes.data, values.nbytes)  # type: ignore[attr-defined]
        device.synchronize()
    else:
        array[...] = values  # type: ignore[index]


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("make", [Host, Lazy])
@given(st.data())
def test_keeping_paths_equals_a_list(make: type[Host | Lazy], appends: bool, data: st.DataObject) -> None:
    """Whatever is written and whichever rows are kept, the caches hold what a list of kept rows holds."""
    layers, heads, capacity, parts, columns = (data.draw(st.integers(1, n)) for n in (3, 3, 40, 3, 4))
    device, kept, stamp, dim = make(), [], 0, parts * columns
    # Two graphs share the cache; each pass is made by either.
    graphs = [
        graph(name, layers, heads, capacity, dim, rows if appends else None, parts)
        for name, rows in (("a", ROWS), ("b", 4))
    ]
    cache = KVCache(device, *graphs)
    names = [tensor.name for tensor in graphs[0].caches]
    while len(kept) < capacity and data.draw(st.booleans()):
        which = data.draw(st.integers(0, 1))
        rows = data.draw(st.integers(1, min((ROWS, 4)[which], capacity - len(kept))))
        start, tensors = int(cache.length[0]), cache.bindings(graphs[which])
        shape = (len(names), heads, rows, dim)
        values = np.arange(stamp, stamp + np.prod(shape), dtype=np.float32).reshape(shape)
        stamp += values.size
        for i, name in enumerate(names):
            written = tensors[name.replace("past", "new" if appends else "present")]
            whole = device.read(written).copy()
            first = 0 if appends else start
            whole[0, :, first : first + rows] = cached(values[i], whole)
            write(device, written, whole)
        path = sorted(data.draw(st.sets(st.integers(1, rows - 1))) if rows > 1 else set())
        cache.commit(graphs[which], [0, *path])
        kept += [values[:, :, row] for row in [0, *path]]
    assert int(cache.length[0]) == len(kept)
    for i, name in enumerate(names):
        held = device.read(cache.bindings(graphs[0])[name])
        for position, row in enumerate(kept):
            np.testing.assert_array_equal(held[0, :, position], cached(row[i][:, None], held)[:, 0])
    rows = cache.rows(len(kept))
    assert rows.shape == (len(names) * heads, len(kept), dim)
    for position, row in enumerate(kept):
        np.testing.assert_array_equal(rows[:, position], row.reshape(-1, dim))
    other = KVCache(device, *graphs)
    other.fill(rows)
    np.testing.assert_array_equal(other.rows(len(kept)), rows)
    np.testing.assert_array_equal(
        device.read(other.bindings(graphs[0])[names[1]])[:, :, : len(kept)],
        device.read(cache.bindings(graphs[0])[names[1]])[:, :, : len(kept)],
    )


@given(st.data())
def test_caches_of_any_length_keep_what_fits(data: st.DataObject) -> None:
    """Whatever is asked for, in whatever order: positions stay where they were, and what is read beside them stays
    little."""
    layers, heads, columns, parts = (data.draw(st.integers(1, 3)) for _ in range(4))
    capacity, dim = data.draw(st.integers(1, 40 * BLOCK)), columns * parts
    spec = graph("x", layers, heads, "positions", dim, parts=parts)
    cache, kept = KVCache(Host(), spec, capacity=capacity), np.zeros((layers * 2 * heads, 0, dim), np.float32)
    assert cache.capacity == -(-capacity // BLOCK) * BLOCK
    assert spec.cache_bytes(capacity) == cache.capacity * layers * 2 * heads * dim * 4
    for stamp in range(1, data.draw(st.integers(2, 12))):
        wanted = data.draw(st.integers(1, capacity))
        kept = kept[:, :wanted]
        cache.length[0] = kept.shape[1]
        moves, before = cache.moves, cache.slabs
        cache.fit(wanted)
        positions = cache.slabs[0].shape[1]
        assert {slab.shape[1] for slab in cache.slabs} == {positions}
        assert positions % BLOCK == 0
        assert wanted <= positions <= min(cache.capacity, 2 * (wanted + 2 * BLOCK))
        assert (cache.moves == moves) == (cache.slabs is before)
        np.testing.assert_array_equal(cache.rows(kept.shape[1]), kept)
        new = (
            np.full((kept.shape[0], wanted - kept.shape[1], dim), stamp, np.float32)
            + np.arange(len(kept))[:, None, None]
        )
        kept = np.concatenate((kept, new), axis=1)
        for i, tensor in enumerate(spec.caches):
            view = cache.bindings(spec)[tensor.name]
            assert view.flags.c_contiguous
            view[0, :, :wanted] = cached(kept[i * heads : (i + 1) * heads], view)
        for i, tensor in enumerate(spec.caches):
            view = cache.bindings(spec)[tensor.name]
            np.testing.assert_array_equal(view[0, :, :wanted], cached(kept[i * heads : (i + 1) * heads], view))
            assert view.ctypes.data == cache.bindings(spec)[tensor.name.replace("past", "present")].ctypes.data


@pytest.mark.parametrize("make", [Host, Lazy])
def test_caches_of_one_length_stay(make: type[Host | Lazy]) -> None:
    cache = KVCache(make(), graph("x", 1, 2, 8, 4))
    slabs = cache.slabs
    for positions in (1, 8, 204):
        cache.fit(positions)
        assert cache.slabs is slabs
        assert not cache.moves


def test_ports_are_views_of_one_slab() -> None:
    one = graph("x", 2, 3, 8, 4)
    cache = KVCache(Host(), one)
    tensors = cache.bindings(one)
    names = {f"{t}_{p}.{i}" for t in ("past", "present") for p in ("key", "value") for i in (0, 1)}
    assert set(tensors) == names | {"past_length"}
    tensors["past_value.1"][0, 2, 5] = 7
    assert (cache.slabs[0].reshape(2, 2, 3, 8, 4)[1, 1, 2, 5] == 7).all()
    assert tensors["present_value.1"].ctypes.data == tensors["past_value.1"].ctypes.data
