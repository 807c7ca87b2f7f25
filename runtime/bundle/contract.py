"""What the tensors of a bundle's graphs must be: all of it follows from a few sizes, so a manifest that says otherwise is refused
before anything is allocated."""

from .manifest import Form, Graph, Manifest
from .records import Damage

Shape = tuple[int | str, ...]
Signature = list[tuple[str, str, Shape]]


def check(manifest: Manifest, form: Form, graphs: dict[str, Graph], at: str) -> None:
    """Raises Damage naming the first tensor that is not what the sizes make it. at: where the graphs stand."""
    drafters = [_caches(graphs[name], manifest) for name in ("draft", "extend")]
    if drafters[0] != drafters[1]:
        raise Damage(f"{at}: draft and extend have other caches, expected the same")
    for name, graph in graphs.items():
        inputs, outputs = _expected(manifest, form, name, _caches(graph, manifest), graph.appends)
        for found, expected, kind in ((graph.inputs, inputs, "input"), (graph.outputs, outputs, "output")):
            _compare([(tensor.name, tensor.dtype, tensor.shape) for tensor in found], expected, f"{at}.{name}: {kind}")


def _compare(found: Signature, expected: Signature, at: str) -> None:
    if len(found) != len(expected):
        raise Damage(f"{at}s are {len(found)}, expected {len(expected)}")
    for one, other in zip(found, expected, strict=True):
        if one != other:
            raise Damage(f"{at} is {one[0]} {one[1]} {list(one[2])}, expected {other[0]} {other[1]} {list(other[2])}")


def _caches(graph: Graph, manifest: Manifest) -> tuple[int, tuple[int, int, int]]:
    """Layers, and (kv heads, positions, head dim) of every cache."""
    shapes = [tensor.shape for tensor in graph.caches]
    if not shapes or len(shapes) % 2 or len(shapes[0]) != 4 or not all(isinstance(n, int) for n in shapes[0]):
        raise Damage(f"{graph.file} has no key and value cache of four static dimensions for every layer")
    _, kv_heads, positions, head_dim = (int(n) for n in shapes[0])
    if positions < manifest.capacity:
        raise Damage(f"{graph.file} has caches of {positions} positions, expected {manifest.capacity} or more")
    return len(shapes) // 2, (kv_heads, positions, head_dim)


def _expected(
    manifest: Manifest, form: Form, name: str, caches: tuple[int, tuple[int, int, int]], appends: bool
) -> tuple[Signature, Signature]:
    """Inputs and outputs of a graph, in order."""
    layers, (kv_heads, positions, head_dim) = caches
    dtype, hidden, tree = manifest.dtype, manifest.hidden, manifest.rows
    rows: int | str = form.chunk if form.static else "rows"
    most: int | str = (manifest.depth + 1 if name == "draft" else form.chunk) if form.static else "accepted"
    read = rows if name == "target" else most

    def cached(prefix: str, n: int | str) -> Signature:
        return [(f"{prefix}_{part}.{i}", dtype, (1, kv_heads, n, head_dim)) for i in range(layers) for part in ("key", "value")]

    written = cached("new", read) if appends else cached("present", positions)
    past: Signature = [("past_length", "int64", (1,)), *cached("past", positions)]
    if name == "target":
        inputs: Signature = [("tokens", "int64", (rows,)), ("depth", "int64", (rows,)), ("mask", "bool", (rows, rows)), *past]
        made: Signature = [
            ("choice", "int64", (rows,)),
            ("logits", dtype, (rows, manifest.vocabulary)),
            ("hidden", dtype, (rows, hidden)),
        ]
        return inputs, [*made, *written]
    given: Signature = [
        ("tokens", "int64", (read,)),
        ("hidden", dtype, (rows, hidden)),
        ("path", "int64", (read,)),
        ("count", "int64", (1,)),
    ]
    grown: Signature = [
        ("tree_tokens", "int64", (tree,)), ("tree_depth", "int64", (tree,)), ("tree_parent", "int64", (tree,)),
        ("tree_mask", "bool", (tree, tree)), ("tree_score", "float32", (tree,)),
    ]  # fmt: skip
    return [*given, *past], [*(grown if name == "draft" else ()), *written]
