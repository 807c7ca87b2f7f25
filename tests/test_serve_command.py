"""``gumiho serve`` as a process: how it starts, what it refuses, how it ends."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.serve.main import main
from tests.serving import client

ROOT = Path(__file__).parent.parent


class Running:
    """log: its lines, complete once it has ended."""

    def __init__(
        self, process: "subprocess.Popen[str]", address: str, log: list[str], reading: threading.Thread | None
    ) -> None:
        self.process, self.address, self.log, self.reading = process, address, log, reading

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        status = self.process.wait(60)
        if self.reading:
            self.reading.join(60)
        return status


@contextmanager
def started(bundle: Path, *options: str, log: Any = None, **environment: str) -> Iterator[Running]:
    """The command with its log on a pipe, or in a file."""
    lines, reading = list[str](), None
    argv = [sys.executable, "-m", "runtime.serve", str(bundle), "--port", "0", "--threads", "1", *options]
    if log is None:
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | environment)
        assert process.stderr
        line = next((line for line in process.stderr if "OpenAI's API on" in line), "")
        reading = threading.Thread(target=lines.extend, args=[process.stderr], daemon=True)
        reading.start()
        address = line.split(" on ")[1].split(",")[0]
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        argv[argv.index("0")] = str(port)
        process = subprocess.Popen(argv, stderr=log, text=True, cwd=ROOT, env=os.environ | environment)
        address = f"http://127.0.0.1:{port}"
    try:
        yield Running(process, address, lines, reading)
    finally:
        process.kill()
        process.wait()


def test_it_answers_and_ends(chat_bundle: Path) -> None:
    with started(chat_bundle, "--streams", "2", "--model-name", "mine") as running:
        api = client(running.address)
        assert api.models.list().data[0].id == "mine"
        assert api.completions.create(model="mine", prompt="import ", max_tokens=4).usage
        assert running.stop(signal.SIGINT) == 0


def test_running_requests_end_before_the_server_does(chat_bundle: Path) -> None:
    with started(chat_bundle, "--grace", "30") as running:
        stream = client(running.address).completions.create(
            model="demo", prompt="import ", max_tokens=190, temperature=0, stream=True, logprobs=5
        )
        first = next(iter(stream))
        running.process.send_signal(signal.SIGTERM)
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        assert running.process.wait(60) == 0


def test_grace_ends(chat_bundle: Path) -> None:
    """Clients that never finish do not keep the server; they are told, and the log has a line for each. Neither does
    one that sends no HTTP."""
    with started(
        chat_bundle, "--grace", "1", "--patience", "1000", "--streams", "1", "--max-seconds", "1000"
    ) as running:
        port = int(running.address.rsplit(":", 1)[1])

        def opened(body: bytes, length: bytes, kind: bytes = b"application/json") -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            head = (b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Content-Type: " + kind, length, b"", b"")
            connection.sendall(b"\r\n".join(head) + body)
            return connection

        content = json.dumps(
            {"model": "demo", "prompt": ["a"] * 16, "stream": True, "max_tokens": 190, "logprobs": 5}
        ).encode()
        with opened(b"ZZ\r\n", b"Transfer-Encoding: chunked") as invalid:
            assert b" 400 " in invalid.recv(1000)
        with opened(b"", b"Transfer-Encoding: chunked", b"text/plain") as invalid:
            assert b" 415 " in invalid.recv(1000)  # an answer that leaves the body unread
            invalid.sendall(b"ZZ\r\n")
            while invalid.recv(1000):
                pass
        with (
            opened(b"{", b"Content-Length: 9") as waiting,
            opened(content, b"Content-Length: %d" % len(content)) as streaming,
        ):
            received = streaming.recv(1000)
            assert running.stop() == 0
            while more := streaming.recv(1 << 20):
                received += more
            told = waiting.recv(1000)
    assert b" 503 " in told
    for answer in (told, received):
        assert b'"code":"server_ending"' in answer
    assert received.endswith(b"\r\n0\r\n\r\n")
    assert [line.split(" ", 4)[3:] for line in running.log if "Traceback" in line or " ERROR " in line] == []
    assert any("--grace 1 is over: 2 requests are broken off" in line for line in running.log)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_log_that_cannot_be_written_stops_nothing(chat_bundle: Path) -> None:
    with Path("/dev/full").open("w") as full, started(chat_bundle, log=full) as running:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{running.address}/health", timeout=10).read()
                break
            except urllib.error.URLError:
                assert running.process.poll() is None
                threading.Event().wait(0.1)
        api = client(running.address)
        assert len([api.completions.create(model="demo", prompt="a", max_tokens=2) for _ in range(3)]) == 3
        assert running.stop() == 0


def test_keys(chat_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\ntwo \n")
    with started(chat_bundle, "--api-key-file", str(file), GUMIHO_API_KEY="three") as running:
        for key in ("one", "two", "three"):
            assert client(running.address, key).models.list().data
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{running.address}/v1/models", timeout=10)
        assert json.loads(error.value.read())["error"]["code"] == "invalid_api_key"
        assert running.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--no-api-key"),
        (["--host", "::"], "--api-key-file"),
        (["--host", "300.1.1.1", "--no-api-key"], "cannot be listened on"),
        (["--port", "70000"], "0 to 65535"),
        (["--streams", "0"], "streams is 0"),
        (["--queue", "-1"], "--queue is -1"),
        (["--patience", "0"], "--patience"),
        (["--max-seconds", "nan"], "--max-seconds"),
        (["--patience", "inf"], "--patience is inf"),
        (["--grace", "99999999999"], "--grace is 99999999999"),
        (["--api-key", "é"], "API key"),
        (["--api-key-file", "/nowhere"], "'/nowhere' cannot be read as the file of API keys"),
        (["--backend", "nothing"], "there is no backend"),
    ],
)
def test_wrong_options(chat_bundle: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main([str(chat_bundle), "--port", "0", *options]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert message in said


def test_a_port_that_is_taken(chat_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([str(chat_bundle), "--port", str(taken.getsockname()[1])]) == 1
    assert "give another --host or --port" in capsys.readouterr().err


def test_what_is_missing_is_named(
    chat_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "runtime.serve.http_server", raising=False)
    assert main([str(chat_bundle)]) == 1
    assert "pip install '.[serve]'" in capsys.readouterr().err


def printed(script: str, how: str, **environment: str) -> str:
    """What a script prints in a process of its own, without settings of malloc but those given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", script, how]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=clean | environment, check=True).stdout


ARENAS = """
import ctypes, sys, threading
from runtime.backends.allocator import share_arena
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "shared":
    share_arena()
started = threading.Barrier(5)
def allocate():
    library.free(ctypes.c_void_p(library.malloc(1000)))
    started.wait()
for _ in range(4):
    threading.Thread(target=allocate).start()
started.wait()
library.malloc_info(0, ctypes.c_void_p.in_dll(library, "stdout"))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc")
def test_threads_share_one_memory_arena() -> None:
    def arenas(how: str, **environment: str) -> int:
        return printed(ARENAS, how, **environment).count("<heap")

    own = arenas("own")
    assert own >= 4 > arenas("shared")
    assert arenas("shared", MALLOC_ARENA_MAX="8") == own  # who has set it knows why


GAPS = """
import asyncio, ctypes, sys
from pathlib import Path
from runtime.backends import allocator
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
blocks = [ctypes.c_void_p(library.malloc(100_000)) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for i, block in enumerate(blocks):
    if i % 20:
        library.free(block)
if sys.argv[1] == "returned":
    allocator._SECONDS = 0.01
    async def serve():
        returning = asyncio.create_task(allocator.return_regularly())
        await asyncio.sleep(1)
        returning.cancel()
    asyncio.run(serve())
print(Path("/proc/self/statm").read_text().split()[1])
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_free_memory_between_used_one_goes_back() -> None:
    def pages(how: str) -> int:
        return int(printed(GAPS, how))

    assert (pages("kept") - pages("returned")) * os.sysconf("SC_PAGE_SIZE") > 70_000_000


PASSES = """
import ctypes, resource, sys
from runtime.backends.allocator import keep_memory_of_passes
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "kept":
    keep_memory_of_passes()
def run():
    blocks = [ctypes.c_void_p(library.malloc(1_500_000)) for _ in range(20)]
    for block in blocks:
        ctypes.memset(block, 1, 1_500_000)
    for block in blocks:
        library.free(block)
run()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_what_a_pass_frees_is_there_for_the_next() -> None:
    def faults(how: str, **environment: str) -> int:
        return int(printed(PASSES, how, **environment))

    assert faults("kept") < 100 < 5000 < faults("as it is")
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="100000", MALLOC_MMAP_THRESHOLD_="100000") > 5000
    assert faults("kept", GLIBC_TUNABLES="glibc.malloc.trim_threshold=100000:glibc.malloc.mmap_threshold=100000") > 5000
