"""Stores compiled engines in a bundle's folder, under a key of everything they depend on, and checks them for
damage."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from ..backends import NAMES, Backend, Engine, close
from ..backends.memory import size
from ..backends.processor import physical_cores
from ..bundle.files import read_regular
from ..bundle.graphs import SHARED, Form
from ..bundle.hashes import File, first_damaged
from ..bundle.locks import locked
from ..bundle.reader import Bundle
from ..bundle.records import Damage, Pattern, checked, parse, sealed, unsealed
from ..decoding.decoder import Decoder
from ..errors import DamageError, GumihoError, UnavailableError, reason, remedy
from . import golden_replay as golden
from .devices import Device
from .memory_check import require
from .pass_times import measure
from .thread_count import OtherPrograms, fewer_threads, text_time

RECORD = "engine.json"
MEASURING = "measuring passes"  # the step of ``compile_engines`` after compiling
_MOST = 1 << 20  # bytes of a record
_PROBE = 1 << 20  # bytes written to test for free disk space
_SHOWN = 80  # characters of a key's value that a message quotes


@dataclass(frozen=True)
class Record:
    """Describes a folder of engines.

    key: see the function ``key``. files: all other files in the folder. proven: whether the golden run was replayed;
    plans that were built without a device are not proven, and are for every device of their capability.
    """

    key: Mapping[str, str]
    files: Mapping[Annotated[str, Pattern(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}", "the name of a file")], File]
    proven: bool = True


def key(bundle: Bundle, backend: str, versions: Mapping[str, str]) -> dict[str, str]:
    """Everything that engines depend on, except the options of compiling: if a value changes, they must be compiled
    again. versions: see ``Backend.versions``."""
    form = bundle.manifest.form(backend)
    files = [graph.file for graphs in form.variants().values() for graph in graphs.values()]
    files += [name for name in bundle.manifest.files if name.startswith("weights/")]
    hashes = {name: bundle.manifest.files[name] for name in files}
    found = {
        "backend": backend,
        **versions,
        **{n: file.sha256 or file.sample for n, file in hashes.items()},
    }
    # where in those files engines find what they take as inputs
    if form.weights:
        places = {model: {name: asdict(weight) for name, weight in of.items()} for model, of in form.weights.items()}
        found["weights"] = hashlib.sha256(json.dumps(places, sort_keys=True).encode()).hexdigest()
    return found


def compile_engines(
    bundle: Bundle, backend: Backend, tune: bool = False, progress: Callable[[str], object] = lambda _: None
) -> tuple[Path, dict[str, float]]:
    """Compiles for one backend and replays the golden run; an engine that fails it is not kept.

    The previous engines stay usable until the new ones are complete. If another process compiles the same bundle, this
    one waits.

    tune: search longer for faster kernels. progress: called with the name of each step. Returns the engines' folder and
    the largest error of every graph in the replay. Raises UnavailableError if memory or disk space is missing, and
    GumihoError if compiling or the golden run fails.
    """
    full_key = key(bundle, backend.NAME, backend.versions()) | {"tune": str(tune)}
    need = require(bundle, backend, compiling=True)
    progress(
        f"needs about {size(need.host)} of memory" + (f" and {size(need.device)} on the device" if need.device else "")
    )
    progress("checking the bundle's files")
    bundle.verify()
    with new_folder(bundle, full_key, progress) as (partial, keep):
        try:
            backend.compile(bundle, partial, tune, progress, lambda: golden.check(bundle, backend, partial))
        except GumihoError:
            _require_room(partial)  # on a full disk, libraries fail with unrelated messages
            raise
        progress("replaying the golden run")
        errors = _prove(bundle, backend, partial, progress)
        return keep(True), errors


@contextmanager
def new_folder(
    bundle: Bundle, full_key: Mapping[str, str], progress: Callable[[str], object]
) -> Iterator[tuple[Path, Callable[[bool], Path]]]:
    """An empty folder for engines, and what gives it its place and returns that, given whether they are proven. Without
    that it is removed. Raises UnavailableError if it cannot be written."""
    digest = hashlib.sha256(json.dumps(full_key, sort_keys=True).encode()).hexdigest()[:12]
    root, name = bundle.path / "engines", f"{full_key['backend']}-{digest}"
    try:
        root.mkdir(exist_ok=True)
        with locked(
            root / ".lock", f"another process compiles engines of {bundle.path}; waiting for it to end", progress
        ):
            for abandoned in root.glob(".*.partial-*"):  # by a killed process, since a running one would hold the lock
                shutil.rmtree(abandoned, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=root))

            def keep(proven: bool) -> Path:
                files = {file.name: File.of(file) for file in sorted(partial.iterdir())}
                (partial / RECORD).write_text(sealed(asdict(Record(full_key, files, proven))), "utf-8")
                return _install(partial, root, name)

            try:
                partial.chmod(0o755)
                yield partial, keep
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UnavailableError(
            f"writing engines to {root} failed ({reason(error)}): {remedy(error, 'copy the bundle elsewhere')}"
        ) from None


def _require_room(folder: Path) -> None:
    """Raises OSError if not even a small file can be written."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE))
        file.flush()


def _install(partial: Path, root: Path, name: str) -> Path:
    """Gives the new engines an unused name, and only then removes the ones they replace."""
    old = [folder for folder in root.glob(f"{name}*") if folder.name.split("~")[0] == name]
    used = {folder.name for folder in old}
    folder = root / next(n for n in (name, *(f"{name}~{i}" for i in range(1, len(old) + 2))) if n not in used)
    partial.rename(folder)
    for replaced in old:
        with suppress(OSError):  # under this name the next compile removes what is left of it
            replaced = replaced.rename(root / f".{replaced.name}.partial-replaced")
        shutil.rmtree(replaced, ignore_errors=True)
    return folder


def _prove(bundle: Bundle, backend: Backend, folder: Path, progress: Callable[[str], object]) -> dict[str, float]:
    """Replays the golden run through new engines, chooses their number of CPU threads and measures the times of their
    passes. Returns the largest errors."""
    form, cores = backend.form(bundle, folder), physical_cores() if backend.THREADS else 1
    with ExitStack() as stack:
        engines, device = backend.open(bundle, folder)
        stack.callback(close, engines, device)
        errors = golden.replay_each(bundle, form, engines, device)
        progress(MEASURING)
        stack.pop_all()
        decoders = stack.enter_context(_decoders(bundle, form, engines, device))
        costs, others = [measure(decoder) for decoder in decoders], OtherPrograms()
        most, comparable = (text_time(decoders[0]), not others.in_the_way) if cores > 1 else (0.0, False)
    if SHARED in form.graphs:
        progress("replaying the golden run in passes of several streams")
        golden.check_shared_passes(bundle, backend, folder)

    @contextmanager
    def opened(threads: int) -> Iterator[Sequence[Decoder]]:
        progress(f"measuring with {threads} thread{'s' * (threads > 1)}")
        with _decoders(bundle, form, *backend.open(bundle, folder, threads)) as decoders:
            yield decoders

    def time(threads: int) -> float:
        with opened(threads) as decoders:
            return text_time(decoders[0])

    if cores > 1 and not comparable:
        progress(
            "other programs use the cores: engines get a thread for each; compile again while the machine is idle to "
            "try fewer"
        )
    if comparable and (threads := fewer_threads(most, time, cores)):
        with opened(threads) as decoders:
            costs = [replace(measure(decoder), threads=threads, cores=cores) for decoder in decoders]
    for drafter, own in zip(bundle.manifest.each, costs, strict=True):
        own.save(folder, bundle.manifest.suffix(drafter))
    return errors


@contextmanager
def _decoders(bundle: Bundle, form: Form, engines: Mapping[str, Engine], device: Device) -> Iterator[Sequence[Decoder]]:
    """A decoder with each drafter, which are freed at the end with the engines."""
    decoders = list[Decoder]()
    try:
        for drafter in bundle.manifest.each:
            sibling = decoders[0] if decoders else None
            decoders.append(Decoder.with_drafter(drafter, bundle, form, engines, device, sibling=sibling))
        yield decoders
    finally:
        for decoder in decoders:
            decoder.close(engines=False)
        close(engines, device)


def find_engines(bundle: Bundle, backend: Backend, quick: bool = True) -> Path:
    """The folder of ``find_record``."""
    return find_record(bundle, backend, quick)[0]


def find_record(bundle: Bundle, backend: Backend, quick: bool = True) -> tuple[Path, Record]:
    """The folder of the current engines, checked for damage, and its record; the newest one if they were compiled with
    several options. Those that are proven come before plans that were built without a device.

    quick: read only samples of large files, see ``Bundle.verify``. Raises UnavailableError if there are no engines or
    only ones that were compiled for something else, and DamageError if they are damaged.
    """
    while True:
        folders = _newest_first(bundle.path / "engines", backend.NAME)
        try:
            return _first_current(bundle, backend, folders, quick)
        except GumihoError:
            if all(folder.exists() for folder in folders):
                raise  # otherwise another process has just replaced them


def _first_current(bundle: Bundle, backend: Backend, folders: Iterable[Path], quick: bool) -> tuple[Path, Record]:
    """``find_record`` among some folders."""
    kind: type[GumihoError] = UnavailableError
    current, reason, unproven = key(bundle, backend.NAME, backend.versions()), "", None
    command = f"run `gumiho compile {bundle.path} --backend {backend.NAME}`"
    for folder in folders:
        try:
            record = read_record(folder)
        except Damage as error:
            if not reason:
                reason, kind = f"{folder / RECORD} is damaged ({error})", DamageError
            continue
        parts = [part for part in current if record.proven or part != "device"]
        if part := next((part for part in parts if record.key.get(part) != current[part]), None):
            recorded = str(record.key.get(part))[:_SHOWN]
            reason = (
                reason or f"the engines in {folder} were compiled for {part} {recorded}, and here it is {current[part]}"
            )
        elif damaged := first_damaged(folder, record.files, quick):
            reason, kind = f"{folder / damaged} is missing or damaged", DamageError
        elif record.proven:
            return folder, record
        else:
            unproven = unproven or (folder, record)
    if unproven:
        return unproven
    raise kind(f"{reason or f'bundle {bundle.path} has no engines for backend {backend.NAME!r}'}: {command}")


def _newest_first(root: Path, backend: str) -> list[Path]:
    times = {}
    longer = tuple(f"{name}-" for name in NAMES if name.startswith(f"{backend}-"))
    for folder in root.glob(f"{backend}-*"):
        if folder.name.startswith(longer):  # another backend's
            continue
        with suppress(OSError):  # another process has just replaced it
            times[folder] = (folder / RECORD).stat().st_mtime_ns
    return sorted(times, key=lambda folder: -times[folder])


def read_record(folder: Path) -> Record:
    """The record of a folder of engines. Raises Damage."""
    try:
        raw = parse(read_regular(folder / RECORD, _MOST))
    except OSError as error:
        raise Damage(f"it cannot be read: {error.strerror or error}") from None
    if not isinstance(raw, dict):
        raise Damage("it is not a JSON object")
    return checked(Record, unsealed(raw))
