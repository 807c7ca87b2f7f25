"""Where engines live in a bundle: compiled once per key, found again by it, never taken for one another."""

import hashlib
import json
import shutil
from pathlib import Path
from types import ModuleType

from . import golden
from .backends import onnxruntime as cpu
from .bundle import Bundle
from .errors import GumihoError

BACKENDS: dict[str, ModuleType] = {cpu.NAME: cpu}


def backend(name: str) -> ModuleType:
    try:
        return BACKENDS[name]
    except KeyError:
        raise GumihoError(f"there is no backend '{name}': expected one of {', '.join(BACKENDS)}") from None


def _folder(bundle: Bundle, key: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return bundle.path / "engines" / f"{key['backend']}-{digest}"


def compile_engines(bundle: Bundle, name: str) -> tuple[Path, dict[str, float]]:
    """Compiles for one backend and replays the golden run; an engine that fails it is not kept.

    Returns the engines' folder and the largest error of every graph in the replay.
    """
    module = backend(name)
    bundle.verify()
    key = module.key(bundle)
    folder = _folder(bundle, key)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        module.compile(bundle, partial)
        errors = golden.replay(bundle, module.open_engines(bundle, partial, threads=0))
        (partial / "key.json").write_text(json.dumps(key, indent=1), "utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise GumihoError(
            f"writing engines to {folder} failed ({error}): free some space or make the bundle writable"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder, errors


def find_engines(bundle: Bundle, name: str) -> Path:
    """The folder of the current engines. Raises GumihoError naming what differs from those that are there."""
    key = backend(name).key(bundle)
    folder = _folder(bundle, key)
    if (folder / "key.json").is_file():
        return folder
    command = f"run `python -m runtime.compile {bundle.path} --backend {name}`"
    for other in sorted((bundle.path / "engines").glob(f"{name}-*/key.json")):
        theirs = json.loads(other.read_text("utf-8"))
        part = next((p for p in key if theirs.get(p) != key[p]), None)
        if part:
            raise GumihoError(
                f"the engines in {other.parent} were compiled for {part} {theirs.get(part)}, and here it is {key[part]}: {command}"
            )
    raise GumihoError(f"bundle {bundle.path} has no engines for backend '{name}': {command}")
