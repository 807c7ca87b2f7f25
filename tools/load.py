"""Compares servers of OpenAI's API under load: tokens per second in all, and the time to the first token.

    python -m tools.load ours=http://127.0.0.1:8000 theirs=http://127.0.0.1:8080 --prompts FILE ... --clients 1 2 4

Sends every server the same prompts through /v1/chat/completions, greedy and streamed, in several rounds. A round
measures the servers one after another for each number of concurrent clients. Prompts begin with the round and the
number of clients, so that no server has them cached. Two other prompts warm up each server. Prints a table over all
rounds and writes it with all times to ``--out``.
"""

import argparse
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any
from urllib.request import Request, urlopen

_WARM_UP = 2  # prompts before the ones that count


@dataclass
class Answer:
    """Seconds since the request, and tokens by the server's own count."""

    first: float
    whole: float
    tokens: int
    text: str


def ask(url: str, model: str, prompt: str, most: int) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": most,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    started, first, tokens, text = perf_counter(), 0.0, 0, ""
    with urlopen(request, timeout=600) as response:
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"error: {url} failed: {chunk['error']}")
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                first = first or (perf_counter() - started if text else 0.0)
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return Answer(first, perf_counter() - started, tokens, text)


def run(url: str, prompts: Sequence[str], clients: int, most: int) -> tuple[list[Answer], float]:
    """Sends all prompts from ``clients`` concurrent clients. Returns the answers in the prompts' order, and the total
    seconds."""
    with urlopen(f"{url}/v1/models", timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    for prompt in prompts[:_WARM_UP]:
        ask(url, model, f"Repeat: {prompt}", 16)
    left, lock, found = list(enumerate(prompts)), threading.Lock(), dict[int, Answer]()

    def work() -> None:
        while True:
            with lock:
                if not left:
                    return
                at, prompt = left.pop(0)
            found[at] = ask(url, model, prompt, most)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    started = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = perf_counter() - started
    if len(found) < len(prompts):
        raise SystemExit(f"error: {url} answered {len(found)} of {len(prompts)} prompts")
    return [found[at] for at in range(len(prompts))], seconds


def table(results: dict[tuple[int, str], tuple[list[Answer], float]]) -> str:
    lines = [
        "| clients | server | tokens/s | first token, median ms | 99th percentile | tokens |",
        "|---|---|---|---|---|---|",
    ]
    for (clients, name), (answers, seconds) in results.items():
        firsts, tokens = [1000 * answer.first for answer in answers], sum(answer.tokens for answer in answers)
        last = quantiles(firsts, n=100, method="inclusive")[-1]
        lines.append(f"| {clients} | {name} | {tokens / seconds:.1f} | {median(firsts):.0f} | {last:.0f} | {tokens} |")
    return "\n".join(lines)


def read_prompts(files: Sequence[Path], count: int) -> list[str]:
    """The first prompts of each file, interleaved."""
    by_file = [[json.loads(line) for line in file.read_text("utf-8").splitlines()[:count]] for file in files]
    return [
        str(one["turns"][0] if "turns" in one else one["prompt"]) for same in zip(*by_file, strict=True) for one in same
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL", help="servers to compare")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL with 'turns' or 'prompt'")
    parser.add_argument("--count", type=int, default=2, help="prompts per file (default: 2)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4], help="numbers of clients (default: 1 2 4)")
    parser.add_argument("--rounds", type=int, default=1, help="(default: 1)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of an answer at most (default: 128)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/load.json"), help="file for all times (default: build/load.json)"
    )
    args = parser.parse_args(argv)
    servers = dict(one.split("=", 1) for one in args.servers)
    prompts = read_prompts(args.prompts, args.count)
    results = {(clients, name): (list[Answer](), 0.0) for clients in args.clients for name in servers}
    for number in range(args.rounds):
        for clients, name in results:
            asked = [f"{number}.{clients}. {prompt}" for prompt in prompts]
            found = run(servers[name].rstrip("/"), asked, clients, args.new_tokens)
            print(table({(clients, name): found}).splitlines()[-1], flush=True)
            answers, seconds = results[clients, name]
            results[clients, name] = [*answers, *found[0]], seconds + found[1]
    content: list[dict[str, Any]] = [
        {"clients": clients, "server": name, "seconds": seconds, "answers": [asdict(answer) for answer in answers]}
        for (clients, name), (answers, seconds) in results.items()
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=1), "utf-8")
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
