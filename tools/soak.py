"""Serves a bundle for a long time to badly behaved clients, and checks every answer by plain decoding.

    python -m tools.soak BUNDLE --prompts FILE ... --minutes 60

Starts ``gumiho serve`` with its log on a full disk (``/dev/full``). Clients send the prompts with random settings,
streamed or not, read slowly, leave early, or send nonsense. Halfway, another copy of the bundle is renamed over the
served one. The server's memory and open files are sampled every ten seconds. Memory is private memory (RssAnon): mapped
weights become resident as tokens first need their rows of the embedding, and belong to the page cache. At first, a
conversation fills the capacity of every stream, so that the caches of target and drafter, which grow with their texts,
do not grow later.

Two other processes decode every complete answer again, plainly and with fresh caches, and finish after the last
request. Writes ``OUT/soak.json``. Exits with 1 if an answer differs by more than a near-tie, a request had no answer,
or memory or the number of open files has grown.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

from runtime import GumihoError
from runtime.bundle.reader import Bundle
from tools.load import read_prompts
from tools.replay import Checks

_START_SECONDS, _SAMPLE_SECONDS = 60, 10
_SETTLED_SECONDS = 600  # memory counts from the tenth minute on, or the second half of a shorter run
_STEP = 200  # tokens by which the first conversations grow
_MOST_GROWTH = 20 << 20  # bytes
_KINDS = {"whole": 5, "streamed": 5, "slow": 1, "left": 3, "nonsense": 2}  # relative frequencies


@dataclass
class Soak:
    """The state and results of a run."""

    port: int
    prompts: Sequence[str]
    most: int
    checks: Checks
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    problems: list[str] = field(default_factory=list)
    server: int = 0  # process id
    # Seconds, private bytes, open files, mapped bytes.
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)

    def wait(self) -> None:
        """Waits until the server answers."""
        for _ in range(_START_SECONDS * 10):
            with suppress(OSError), closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            sleep(0.1)
        raise GumihoError(
            f"the server has not answered within {_START_SECONDS} seconds: start `gumiho serve` to see why"
        )

    def fill(self, tokens: Sequence[int], streams: int) -> None:
        """Fills every stream with these tokens, in a different order for each. Prompts grow step by step, since the
        drafter reads only the last tokens of a prompt."""

        def read(stream: int) -> None:
            whole = [*tokens[stream:], *tokens[:stream]]
            for end in (*range(_STEP, len(whole) - _STEP, _STEP), len(whole)):
                body = {"model": "soak", "prompt": whole[:end], "max_tokens": min(_STEP // 8, len(whole) + 1 - end)}
                with closing(HTTPConnection("127.0.0.1", self.port, timeout=600)) as connection:
                    connection.request(
                        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
                    )
                    if (status := connection.getresponse().status) != 200:
                        raise GumihoError(f"the server answered a prompt of {end} tokens with status {status}")

        with ThreadPoolExecutor(streams) as threads:
            list(threads.map(read, range(streams)))

    def client(self, seed: int, until: float) -> None:
        draw = random.Random(seed)
        while monotonic() < until:
            kind = draw.choices([*_KINDS], [*_KINDS.values()])[0]
            body = self.request(draw)
            try:
                done = self.ask(kind, body, draw)
            except (OSError, HTTPException, ValueError, KeyError) as error:
                done = "no answer"
                with self.lock:
                    self.problems.append(f"{kind}: {type(error).__name__}: {error}")
            with self.lock:
                self.counts[f"{kind}: {done}"] += 1

    def request(self, draw: random.Random) -> dict[str, Any]:
        """A conversation of one or several turns, with random settings."""
        turns = [draw.choice(self.prompts)[: draw.choice([60, 300, 1500])] for _ in range(draw.choice([1, 1, 1, 3]))]
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        settings: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 40},
            {"temperature": 0, "repetition_penalty": 1.1},
            {"temperature": 0.7, "stop": ["\n\n"], "frequency_penalty": 0.3},
        ]
        return {
            "messages": messages,
            "seed": draw.randrange(1 << 31),
            "max_tokens": draw.randint(1, self.most),
            **draw.choice(settings),
        }

    def ask(self, kind: str, body: dict[str, Any], draw: random.Random) -> str:
        """Sends a request and returns how it ended."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            stream = kind in ("streamed", "slow") or (kind == "left" and draw.random() < 0.5)
            content = json.dumps({"model": "soak", "stream": stream, **body})
            if kind == "nonsense":
                content = draw.choice(
                    [
                        content[: draw.randrange(len(content))],
                        '{"model": "soak", "messages": 5}',
                        "[]",
                        "\x00" * 99,
                        content.replace("seed", "sead"),
                    ]
                )
            connection.request("POST", "/v1/chat/completions", content.encode(), {"Content-Type": "application/json"})
            if kind == "left":
                sleep(draw.random() * 0.6)
                return "left"
            response = connection.getresponse()
            if kind == "nonsense" or response.status != 200:
                text = json.loads(response.read())["error"]["message"]
                if response.status >= 500 or (kind != "nonsense" and response.status != 429):
                    raise ValueError(f"status {response.status}: {text}")
                return str(response.status)
            text = (
                self.streamed(response, kind == "slow")
                if stream
                else json.loads(response.read())["choices"][0]["message"]["content"]
            )
            self.checks.add(body, text)
            with self.lock:
                self.answers += 1
            return "200"
        finally:
            connection.close()

    @staticmethod
    def streamed(response: Any, slowly: bool) -> str:
        text, ended = "", False
        for line in response:
            if slowly:
                sleep(0.02)
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                text += "".join(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])
        if not ended:
            raise ValueError("the stream ended before its end")
        return text

    def sample(self, seconds: float) -> None:
        status = Path(f"/proc/{self.server}/status").read_text("ascii")
        memory, mapped = (1024 * int(status.split(f"{name}:")[1].split()[0]) for name in ("RssAnon", "RssFile"))
        self.samples.append((seconds, memory, len(os.listdir(f"/proc/{self.server}/fd")), mapped))

    def growth(self) -> tuple[int, int]:
        """Growth in bytes and open files from the first to the last samples after warm-up. Bytes are medians, since
        running passes allocate temporarily."""
        settled = min(_SETTLED_SECONDS, self.samples[-1][0] / 2)
        later = [sample for sample in self.samples if sample[0] >= settled]
        count = max(1, len(later) // 10)
        first, last = (median(sample[1] for sample in part) for part in (later[:count], later[-count:]))
        return int(last - first), later[-1][2] - later[0][2]


def run(soak: Soak, clients: int, minutes: float, halfway: Callable[[], object]) -> None:
    """Runs clients for some minutes. halfway: called once, after half of the time."""
    started = monotonic()
    until, due = started + 60 * minutes, True
    threads = [threading.Thread(target=soak.client, args=(seed, until)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sleep(_SAMPLE_SECONDS)
        soak.sample(monotonic() - started)
        if due and monotonic() > (started + until) / 2:
            halfway()
            due = False
    sleep(2)
    soak.sample(monotonic() - started)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL with 'turns' or 'prompt'")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=6, help="more than there are streams (default: 6)")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer at most (default: 64)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/soak"), help="folder for the report and two copies of the bundle"
    )
    args = parser.parse_args(argv)
    served, other = args.out / "soak", args.out / "other"
    link = os.stat(args.bundle).st_dev == os.stat(args.out.parent).st_dev
    for copy in (served, other):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(args.bundle, copy, copy_function=os.link if link else shutil.copy2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    soak = Soak(port, read_prompts(args.prompts, 40), args.new_tokens, Checks(args.bundle))
    command = [sys.executable, "-m", "runtime.serve", str(served), "--port", str(port), "--streams", str(args.streams)]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(command, stderr=full)
    try:
        soak.server = process.pid
        soak.wait()
        bundle = Bundle(args.bundle)
        text, most = "\n".join(soak.prompts), bundle.manifest.capacity - 1
        tokens = bundle.tokenizer.encode(text, add_special_tokens=False).ids
        soak.fill((tokens * -(-most // len(tokens)))[:most], args.streams)
        run(soak, args.clients, args.minutes, lambda: (served.rename(args.out / "before"), other.rename(served)))
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    finally:
        process.kill()
    print(
        f"{dict(soak.counts)}; {soak.checks.waiting} of {soak.answers} answers to check; server's exit status {status}",
        flush=True,
    )
    with soak.checks:
        verdict = soak.checks.verdict()
    bytes_grown, files_grown = soak.growth()
    report = {
        "minutes": args.minutes,
        "clients": args.clients,
        "streams": args.streams,
        "requests": dict(soak.counts),
        "answers": soak.answers,
        "tokens": verdict.tokens,
        "near_ties": verdict.margins,
        "differ": verdict.differs,
        "problems": soak.problems,
        "bytes_grown": bytes_grown,
        "files_grown": files_grown,
        "exit_status": status,
        "samples": soak.samples,
    }
    (args.out / "soak.json").write_text(json.dumps(report, indent=1), "utf-8")
    print({name: value for name, value in report.items() if name != "samples"})
    return int(bool(verdict.differs or soak.problems or status or bytes_grown > _MOST_GROWTH or files_grown > 0))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GumihoError as error:
        sys.exit(f"error: {error}")
