"""Builds the plans of TensorRT and of TensorRT for RTX."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle.graphs import Graph
from ..bundle.reader import Bundle
from ..errors import GumihoError
from .tensorrt_library import Library, Progress

if TYPE_CHECKING:
    import tensorrt


def parse(library: Library, builder: "tensorrt.Builder", file: Path) -> "tensorrt.INetworkDefinition":
    """The network of a graph. file: the graph's, in a folder of the bundle; the paths of its weights are relative to
    the bundle. Raises GumihoError if the library cannot read it."""
    trt = library.trt
    # Strongly typed networks are the only ones of TensorRT 11 and of TensorRT for RTX, whose enumeration lacks it.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, library.log)
    # The parser takes the folder of this path for that of the weights, and maps them without copying.
    if not parser.parse(file.read_bytes(), str(file.parents[2] / file.name)):
        reason = parser.get_error(0).desc() if parser.num_errors else library.error
        raise GumihoError(f"{library.label} cannot read {file} ({reason}): try another version")
    return network


def build(
    library: Library,
    bundle: Bundle,
    graphs: Sequence[Graph],
    configure: Callable[["tensorrt.IBuilderConfig"], object],
    progress: Callable[[str], object],
    ranged: bool = False,
) -> bytes:
    """The plan of a graph.

    graphs: the sizes of one file; the plan has a profile for each of them, or if ``ranged`` one for all sizes from the
    smallest to the largest one. configure: sets what the two libraries do not have in common. progress: gets each step
    as text. Raises GumihoError if the library cannot read or build it.
    """
    trt, source = library.trt, bundle.path / graphs[0].file
    builder = trt.Builder(library.log)
    network = parse(library, builder, source)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    told = Progress(library, source.stem, progress)
    config.progress_monitor = told.monitor
    configure(config)
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    symbolic = {tensor.name for tensor in inputs if -1 in tuple(tensor.shape)}
    refused = f"{library.label} refuses sizes of {source}"
    by_size = sorted(graphs, key=lambda graph: int(graph.sized[1]))
    ranges = [(by_size[0], by_size[-1], by_size[-1])] if ranged else [(graph, graph, graph) for graph in graphs]
    for sizes in ranges if symbolic else ():
        profile = builder.create_optimization_profile()
        for tensors in zip(*(graph.inputs for graph in sizes), strict=True):
            if (name := tensors[0].name) in symbolic:
                try:
                    profile.set_shape(name, *(tuple(map(int, tensor.shape)) for tensor in tensors))
                except RuntimeError as error:
                    raise GumihoError(f"{refused} ({error}): try another version") from None
        if config.add_optimization_profile(profile) < 0:
            raise GumihoError(f"{refused} ({library.error}): try another version")
    with told.interruptible():
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise GumihoError(f"{library.label} cannot build {source} ({library.error}): try another version")
    return bytes(plan)
