"""Parses and checks ``gumiho.json``."""

from pathlib import Path, PurePosixPath

from ..errors import GumihoError
from . import contract
from .manifest import FEATURES, FORMAT, GRAPHS, MANIFEST, Manifest
from .records import Damage, checked, parse, shown, unsealed


def parse_manifest(text: str, where: Path) -> Manifest:
    """A manifest from its JSON. where: the file, for messages.

    Raises GumihoError for another format, and for the first thing that is damaged.
    """
    try:
        raw = parse(text)
        if not isinstance(raw, dict):
            raise Damage("it holds no JSON object")
        _require_format(raw.get("format"), where)
        manifest = checked(Manifest, unsealed(raw))
        if unknown := sorted(set(manifest.requires) - set(FEATURES)):
            raise GumihoError(f"{where} needs '{shown(unknown[0])}', which this version does not know: install a newer one")
        _check(manifest)
        return manifest
    except Damage as error:
        raise GumihoError(f"{where} is damaged ({error}): copy the bundle again") from None


def _check(manifest: Manifest) -> None:
    """The rules that no field can state by itself. Raises Damage."""
    if not manifest.forms:
        raise Damage("forms is empty")
    if manifest.depth >= manifest.rows:
        raise Damage(f"depth is {manifest.depth}, expected less than the {manifest.rows} rows")
    if odd := [token for token in manifest.eos_token_ids if token >= manifest.vocabulary]:
        raise Damage(f"eos_token_ids holds {odd[0]}, expected ids below {manifest.vocabulary}")
    for name in manifest.files:
        _require_inside(name)
    for backend, form in manifest.forms.items():
        if form.static and form.chunk < manifest.rows:
            raise Damage(f"forms.{backend}.chunk is {form.chunk}, expected {manifest.rows} or more")
        for dialect, graphs in form.variants().items():
            at = f"forms.{backend} ({dialect})"
            if missing := set(GRAPHS) - graphs.keys():
                raise Damage(f"{at} has no graph '{min(missing)}'")
            for graph in graphs.values():
                if graph.file not in manifest.files:
                    raise Damage(f"{at} names {shown(graph.file)}, which is not among the files")
            contract.check(manifest, form, dict(graphs), at)


def _require_format(found: object, where: Path) -> None:
    if type(found) is not int:
        raise Damage("it names no format")
    if found != FORMAT:
        raise GumihoError(
            f"{where} has bundle format {shown(str(found)[:20]) if abs(found) < 1 << 64 else 'unknown'} and this version reads {FORMAT}: "
            "export it again, or install the version that wrote it"
        )


def _require_inside(name: str) -> None:
    """Raises Damage for a path that leaves the bundle, or is spelled in another way than an export spells it."""
    path = PurePosixPath(name)
    parts = path.parts
    plain = str(path) == name and name.isprintable() and len(name) < 1024 and "\\" not in name
    if not plain or not parts or path.is_absolute() or ".." in parts or name in (".", MANIFEST) or parts[0] == "engines":
        raise Damage(f"files names {shown(name)!r}, which is no path inside the bundle")
