"""Compiles graphs with MIGraphX in a child process.

``compile`` and ``save`` hold the interpreter's lock, so signals could not interrupt them in this process. MIGraphX
writes a program that it cannot compile to the temporary folder, with all its weights, so the child gets a temporary
folder of its own. All memory is freed when the child ends.
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
    """The graphs to compile.

    target: ``gpu`` or ``ref``. index: of the GPU. tune: search longer for faster kernels. bundle: its folder, to which
    the paths of weights are relative. folder: for the compiled programs. graphs: file in the bundle by graph name.
    """

    target: str
    index: int
    tune: bool
    bundle: str
    folder: str
    graphs: Mapping[str, str]


def compile_apart(job: Job, scratch: Path, environment: Mapping[str, str], progress: Callable[[str], object]) -> None:
    """Runs a job in a child process, which ends if this process ends.

    scratch: folder for the child's temporary files. environment: variables set for it in addition to ours. progress:
    called with each step. Raises GumihoError with the child's error message, or saying how it ended.
    """
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(asdict(job))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(scratch), **environment},
    )
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
            os.killpg(child.pid, signal.SIGKILL)  # and the compilers that it started
        child.wait()
        raise
    if kind == "error":
        raise GumihoError(text)
    if kind != "done":
        ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        advice = "free memory, if it ran out" if status == -signal.SIGKILL else "see its output above"
        raise GumihoError(f"MIGraphX {ending} while {text}: {advice}")


def main() -> int:
    tell_parent = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # MIGraphX also prints to standard output

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
        from ..engines.devices import hip

        hip.Hip(job.index).enter()
    for name, graph in job.graphs.items():
        progress(f"compiling {name} for {job.target}")
        file = Path(job.bundle) / graph
        try:
            program = migraphx.parse_onnx_buffer(file.read_bytes(), external_data_path=job.bundle)
            program.compile(
                migraphx.get_target(job.target), offload_copy=False, fast_math=False, exhaustive_tune=job.tune
            )
            progress(f"saving {name}")
            migraphx.save(program, str(Path(job.folder) / f"{name}.mxr"))
        except (RuntimeError, MemoryError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise GumihoError(
                f"MIGraphX {migraphx.__version__} cannot compile {file} ({reason}): try another version"
            ) from None
        del program
        gc.collect()


def _die_with_parent() -> None:
    """Has Linux end this process when its parent ends, since a killed parent cannot do so."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    sys.exit(main())
