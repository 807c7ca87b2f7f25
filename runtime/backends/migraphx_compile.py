"""Compiles graphs with MIGraphX in a process of its own.

``compile`` and ``save`` hold the interpreter's lock, so no signal could interrupt them here; a program that cannot be compiled is
written to the temporary folder with all its weights; and what compiling took of memory goes back whole.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import GumihoError


@dataclass(frozen=True)
class Job:
    """target: ``gpu`` or ``ref``. index: of the GPU. tune: look longer for faster kernels. bundle: the folder that weights are named
    relative to. folder: where programs go. graphs: by name, file in the bundle."""

    target: str
    index: int
    tune: bool
    bundle: str
    folder: str
    graphs: Mapping[str, str]


def compile_apart(job: Job, scratch: Path, environment: Mapping[str, str], progress: Callable[[str], object]) -> None:
    """Does a job in a child process, which dies with this one.

    scratch: its folder for temporary files. environment: what is set for it besides ours. Raises GumihoError with what the child
    said, or how it died.
    """
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(asdict(job))],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8", start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(scratch), **environment},
    )  # fmt: skip
    kind, text = "", ""
    try:
        assert child.stdout
        for line in child.stdout:
            kind, text = json.loads(line)
            if kind == "progress":
                progress(text)
        status = child.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with the compilers that it started
        child.wait()
        raise
    if kind == "error":
        raise GumihoError(text)
    if kind != "done":
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        why = "memory has run out, or somebody ended it" if status == -signal.SIGKILL else "see what it printed above"
        raise GumihoError(f"MIGraphX {how} while {text}: {why}")


def main() -> int:
    tell_parent = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # MIGraphX prints to standard output too

    def tell(kind: str, text: str) -> None:
        print(json.dumps([kind, text]), file=tell_parent, flush=True)

    _die_with_parent()
    try:
        _compile(Job(**json.loads(sys.argv[1])), lambda text: tell("progress", text))
    except GumihoError as error:
        tell("error", str(error))
        return 1
    tell("done", "")
    return 0


def _compile(job: Job, progress: Callable[[str], object]) -> None:
    import migraphx

    if job.target == "gpu":
        from ..devices import hip

        hip.Hip(job.index).enter()
    for name, graph in job.graphs.items():
        progress(f"compiling {name} for {job.target}")
        file = Path(job.bundle) / graph
        try:
            program = migraphx.parse_onnx_buffer(file.read_bytes(), external_data_path=job.bundle)
            program.compile(migraphx.get_target(job.target), offload_copy=False, fast_math=False, exhaustive_tune=job.tune)
            progress(f"saving {name}")
            migraphx.save(program, str(Path(job.folder) / f"{name}.mxr"))
        except (RuntimeError, MemoryError, OSError) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise GumihoError(f"MIGraphX {migraphx.__version__} cannot compile {file}: {said}") from None
        del program
        gc.collect()


def _die_with_parent() -> None:
    """Where the system offers it: a parent that is killed can end nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    sys.exit(main())
