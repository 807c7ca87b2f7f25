"""NVIDIA's own parser over the graphs that are written for TensorRT: that of TensorRT for RTX needs no GPU."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from exporter.writing import bundle as writing
from runtime.backends.tensorrt_compile import parse
from runtime.backends.tensorrt_library import Library

try:
    import tensorrt_rtx_bindings as trt
except ImportError:
    trt = None  # type: ignore[assignment]

MISSING = "TensorRT for RTX is not installed: it has packages for Linux on x86-64 only"


class Rtx:
    """The library, with the logger that a process has once."""

    @cached_property
    def library(self) -> Library:
        return Library(trt, "TensorRT for RTX")

    def network(self, file: Path) -> Any:
        """The network of a graph of a bundle. Raises GumihoError if it does not parse."""
        return parse(self.library, trt.Builder(self.library.log), file)

    def layers(self, file: Path) -> Counter[str]:
        """How many layers of each type a graph becomes."""
        network = self.network(file)
        return Counter(network.get_layer(i).type.name for i in range(network.num_layers))


RTX = Rtx()


@contextmanager
def every_graph_is_parsed() -> Iterator[None]:
    """Within the block, an export fails that writes a graph for TensorRT which does not parse."""
    if trt is None:
        yield
        return
    form, seen = writing._form, set[bytes]()

    def checked(recipe: Any, backend: str, locations: Any, folder: Path, progress: Any) -> Any:
        made = form(recipe, backend, locations, folder, progress)
        if backend.startswith("tensorrt"):
            for file in {graph.file for graphs in made.variants().values() for graph in graphs.values()}:
                digest = hashlib.sha256((folder / file).read_bytes()).digest()
                if digest not in seen:
                    RTX.network(folder / file)
                    seen.add(digest)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_form", checked)
        yield
