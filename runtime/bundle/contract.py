"""The inputs and outputs that a bundle's graphs must have. They follow from a few sizes in the manifest, so a manifest
that contradicts itself is refused before anything is allocated."""

from .graphs import SHARED, Form, Graph
from .manifest import OPEN_CACHES, SPLIT_VALUES, Manifest
from .records import Damage

Shape = tuple[int | str, ...]
Signature = list[tuple[str, str, Shape]]
Caches = tuple[int, int | str, tuple[tuple[int, int], ...]]  # layers, positions, and (heads, columns) of key and value
_MOST_LANES = 10  # lanes are numbered with one digit


def check(manifest: Manifest, form: Form, graphs: dict[str, Graph], at: str, on_host: bool) -> None:
    """Raises Damage naming the first tensor whose name, dtype or shape is wrong. at: the graphs' place in the manifest,
    for messages. on_host: whether caches are on the host, where they may have any length.
    """
    if "extend" in graphs and _caches(graphs["draft"], manifest) != _caches(graphs["extend"], manifest):
        raise Damage(f"{at}: draft and extend have different caches, expected the same")
    if "draft" in graphs and "extend" not in graphs and graphs["draft"].caches:
        raise Damage(f"{at}.draft has caches and there is no graph 'extend'")
    for name, graph in graphs.items():
        if name.startswith("target-") and _caches(graph, manifest) != _caches(graphs["target"], manifest):
            raise Damage(f"{at}: target and {name} have different caches, expected the same")
        may_be_open = (
            on_host and name == "target" and OPEN_CACHES in manifest.requires and not (form.static or graph.appends)
        )
        selects = graph.selects and on_host and not form.static
        if name == SHARED:
            inputs, outputs = _shared(manifest, graphs["target"], graph.lanes)
        else:
            stateless = name == "draft" and "extend" not in graphs
            caches: Caches = (0, 0, ()) if stateless else _caches(graph, manifest, may_be_open)
            inputs, outputs = _expected(manifest, form, name, caches, graph.appends, selects, graph.noisy)
        for tensors, expected, kind in ((graph.inputs, inputs, "input"), (graph.outputs, outputs, "output")):
            _compare(
                [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], expected, f"{at}.{name}: {kind}"
            )


def _compare(declared: Signature, expected: Signature, at: str) -> None:
    if len(declared) != len(expected):
        raise Damage(f"{at}s are {len(declared)}, expected {len(expected)}")
    for tensor, expected_tensor in zip(declared, expected, strict=True):
        if tensor != expected_tensor:
            raise Damage(f"{at} is {_spelled(*tensor)}, expected {_spelled(*expected_tensor)}")


def _spelled(name: str, dtype: str, shape: Shape) -> str:
    return f"{name} {dtype} {list(shape)}"


def _caches(graph: Graph, manifest: Manifest, open_caches: bool = False) -> Caches:
    """The shapes of the caches. Raises Damage if they cannot be those of a model, or are too small. open_caches:
    whether the number of positions may be symbolic, and values may be split by columns.
    """
    shapes = [tensor.shape for tensor in graph.caches]
    if not shapes or len(shapes) % 2 or any(len(x) != 4 or {type(x[i]) for i in (0, 1, 3)} != {int} for x in shapes):
        raise Damage(f"{graph.file} lacks a key and a value cache of four dimensions for every layer")
    positions = shapes[0][2]
    if isinstance(positions, str):
        if positions != "positions" or not open_caches:
            raise Damage(f"{graph.file} has caches of '{positions}' positions, expected {manifest.capacity} or more")
    elif positions < manifest.capacity:
        raise Damage(f"{graph.file} has caches of {positions} positions, expected {manifest.capacity} or more")
    key, value = ((int(heads), int(columns)) for _, heads, _, columns in shapes[:2])
    whole_parts = value[0] % key[0] == 0 and value[0] * value[1] == key[0] * key[1]
    splits = open_caches and SPLIT_VALUES in manifest.requires and whole_parts
    return len(shapes) // 2, positions, (key, value if splits else key)


def _shared(manifest: Manifest, target: Graph, lanes: int) -> tuple[Signature, Signature]:
    """The inputs and outputs of the target's pass over rows of several streams. target: the graph for a single
    stream."""
    if not 2 <= lanes <= _MOST_LANES or not target.selects or target.appends:
        raise Damage(f"{target.file} cannot share its passes among {lanes} streams")

    layers, positions, shapes = _caches(target, manifest, target.open_caches)

    def cached(prefix: str) -> Signature:
        own = [f"{positions}_{lane}" if target.open_caches else positions for lane in range(lanes)]
        return [
            (f"{prefix}_{part}.{lane}.{i}", manifest.dtype, (1, heads, own[lane], columns))
            for i in range(layers)
            for lane in range(lanes)
            for part, (heads, columns) in zip(("key", "value"), shapes, strict=True)
        ]

    inputs: Signature = [
        ("tokens", "int64", ("rows",)),
        ("depth", "int64", ("rows",)),
        ("counts", "int64", (lanes,)),
        ("wanted", "int64", ("wanted",)),
        *((f"mask.{lane}", "bool", (f"rows_{lane}", f"rows_{lane}")) for lane in range(lanes)),
        *((f"past_length.{lane}", "int64", (1,)) for lane in range(lanes)),
    ]
    outputs: Signature = [
        ("choice", "int64", ("wanted",)),
        ("logits", manifest.dtype, ("wanted", manifest.vocabulary)),
        ("hidden", manifest.dtype, ("rows", manifest.hidden)),
    ]
    return [*inputs, *cached("past")], [*outputs, *cached("present")]


def _expected(
    manifest: Manifest,
    form: Form,
    name: str,
    caches: Caches,
    appends: bool,
    selects: bool,
    noisy: bool,
) -> tuple[Signature, Signature]:
    """The inputs and outputs of the graph ``name``, in order. caches: see ``_caches``; appends, selects, noisy: see
    ``Graph``."""
    layers, positions, shapes = caches
    dtype, hidden, tree = manifest.dtype, manifest.hidden, manifest.rows
    name, _, size = name.partition("-")
    rows: int | str = int(size or form.chunk) if form.static else "rows"
    most: int | str = (manifest.depth + 1 if name == "draft" else form.chunk) if form.static else "accepted"
    read = rows if name == "target" else most

    def cached(prefix: str, n: int | str) -> Signature:
        return [
            (f"{prefix}_{part}.{i}", dtype, (1, heads, n, columns))
            for i in range(layers)
            for part, (heads, columns) in zip(("key", "value"), shapes, strict=True)
        ]

    written = cached("new", read) if appends else cached("present", positions)
    past: Signature = [("past_length", "int64", (1,)), *cached("past", positions)]
    if name == "target":
        inputs: Signature = [("tokens", "int64", (rows,)), ("depth", "int64", (rows,)), ("mask", "bool", (rows, rows))]
        wanted: Signature = [("wanted", "int64", ("wanted",))] if selects else []
        chosen = "wanted" if selects else rows
        outputs: Signature = [
            ("choice", "int64", (chosen,)),
            ("logits", dtype, (chosen, manifest.vocabulary)),
            ("hidden", dtype, (rows, hidden)),
        ]
        return [*inputs, *wanted, *past], [*outputs, *written]
    draft_inputs: Signature = [
        ("tokens", "int64", (read,)),
        ("hidden", dtype, (rows, hidden)),
        ("path", "int64", (read,)),
        ("count", "int64", (1,)),
    ]
    tree_outputs: Signature = [
        ("tree_tokens", "int64", (tree,)),
        ("tree_depth", "int64", (tree,)),
        ("tree_parent", "int64", (tree,)),
        ("tree_mask", "bool", (tree, tree)),
        ("tree_score", "float32", (tree,)),
    ]
    drawn: Signature = []
    if noisy and name == "draft" and manifest.tree:
        drawn = [("noise", "float32", (manifest.depth, manifest.tree.vocabulary))]
    return [*draft_inputs, *past, *drawn], [*(tree_outputs if name == "draft" else ()), *written]
