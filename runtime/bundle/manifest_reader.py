"""Parses and checks ``gumiho.json``."""

from dataclasses import replace
from pathlib import Path, PurePosixPath

from ..errors import DamageError, InputError
from . import contract
from .graphs import SHARED, Form
from .manifest import FEATURES, FORMAT, GRAPHS, MANIFEST, STATELESS, TARGET_ONLY, Manifest
from .records import Damage, checked, parse, shown, unsealed


def parse_manifest(text: str, file: Path) -> Manifest:
    """A manifest from its JSON. file: its path, for messages.

    Raises InputError for a format or feature that this version cannot read, and DamageError naming the first damaged
    value.
    """
    try:
        raw = parse(text)
        if not isinstance(raw, dict):
            raise Damage("it is not a JSON object")
        _require_format(raw.get("format"), file)
        content = unsealed(raw)
        # Checked first, since a later feature may have changed other fields.
        required = checked(tuple[str, ...], content.get("requires", []), "requires")
        if unknown := sorted(set(required) - set(FEATURES)):
            raise InputError(
                f"{file} needs '{shown(unknown[0])}', which this version does not know: install a newer one"
            )
        manifest = checked(Manifest, content)
        _check(manifest)
        return manifest
    except Damage as error:
        raise DamageError(f"{file} is damaged ({error}): copy the bundle again") from None


def _check(manifest: Manifest) -> None:
    """Raises Damage if fields contradict each other."""
    if not manifest.forms:
        raise Damage("forms is empty")
    if manifest.depth >= manifest.rows:
        raise Damage(f"depth is {manifest.depth}, expected less than the {manifest.rows} rows")
    if outside := [token for token in manifest.eos_token_ids if token >= manifest.vocabulary]:
        raise Damage(f"eos_token_ids holds {outside[0]}, expected ids below {manifest.vocabulary}")
    _require_feature(manifest, TARGET_ONLY)
    for name in manifest.files:
        _require_inside(name)
    _check_drafters(manifest)
    for drafter in manifest.each:
        _check_forms(manifest.of(drafter), f".{drafter}" if drafter else "")
    for feature in FEATURES:  # after the contract, since the tests of features rely on what it checks
        _require_feature(manifest, feature)


def _check_drafters(manifest: Manifest) -> None:
    """Raises Damage if the list of drafters and the rest of the manifest contradict each other."""
    first, *others = manifest.each
    for backend, form in manifest.forms.items():
        for named in (*form.variants().values(), form.weights):
            owners = {owner for name in named if (owner := name.partition(".")[2])}
            if foreign := owners - set(others):
                raise Damage(f"forms.{backend} has '{min(foreign)}', which is none of the drafters")
    if not manifest.drafters:
        return
    if not others or manifest.tree is None:
        raise Damage(f"drafters has {len(manifest.drafters)}, expected two or more, or none")
    if (manifest.drafters[first].depth, manifest.drafters[first].tree) != (manifest.depth, manifest.tree):
        raise Damage(f"depth and tree are not those of the first of the drafters, {first}")
    for name, drafter in manifest.drafters.items():
        if drafter.depth >= manifest.rows or drafter.tree.rows != manifest.rows:
            raise Damage(
                f"drafters.{name} has depth {drafter.depth} and {drafter.tree.rows} rows, expected {manifest.rows} rows"
            )


def _check_forms(manifest: Manifest, of: str) -> None:
    """Raises Damage if the graphs of one drafter do not fit the manifest. of: its name in messages."""
    allowed = set(GRAPHS) if manifest.has_drafter else {"target"}
    expected = allowed - ({"extend"} if STATELESS in manifest.requires else set())
    for backend, form in manifest.forms.items():
        if form.static and form.chunk < manifest.rows:
            raise Damage(f"forms.{backend}.chunk is {form.chunk}, expected {manifest.rows} or more")
        _check_weights(manifest, form, f"forms.{backend}.weights{of}")
        for dialect, graphs in form.variants().items():
            at = f"forms.{backend} ({dialect}){of}"
            if missing := expected - graphs.keys():
                raise Damage(f"{at} has no graph '{min(missing)}'")
            smaller = {name for name in graphs if name.startswith("target-")}
            shared = {SHARED} if backend == "cpu" else set()
            if surplus := graphs.keys() - smaller - shared - allowed:
                raise Damage(f"{at} has a graph '{min(surplus)}', expected only {', '.join(sorted(allowed))}")
            for name in smaller:
                if not form.static or int(name[7:]) >= form.chunk:
                    raise Damage(
                        f"{at} has '{name}', expected sizes below its chunk of {form.chunk}, and only if it is static"
                    )
            for graph in graphs.values():
                if graph.file not in manifest.files:
                    raise Damage(f"{at} names {shown(graph.file)}, which is not among the files")
            contract.check(manifest, form, dict(graphs), at, backend == "cpu")
            sizes = replace(form, graphs=graphs).targets
            if form.static and manifest.rows not in sizes:
                raise Damage(f"{at} has passes of {', '.join(map(str, sizes))} rows, expected one of {manifest.rows}")


def _check_weights(manifest: Manifest, form: Form, at: str) -> None:
    """Raises Damage unless all weights lie aligned within files of the bundle, under names that no other input or
    output has."""
    graphs = [graph for graphs in form.variants().values() for graph in graphs.values()]
    taken = {tensor.name for graph in graphs for tensor in (*graph.inputs, *graph.outputs)}
    for model, weights in form.weights.items():
        for name, weight in weights.items():
            if weight.file not in manifest.files:
                raise Damage(f"{at}.{model}.{name} names {shown(weight.file)}, which is not among the files")
            if weight.offset + weight.nbytes > manifest.files[weight.file].size:
                raise Damage(f"{at}.{model}.{name} ends behind {shown(weight.file)}")
            if weight.offset % weight.itemsize:
                raise Damage(f"{at}.{model}.{name} begins at {weight.offset}, which no {weight.dtype} does")
            if name in taken:
                raise Damage(f"{at}.{model} has '{shown(name)}', which is an input or output of a graph")


def _require_feature(manifest: Manifest, feature: str) -> None:
    """Raises Damage if ``requires`` names a feature that the bundle lacks, or omits one that it has."""
    when, has = FEATURES[feature]
    if has(manifest) != (feature in manifest.requires):
        raise Damage(f"requires is {list(manifest.requires)}, expected '{feature}' if {when} and only then")


def _require_format(number: object, file: Path) -> None:
    if type(number) is not int:
        raise Damage("its format is not a number")
    if number != FORMAT:
        spelled = number if abs(number) < 1 << 64 else "unknown"
        raise InputError(
            f"{file} has bundle format {spelled} and this version reads {FORMAT}: "
            "export it again, or install the version that wrote it"
        )


def _require_inside(name: str) -> None:
    """Raises Damage for a path that leaves the bundle or is not spelled as an export spells it."""
    path = PurePosixPath(name)
    parts = path.parts
    plain = str(path) == name and name.isprintable() and len(name) < 1024 and "\\" not in name
    if (
        not plain
        or not parts
        or path.is_absolute()
        or ".." in parts
        or name in (".", MANIFEST)
        or parts[0] == "engines"
    ):
        raise Damage(f"files names {shown(name)!r}, which is not a path inside the bundle")
