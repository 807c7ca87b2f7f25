"""Where engines live in a bundle: compiled once per key, found again by it, never taken for one another."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from . import golden
from .backends import Backend, close
from .bundle import Bundle
from .decoder import Decoder
from .errors import GumihoError
from .measure import measure
from .memory import require, size


def key(bundle: Bundle, backend: Backend) -> dict[str, str]:
    """What engines depend on besides the options they were compiled with: another value of any part makes them other ones."""
    form = bundle.manifest.form(backend.NAME)
    files = [graph.file for graphs in (form.graphs, *form.spares.values()) for graph in graphs.values()]
    files += [name for name in bundle.manifest.files if name.startswith("weights/")]
    return {"backend": backend.NAME, **backend.versions(), **{name: bundle.manifest.files[name][1] for name in files}}


def compile_engines(
    bundle: Bundle, backend: Backend, tune: bool = False, progress: Callable[[str], object] = lambda _: None
) -> tuple[Path, dict[str, float]]:
    """Compiles for one backend and replays the golden run; an engine that fails it is not kept.

    tune: look longer for faster kernels; progress is told what is being done. Returns the engines' folder and the largest
    error of every graph in the replay.
    """
    whole = key(bundle, backend) | {"tune": str(tune)}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:12]
    folder = bundle.path / "engines" / f"{backend.NAME}-{digest}"
    partial = folder.with_name(f".{folder.name}.partial")
    need = require(bundle, backend, compiling=True)
    progress(f"needs about {size(need.host)} of memory" + (f" and {size(need.device)} on the device" if need.device else ""))
    progress("checking the bundle's files")
    bundle.verify()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        backend.compile(bundle, partial, tune, progress)
        progress("replaying the golden run")
        errors = _prove(bundle, backend, partial, progress)
        (partial / "key.json").write_text(json.dumps(whole, indent=1), "utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise GumihoError(
            f"writing engines to {folder} failed ({error}): free some space or make the bundle writable"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder, errors


def _prove(bundle: Bundle, backend: Backend, folder: Path, progress: Callable[[str], object]) -> dict[str, float]:
    """Replays the golden run through fresh engines, and measures what their passes cost."""
    engines, device = backend.open(bundle, folder)

    def free() -> None:
        close(engines, device)

    try:
        errors = golden.replay(bundle, backend.form(bundle, folder), engines, device)
        progress("measuring passes")
        decoder = Decoder(bundle.manifest, backend.form(bundle, folder), engines, device)
        free = decoder.close
        measure(decoder).save(folder)
    finally:
        free()
    return errors


def find_engines(bundle: Bundle, backend: Backend) -> Path:
    """The folder of the current engines, the newest if several options were compiled.

    Raises GumihoError naming what differs from those that are there.
    """
    wanted = key(bundle, backend)
    command = f"run `python -m runtime.compile {bundle.path} --backend {backend.NAME}`"
    stale = None
    for file in sorted((bundle.path / "engines").glob(f"{backend.NAME}-*/key.json"), key=lambda p: -p.stat().st_mtime):
        try:
            theirs = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError):
            theirs = {}
        part = next((part for part in wanted if theirs.get(part) != wanted[part]), None)
        if part is None:
            return file.parent
        stale = (
            stale or f"the engines in {file.parent} were compiled for {part} {theirs.get(part)}, and here it is {wanted[part]}"
        )
    raise GumihoError(f"{stale or f'bundle {bundle.path} has no engines for backend {backend.NAME!r}'}: {command}")
