"""Packed weights hold what went in: aligned, converted exactly, and every content once."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exporter.weights.packer import ALIGNMENT, Packer
from exporter.weights.source import Location, Source
from tests import peak

PAGE = 4096


def source(tensor: Tensor, pieces: int = 1, exact: bool = False) -> Source:
    return Source(tuple(tensor.shape), lambda: iter(tensor.chunk(pieces)), torch.float32 if exact else None)


def packer(folder: Path, dtype: torch.dtype = torch.float32) -> Packer:
    return Packer(folder, dtype, lambda _: None)


def stored(folder: Path, place: Location) -> bytes:
    """The bytes on disk, read with nothing of the packer's."""
    return (folder / place.file).read_bytes()[place.offset : place.offset + place.length]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_alignment_and_order(tmp_path: Path) -> None:
    assert ALIGNMENT == PAGE
    tensors = {f"t{i}": numbers(size, seed=i) for i, size in enumerate((1, 1023, 1024, 1025, 3000, 7))}
    places = packer(tmp_path).pack("weights/target.bin", {n: source(t) for n, t in tensors.items()})
    offset = 0
    for name, tensor in tensors.items():
        place = places[name]
        assert (place.file, place.offset, place.length) == ("weights/target.bin", offset, 4 * tensor.numel())
        assert (place.shape, place.dtype) == (tuple(tensor.shape), torch.float32)
        offset += -(-place.length // PAGE) * PAGE
    data = (tmp_path / "weights/target.bin").read_bytes()
    assert len(data) == offset
    for place in places.values():
        end = place.offset + place.length
        assert set(data[end : -(-end // PAGE) * PAGE]) <= {0}


@pytest.mark.parametrize("stored_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pieces", [1, 3])
def test_values_are_widened_exactly(tmp_path: Path, stored_dtype: torch.dtype, pieces: int) -> None:
    tensor = numbers(33, 17).to(stored_dtype)
    tensor[0, :4] = torch.tensor([0.0, -0.0, torch.finfo(stored_dtype).max, torch.finfo(stored_dtype).tiny])
    tensor[1, 0] = torch.finfo(stored_dtype).smallest_normal / 4  # a subnormal
    place = packer(tmp_path).pack("w.bin", {"t": source(tensor, pieces)})["t"]
    # By hand: bf16 is the upper half of an fp32; numpy widens the others.
    if stored_dtype == torch.bfloat16:
        expected = (tensor.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) << 16).tobytes()
    else:
        expected = tensor.numpy().astype(np.float32).tobytes()
    assert stored(tmp_path, place) == expected
    assert torch.equal(place.mapped(tmp_path), tensor.float())


@pytest.mark.parametrize("stored_dtype", [torch.float16, torch.float32], ids=str)
def test_values_are_rounded_to_the_bundles_dtype(tmp_path: Path, stored_dtype: torch.dtype) -> None:
    tensor = numbers(33, 17).to(stored_dtype)
    place = packer(tmp_path, torch.float16).pack("w.bin", {"t": source(tensor)})["t"]
    assert stored(tmp_path, place) == tensor.numpy().astype(np.float16).tobytes()
    assert place.dtype == torch.float16


def test_exact_tensors_keep_fp32(tmp_path: Path) -> None:
    table = numbers(5, 3)
    exact = source(table, exact=True)
    place = packer(tmp_path, torch.float16).pack("w.bin", {"rotary.cos": exact, "other": source(table)})["rotary.cos"]
    assert place.dtype == torch.float32
    assert stored(tmp_path, place) == table.numpy().tobytes()
    assert exact.nbytes(torch.float16) == place.length == 60
    assert source(table).nbytes(torch.float16) == 30


def test_a_transposed_view_is_stored_as_it_reads(tmp_path: Path) -> None:
    tensor = numbers(6, 4)
    place = packer(tmp_path).pack("w.bin", {"t": source(tensor.T)})["t"]
    expected = b"".join(np.float32(tensor[j, i]).tobytes() for i in range(4) for j in range(6))
    assert stored(tmp_path, place) == expected
    assert torch.equal(place.mapped(tmp_path), tensor.T)


def test_equal_tensors_are_stored_once_within_and_across_files(tmp_path: Path) -> None:
    a, b = numbers(2000), numbers(2000, seed=1)
    p = packer(tmp_path)
    target = p.pack("weights/target.bin", {"a": source(a), "again": source(a, 3), "b": source(b), "last": source(a)})
    draft = p.pack("weights/draft.bin", {"c": source(b.clone()), "own": source(a + b), "d": source(a.clone())})
    assert target["a"] == target["again"] == target["last"] == draft["d"]
    assert target["b"] == draft["c"]
    assert target["b"].file == "weights/target.bin"
    assert target["a"].offset != target["b"].offset
    assert draft["own"].offset == 0
    assert [(tmp_path / f"weights/{n}.bin").stat().st_size for n in ("target", "draft")] == [2 * 8192, 8192]
    assert torch.equal(draft["own"].mapped(tmp_path), a + b)


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    """As a tied pair gives them: one source under two names in each file."""
    tied = source(numbers(61, 16))
    p = packer(tmp_path)
    target = p.pack(
        "target.bin", {"embed_tokens.weight": tied, "norm.weight": source(numbers(16)), "lm_head.weight": tied}
    )
    draft = p.pack("draft.bin", {"embed_tokens.weight": tied, "lm_head.weight": tied})
    assert len({target["embed_tokens.weight"], target["lm_head.weight"], *draft.values()}) == 1
    assert (tmp_path / "draft.bin").stat().st_size == 0
    assert (p.hashes["draft.bin"].size, p.hashes["draft.bin"].sha256) == (0, hashlib.sha256().hexdigest())


def test_equal_after_conversion_is_equal(tmp_path: Path) -> None:
    """A drafter's fp16 copy of an embedding that fp16 holds exactly."""
    half = numbers(40, 8).half()
    places = packer(tmp_path).pack("w.bin", {"target": source(half.float()), "draft": source(half)})
    assert places["target"] == places["draft"]


def test_equal_bytes_of_another_shape_keep_their_shape(tmp_path: Path) -> None:
    tensor = numbers(6, 4)
    places = packer(tmp_path).pack("w.bin", {"a": source(tensor), "b": source(tensor.reshape(2, 12))})
    assert places["a"].offset == places["b"].offset
    assert (places["a"].shape, places["b"].shape) == ((6, 4), (2, 12))
    assert torch.equal(places["b"].mapped(tmp_path), tensor.reshape(2, 12))


def test_equal_bytes_of_another_type_are_not_shared(tmp_path: Path) -> None:
    """Two fp16 numbers may have the bytes of one fp32."""
    wide = torch.tensor([1.5, -2.25])
    halves = wide.view(torch.float16)
    places = packer(tmp_path, torch.float16).pack("w.bin", {"table": source(wide, exact=True), "t": source(halves)})
    assert places["table"].offset != places["t"].offset
    assert places["t"].dtype == torch.float16
    assert torch.equal(places["t"].mapped(tmp_path), halves)


def test_slices_are_read_one_at_a_time_and_progress_is_told(tmp_path: Path) -> None:
    told: list[int] = []
    read: list[int] = []

    def slices() -> Iterator[Tensor]:
        for i in range(5):
            assert sum(told) == 40 * i, "a slice was asked for before the last one was dealt with"
            read.append(i)
            yield numbers(10, seed=i)

    Packer(tmp_path, torch.float32, told.append).pack("w.bin", {"t": Source((50,), slices)})
    assert (read, told) == ([0, 1, 2, 3, 4], [40] * 5)


def test_mapping_leaves_the_file_alone(tmp_path: Path) -> None:
    place = packer(tmp_path).pack("w.bin", {"t": source(numbers(10))})["t"]
    before = stored(tmp_path, place)
    place.mapped(tmp_path).zero_()
    assert stored(tmp_path, place) == before
    assert any(before)


def tensors() -> st.SearchStrategy[list[Any]]:
    """Lists of (which of few contents, pieces, dtype), so that equal ones are common; a break starts the next file."""
    one = st.tuples(
        st.integers(0, 4), st.integers(1, 3), st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
    )
    return st.lists(st.one_of(one, st.none()), min_size=1, max_size=14)


@settings(max_examples=60)
@given(tensors())
def test_any_list_of_tensors(items: list[Any]) -> None:
    contents = [
        numbers(*shape, seed=i).bfloat16().float() for i, shape in enumerate([(1,), (3, 5), (1024,), (1025,), (40, 40)])
    ]
    files: list[dict[str, Tensor]] = [{}]
    pieces: dict[str, int] = {}
    for i, item in enumerate(items):
        if item is None:
            files.append({})
        else:
            files[-1][f"t{i}"] = contents[item[0]].to(item[2])
            pieces[f"t{i}"] = item[1]
    with TemporaryDirectory() as name:
        folder = Path(name)
        p = packer(folder)
        places: dict[str, Location] = {}
        for i, content in enumerate(files):
            places |= p.pack(f"weights/{i}.bin", {n: source(t, pieces[n]) for n, t in content.items()})

        by_content: dict[bytes, set[tuple[str, int]]] = {}
        for n, tensor in (item for content in files for item in content.items()):
            wide = tensor.float().numpy().tobytes()
            assert stored(folder, places[n]) == wide
            assert torch.equal(places[n].mapped(folder), tensor.float())
            assert places[n].offset % PAGE == 0
            by_content.setdefault(wide, set()).add((places[n].file, places[n].offset))
        assert all(len(where) == 1 for where in by_content.values())
        assert len(set().union(*by_content.values())) == len(by_content) if by_content else True

        sizes = 0
        for i in range(len(files)):
            data = (folder / f"weights/{i}.bin").read_bytes()
            noted = p.hashes[f"weights/{i}.bin"]
            assert (noted.size, noted.sha256) == (len(data), hashlib.sha256(data).hexdigest())
            sizes += len(data)
        assert sizes == sum(-(-len(content) // PAGE) * PAGE for content in by_content)


@pytest.mark.exhaustive
def test_equal_tensors_are_found_in_little_memory(tmp_path: Path) -> None:
    """Compared with what is on disk, of which no more than a slice is held."""
    code = """
import torch
from pathlib import Path
from exporter.weights.packer import Packer
from exporter.weights.source import Source
slices = lambda: (torch.full((1 << 20,), float(i)) for i in range(1, 65))
packer = Packer(Path(sys.argv[1]), torch.float32, lambda written: None)
packer.pack("weights/first.bin", {"a": Source((64 << 20,), slices)})
before = peak()
print(packer.pack("weights/second.bin", {"b": Source((64 << 20,), slices)})["b"].file, peak() - before)
"""
    file, grown = peak.printed(code, tmp_path).split()
    assert file == "weights/first.bin"
    assert int(grown) < 64 << 10  # KiB, of 256 MiB


@pytest.mark.parametrize("bits", [pytest.param(4, marks=pytest.mark.exhaustive), 8])
def test_products_of_codes_take_little_memory(tmp_path: Path, bits: int) -> None:
    """Of a golden run, as wide as those with an lm_head: a result a worker, and slices."""
    code = """
import torch
from pathlib import Path
from exporter.writing import golden_recorder as golden
from exporter.weights.packer import Packer
from exporter.weights.quantize import quantized
from exporter.weights.source import Source
from graphs.dialects.quantization import Scheme, dequantize
folder, bits = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(2)
scheme = Scheme(32, torch.uint8) if bits == 4 else Scheme(0, torch.int8, 8)
wide = torch.randn(1 << 17, 256, generator=torch.Generator().manual_seed(0))
sources = quantized(Source(wide.shape, lambda: iter(wide.split(1 << 12))), "a.weight", scheme, torch.float32)
places = Packer(folder, torch.float32, lambda written: None).pack("weights/target.bin", sources)
module, x = torch.nn.Module(), torch.randn(20, 256)
for name in ("weight", "scale"):
    meta = torch.empty_like(places[f"a.{name}"].mapped(folder), device="meta")
    module.register_parameter(name, torch.nn.Parameter(meta, requires_grad=False))
with torch.inference_mode(), golden.weights(folder) as weights:
    weights.fill(module, {name: places[f"a.{name}"] for name in ("weight", "scale")})
    before = peak()
    made = weights.product(x, module.weight, module.scale)
    grown = peak() - before
expected = x @ dequantize(module.weight, module.scale).T
print(float((made - expected).abs().max() / expected.abs().max()), grown)
"""
    error, grown = peak.printed(code, tmp_path, bits).split()
    assert float(error) < 1e-5
    assert int(grown) < 100 << 10  # KiB, of 128 MiB; a result has 10 MiB
