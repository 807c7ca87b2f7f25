"""Serves a bundle to clients whose grammars crash a parser, fill memory or take hours, and measures their effect on
other clients.

    python -m tools.hostile_grammars BUNDLE --minutes 5

Starts ``gumiho serve``. Clients send it such grammars for chats and completions, in three formats and several sizes,
and leave after some seconds or wait for an answer. Meanwhile another client requests short texts, every other one with
a grammar. In the first fifth of the time the clients send a harmless grammar instead, as a baseline. BUNDLE needs a
chat template. Memory is the private memory of the server and its processes (RssAnon).

Prints the results. Exits with 1 if the server ends or does not answer, if the slowest short text, with or without a
grammar, takes a second longer than in the baseline, or if memory does not return within ten seconds to within 50 MB of
its first value.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from time import monotonic, sleep
from typing import Any

MOST_DELAY, MOST_GROWTH = 1.0, 50 << 20  # seconds, bytes
FAILURES = (OSError, HTTPException, ValueError)  # failures of the server that a client sees
_PAUSE_SECONDS = 10.0
_TOKENS = 60  # per text of the clients: grammars, not long texts, shall keep streams busy
Body = dict[str, Any]


def _schema(schema: Any) -> Body:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _chain(n: int) -> Body:
    definitions: Body = {
        f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["x"]} for i in range(n)
    }
    return _schema({"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{n}": {"type": "integer"}}})


def _contains(n: int) -> str:
    return " & ".join(f"/(?s:.*)x{i}(?s:.*)/" for i in range(n))


KINDS: dict[str, Callable[[int], Body]] = {
    "chained definitions": lambda n: _chain(1500 * n),
    "chained references": lambda n: _schema(
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(4000 * n)} | {str(4000 * n): {}},
        }
    ),
    "chained rules": lambda n: {
        "grammar": "start: r0\n" + "".join(f'r{i}: "x" r{i + 1}\n' for i in range(5000 * n)) + f'r{5000 * n}: "y"'
    },
    "chained terminals": lambda n: {
        "grammar": "start: R0\n" + "".join(f'R{i}: "x" R{i + 1}\n' for i in range(9000 * n)) + f'R{9000 * n}: "y"'
    },
    "optional properties": lambda n: _schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000 * n)}}
    ),
    "long expression": lambda n: {"regex": "ab" * (500_000 * n)},
    "longer expression": lambda n: {"regex": "ab" * (3_700_000)},
    "nested expression": lambda n: {"regex": "(" * (100 * n) + "a" + ")*" * (100 * n)},
    "alternatives": lambda n: {"regex": "|".join(f"w{i}x" for i in range(40_000 * n))},
    "multiple": lambda n: _schema({"type": "integer", "multipleOf": 4_194_303 - n}),
    "conjunctions": lambda n: {"grammar": f"start: A\nA: {_contains(16 + 4 * n)}"},
    "hidden conjunctions": lambda n: {"grammar": f'start: A\nA: "x" B | "z"\nB: {_contains(14 + 2 * n)}'},
    "patterns": lambda n: _schema({"type": "string", "allOf": [{"pattern": f"x{i}"} for i in range(18 + 4 * n)]}),
    "ambiguous": lambda n: {"grammar": f'start: s\ns: s s{" s" * (30 * n)} | "a" | ""'},
    "nested schema": lambda n: _schema(json.loads('{"items":' * (100 * n) + "true" + "}" * (100 * n))),
    "many schemas": lambda n: {
        "grammar": "start: "
        + " ".join(f"a{i}" for i in range(3000 * n))
        + "\n"
        + "".join(f'a{i}: %json {{"type":"object"}}\n' for i in range(3000 * n))
    },
}


HARMLESS: dict[str, Callable[[int], Body]] = {"harmless": lambda n: {"regex": "(?s).*"}}


class Server:
    """A running ``gumiho serve``."""

    def __init__(self, bundle: str) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "runtime.gumiho",
            "serve",
            bundle,
            "--port",
            str(self.port),
            "--model-name",
            "x",
        ]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def ask(self, body: Body, patience: float) -> tuple[int, str]:
        """Status and content, or 0 if the client leaves before an answer. Raises OSError and HTTPException without an
        answer."""
        body = {"model": "x", **body}
        path = "/v1/chat/completions" if "response_format" in body else "/v1/completions"
        body |= {"messages": [{"role": "user", "content": "hi"}]} if "response_format" in body else {"prompt": "hi"}
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=patience)) as connection:
            try:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                return response.status, response.read().decode()
            except TimeoutError:
                return 0, ""

    def memory(self) -> int:
        """Bytes of private memory of the server and its child processes."""
        return sum(_own(process) for process in _family(self.process.pid))


def _family(process: int) -> Iterator[int]:
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parents.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
        except OSError:
            continue
    waiting = [process]
    while waiting:
        yield (one := waiting.pop())
        waiting += parents.get(one, [])


def _own(process: int) -> int:
    try:
        with open(f"/proc/{process}/status") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))
    except OSError:
        return 0


def short(server: Server, **more: Any) -> float:
    """Requests a short text and returns its seconds."""
    begun = monotonic()
    status, content = server.ask({"max_tokens": 4, "temperature": 0, **more}, 120)
    if status != 200:
        raise ValueError(f"a short text was answered with status {status}: {content[:200]}")
    return monotonic() - begun


def client(
    server: Server, kinds: Mapping[str, Callable[[int], Body]], seed: int, until: float, counts: "Counter[str]"
) -> None:
    draw = random.Random(seed)
    while monotonic() < until:
        sleep(1)  # so that the clients' own work of writing grammars does not slow the server down
        name = draw.choice([*kinds])
        status, content = server.ask(
            {**kinds[name](draw.choice([1, 1, 2, 4])), "max_tokens": _TOKENS}, draw.choice([0.2, 1, 5, 30])
        )
        counts[f"{name}: {status or 'left'}"] += 1
        if status >= 500:
            raise ValueError(f"{name} was answered with status {status}: {content[:200]}")


class Trial:
    """A trial of a server. problems: failed requirements, one line each. most: peak of the server's memory in bytes."""

    def __init__(self, server: Server, clients: int) -> None:
        self.server, self._clients = server, clients
        self.problems, self.counts, self.most = list[str](), Counter[str](), 0

    def begin(self) -> None:
        """Waits for the server and warms it up: the first grammar starts the process that reads the vocabulary, and
        every stream allocates its caches."""
        for _ in range(600):
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", self.server.port)):
                    break
            sleep(0.1)
        threads = [self._guarded(lambda: self.server.ask({"regex": "[ab]+", "max_tokens": 20}, 60)) for _ in range(8)]
        for thread in threads:
            thread.join()

    def delays(self, kinds: Mapping[str, Callable[[int], Body]], minutes: float) -> tuple[list[float], list[float]]:
        """Sorted seconds of short texts, without and with a grammar, while clients send grammars of these kinds."""
        until = monotonic() + minutes * 60
        threads = [
            self._guarded(lambda seed=i: client(self.server, kinds, seed, until, self.counts))  # type: ignore[misc]
            for i in range(self._clients)
        ]
        plain, guided = [short(self.server)], [short(self.server, regex="[a-z ]{4,9}")]
        while monotonic() < until and not self.problems:
            plain.append(short(self.server))
            guided.append(short(self.server, regex="[a-z ]{4,9}"))
            self.most = max(self.most, self.server.memory())
            sleep(0.3)
        for thread in threads:
            thread.join()
        return sorted(plain), sorted(guided)

    def judge(self, kind: str, usual: list[float], found: list[float]) -> None:
        """Judges the sorted seconds of one kind of short texts: usual, during harmless grammars; found, during the
        others."""
        for about, some in (("harmless grammars", usual), ("the others", found)):
            print(
                f"{len(some)} short texts{kind} beside {about}: median {some[len(some) // 2]:.2f} s, worst "
                f"{some[-1]:.2f}"
            )
        if found[-1] > usual[-1] + MOST_DELAY:
            self.problems.append(
                f"a short text{kind} took {found[-1]:.2f} s, beside harmless grammars at most {usual[-1]:.2f}"
            )

    def judge_memory(self, before: int) -> None:
        """before: bytes that the server held before the bad grammars."""
        end = monotonic() + _PAUSE_SECONDS
        while (after := self.server.memory()) > before + MOST_GROWTH and monotonic() < end:
            sleep(0.5)
        print(f"memory: {before >> 20} MiB before, at most {self.most >> 20}, {after >> 20} after")
        if after > before + MOST_GROWTH:
            self.problems.append(f"memory grew from {before >> 20} to {after >> 20} MiB")
        if (status := self.server.process.poll()) is not None:
            self.problems.append(f"the server has ended with status {status}")

    def _guarded(self, work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except FAILURES as error:
                self.problems.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], metavar="KIND", help=f"of {', '.join(KINDS)}"
    )
    args = parser.parse_args()
    trial = Trial(Server(args.bundle), args.clients)
    try:
        trial.begin()
        usual = trial.delays(HARMLESS, args.minutes / 5)
        before = trial.server.memory()
        found = trial.delays({name: KINDS[name] for name in args.kinds}, args.minutes * 4 / 5)
        for kind, usually, seconds in zip(("", " with a grammar"), usual, found, strict=True):
            trial.judge(kind, usually, seconds)
        trial.judge_memory(before)
    except FAILURES as error:
        trial.problems.append(f"{type(error).__name__}: {error}")
    finally:
        trial.server.process.send_signal(signal.SIGTERM)
        trial.server.process.wait()
    for name, count in sorted(trial.counts.items()):
        print(f"{count:5} {name}")
    print(*trial.problems or ["nothing found"], sep="\n")
    return int(bool(trial.problems))


if __name__ == "__main__":
    sys.exit(main())
