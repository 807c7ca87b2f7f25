"""From a bundle's folder to a model that decodes."""

import logging
import os
from operator import index
from pathlib import Path
from time import perf_counter

from ..backends import backend, require
from ..bundle.reader import Bundle
from ..engines.loaded import LoadedBundle
from ..errors import InputError
from .model import Model
from .stream import Stream

_log = logging.getLogger("gumiho.model")
_MAX_THREADS_PER_CPU = 4  # more only wait for each other, and some thousands never finish
_MOST_STREAMS = 1024


def load(bundle: str | Path, backend_name: str = "", device: str = "", threads: int = 0, streams: int = 1) -> Model:
    """Loads a bundle with the engines compiled for a backend.

    backend_name: "" for the bundle's first one. device: one of the backend's devices, "" for its first. threads: CPU
    threads of the engines, 0 for as many as compiling found fastest. streams: how many texts can be decoded at once,
    ``Model.streams``; memory for their caches is checked before anything is loaded. Raises DamageError if the bundle is
    damaged, InputError if it has no graphs for the backend, and UnavailableError if the backend cannot run here or has
    no current engines; the message names the command that compiles them.
    """
    started, opened = perf_counter(), Bundle(bundle)
    most = _MAX_THREADS_PER_CPU * (os.cpu_count() or 1)
    if not hasattr(threads, "__index__") or not 0 <= (threads := index(threads)) <= most:
        raise InputError(f"threads is {threads!r}: give 0 for as many as compiling found fastest, or 1 to {most}")
    if not hasattr(streams, "__index__") or not 1 <= (streams := index(streams)) <= _MOST_STREAMS:
        raise InputError(f"streams is {streams!r}: give 1 to {_MOST_STREAMS}")
    name = backend_name or opened.manifest.default
    require(name)
    opened.manifest.form(name)
    chosen = backend(name, device)
    if threads and not chosen.THREADS:
        raise InputError(f"threads is {threads}, and engines of {name} do not compute with CPU threads: leave it out")
    opened.verify(quick=True)
    loaded = LoadedBundle.open(opened, chosen, threads, streams)
    try:
        model = Model(loaded)
        model._kept = tuple(Stream(loaded, model) for _ in range(streams - 1))
        for stream in model.streams:
            stream.warm_up()
    except BaseException:
        loaded.close()
        raise
    if not loaded.proven:
        _log.warning(
            "the engines of %s were built without this device and have not been checked on it: run `gumiho compile %s "
            "--backend %s`",
            opened.path,
            opened.path,
            name,
        )
    prices = "measured" if all(loaded.costs.values()) else "no"
    _log.info("loaded %s for %s in %.2f s, with %s prices", opened.path, name, perf_counter() - started, prices)
    return model
