"""Compares this project with other programs that run the same weights: speed, tau, time to first token, memory, equal
texts.

    python -m tools.bench BUNDLE ... [--pair demo] [--draft-model DIR] [--prompts FILE ...] [--out build/bench]

Decodes every prompt greedily in every way, one after another: bundles (speculative with and without lookups, and
plain), transformers (greedy, prompt lookup, assisted), optimum over ONNX Runtime, onnxruntime-genai (plain, n-grams,
draft model), OpenVINO GenAI and vLLM (likewise), and llama.cpp's server (likewise, the fastest of its n-grams). Each
peer has its own environment and processes (``tools/peers``).
Writes ``bench.md``, ``bench.json`` and plots; ways that cannot run are listed with the reason. If memory does not hold
all processes at once, those that fit alternate prompt by prompt, and every round includes all of them.

Environments and converted models are created once. llama.cpp is compiled with CMAKE_ARGS of the environment. If its AMX
kernels crash (its issue 20824), use CMAKE_ARGS="-DCMAKE_C_FLAGS=-mno-amx-tile -DCMAKE_CXX_FLAGS=-mno-amx-tile".
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from runtime.bundle.reader import Bundle
from runtime.cli.command import run as run_command
from runtime.errors import UnavailableError
from tools import report
from tools.bench_setup import ROOT, Prompt, about, digest, environment, tokenized
from tools.measure import distinct
from tools.peers import ours
from tools.peers.protocol import PeerError, Way, Worker

PEERS = "transformers", "optimum", "genai", "openvino", "vllm", "llama_cpp"
TRIED, WARM_UP = 48, 16  # tokens per prompt for choosing settings, and tokens before anything is timed


@dataclass
class Program:
    """Ways that share a process: its command, the arguments of its ``load``, and the results of each way."""

    peer: str
    command: Sequence[str | Path]
    loading: Mapping[str, Any]
    ways: list[Way]
    results: list[dict[str, Any]]
    worker: Worker | None = None
    peak_mb: float = 0.0

    @property
    def sound(self) -> list[tuple[Way, dict[str, Any]]]:
        """The ways that have not failed."""
        return [(way, result) for way, result in zip(self.ways, self.results, strict=True) if not result["failed"]]


@dataclass
class Bench:
    """A run of the benchmark and its results so far."""

    args: argparse.Namespace
    results: list[dict[str, Any]] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    broken: dict[Path, str] = field(default_factory=dict)  # failed conversions and their errors; none is tried twice

    # --- setting up

    def add(self, peer: str, module: ModuleType, ways: Iterable[Way]) -> None:
        """Prepares a peer's environment and models. A failure is noted in the results of the ways that need them."""
        by_loading: dict[str, Program] = {}
        try:
            python, unready = environment(peer, module, self.args.envs), ""
        except PeerError as error:
            python, unready = Path(), str(error)
        for way in ways:
            result = {
                "name": way.name,
                "peer": peer,
                "weights": way.weights,
                "plain": way.plain,
                "failed": "",
                "setting": {},
                "tried": [],
                "versions": {},
                "peak_mb": 0.0,
                "texts": [],
            }
            self.results.append(result)
            try:
                if way.draft and not self.args.draft_model:
                    raise PeerError("no --draft-model was given")
                if unready:
                    raise PeerError(unready)
                command: list[str | Path] = [python, "-m", module.__name__]
                loading = {
                    **way.options,
                    "threads": self.args.threads,
                    "model": way.model or self.model(peer, module, command, way.weights, self.args.pair / "target"),
                }
                if way.draft:
                    loading["draft"] = self.model(peer, module, command, way.weights, self.args.draft_model)
            except PeerError as error:
                result["failed"] = str(error)
                continue
            key = json.dumps(loading, sort_keys=True)
            if key not in by_loading:
                by_loading[key] = Program(peer, command, loading, [], [])
                self.programs.append(by_loading[key])
            by_loading[key].ways.append(way)
            by_loading[key].results.append(result)

    def model(
        self, peer: str, module: ModuleType, command: Sequence[str | Path], weights: str, checkpoint: Path
    ) -> str:
        """The path of the checkpoint in the peer's format; converts it if that has not been done before."""
        if not hasattr(module, "convert"):
            return str(checkpoint.resolve())
        out = self.args.models.resolve() / digest(checkpoint) / f"{peer}-{weights}"
        if out in self.broken:
            raise PeerError(self.broken[out])
        if not out.is_dir():
            print(f"{peer}: converting {checkpoint} to {weights}", file=sys.stderr)
            partial = out.with_name(f".{out.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
            worker = self.open(command, f"{peer}-convert")
            try:
                worker.ask("convert", 3600, checkpoint=str(checkpoint.resolve()), out=str(partial), weights=weights)
                partial.rename(out)
            except PeerError as error:
                self.broken[out] = str(error)
                raise
            finally:
                worker.close()
                shutil.rmtree(partial, ignore_errors=True)
        return str(out)

    def open(self, command: Sequence[str | Path], log: str) -> Worker:
        variables = {
            "OMP_NUM_THREADS": str(self.args.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return Worker(command, self.args.out / f"{log}.log", ROOT, variables)

    # --- running

    def measure(self, prompts: Sequence[Prompt], tuning: Sequence[Prompt], save: Callable[[], None]) -> None:
        """Decodes every prompt in every way; the processes that fit into memory alternate. save: called after every
        prompt."""
        size = -(-len(prompts) // self.args.rounds)
        for start in range(0, len(prompts), size):
            waiting = [program for program in self.programs if program.sound]
            whole = len(waiting)
            while waiting:
                alive: list[Program] = []
                while waiting and (not alive or self.fits(waiting[0])):
                    self.start(waiting[0], tuning)
                    alive.append(waiting.pop(0))
                for prompt in prompts[start : start + size]:
                    for program in alive:
                        # The order alternates, because the first way finds the CPU caches filled by another process.
                        for way, result in program.sound[:: -1 if prompt.number % 2 else 1]:
                            self.text(program, way, result, prompt)
                    save()
                    print(f"prompt {prompt.number} of {prompt.set}, {len(alive)} processes", file=sys.stderr)
                if len(alive) < whole:
                    self.close(alive)
        self.close(self.programs)
        save()

    def fits(self, program: Program) -> bool:
        """Whether memory holds another process, judged by its own earlier peak, or by the largest peak of any."""
        if program.worker:
            return True
        target = sum(file.stat().st_size for file in (self.args.pair / "target").glob("*.safetensors")) / 2**20
        expected = program.peak_mb or max(2 * target, *(other.peak_mb for other in self.programs))
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) / 1024 > expected + 1024

    def start(self, program: Program, tuning: Sequence[Prompt]) -> None:
        """Starts a program's process, loads and warms up, and chooses settings unless they have been chosen."""
        if program.worker:
            return
        names = [way.name for way in program.ways]
        print(f"loading {', '.join(names)}", file=sys.stderr)
        program.worker = self.open(program.command, names[0].replace(", ", "-").replace(" ", "-"))
        try:
            versions = program.worker.ask("load", **program.loading)["versions"]
        except PeerError as error:
            self.fail(program, str(error))
            self.close([program])
            return
        for way, result in program.sound:
            result["versions"] = versions
            try:
                warm = result["setting"] or way.settings[0]
                program.worker.ask("generate", ids=tuning[0].ids, count=WARM_UP, **warm)
                if not result["setting"] and len(way.settings) > 1:
                    result["tried"] = [
                        {"setting": setting, "speed": self.try_out(program.worker, setting, tuning)}
                        for setting in way.settings
                    ]
                    result["setting"] = max(result["tried"], key=lambda trial: trial["speed"])["setting"]
                result["setting"] = result["setting"] or way.settings[0]
            except PeerError as error:
                self.fail(program, str(error), result)

    def try_out(self, worker: Worker, setting: Mapping[str, Any], tuning: Sequence[Prompt]) -> float:
        texts = [
            worker.ask("generate", ids=prompt.ids, count=min(TRIED, self.args.new_tokens), **setting)
            for prompt in tuning
        ]
        return report.speed(*texts) or 0.0

    def text(self, program: Program, way: Way, result: dict[str, Any], prompt: Prompt) -> None:
        assert program.worker
        try:
            text = program.worker.ask("generate", ids=prompt.ids, count=self.args.new_tokens, **result["setting"])
        except PeerError as error:
            self.fail(program, str(error), result)
            return
        result["texts"].append({"set": prompt.set, "prompt": prompt.number, "prompt_tokens": len(prompt.ids), **text})
        result["peak_mb"] = program.peak_mb = max(program.peak_mb, program.worker.peak_mb)

    def fail(self, program: Program, reason: str, result: dict[str, Any] | None = None) -> None:
        """Notes that a way failed, or all ways of its process if the process has ended or ``result`` is None."""
        assert program.worker
        dead = program.worker.process.poll() is not None
        for failed in program.results if dead or result is None else [result]:
            failed["failed"] = failed["failed"] or reason
            print(f"{failed['name']}: {reason}", file=sys.stderr)

    @staticmethod
    def close(programs: Iterable[Program]) -> None:
        for program in programs:
            if program.worker:
                program.worker.close()
                program.worker = None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="*", help="bundles of the pair, compiled for the CPU")
    parser.add_argument(
        "--pair", type=Path, default=ROOT / "demo", help="folder with target/ and drafter/ (default: demo)"
    )
    parser.add_argument(
        "--draft-model", type=Path, help="small Llama with the same vocabulary, for peers that draft with one"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=PEERS, help="peers to run besides this project (default: all)"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        default=[],
        help="JSONL with 'turns', 'prompt' or 'text', or .txt (default: held-out code)",
    )
    parser.add_argument("--chat", action="store_true", help="ask the prompts through the target's chat template")
    parser.add_argument("--longest", type=int, help="positions of the longest prompt (default: what fits)")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        metavar="N",
        help="instead of whole prompts, pieces of their text with so many tokens",
    )
    parser.add_argument("--count", type=int, default=8, help="prompts per file, or per length (default: 8)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate per prompt (default: 128)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every way (default: all cores)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds that divide the prompts, with every way (default: 2)"
    )
    parser.add_argument(
        "--envs",
        type=Path,
        default=ROOT / "build/bench-envs",
        help="folder where peers are installed, once (default: build/bench-envs)",
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=ROOT / "build/bench-models",
        help="folder for converted models, created once (default: build/bench-models)",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/bench", help="folder for the results (default: build/bench)"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="only recreate the table and plots from OUT/bench.json, which a run saves after every prompt",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    sizes = {n: getattr(args, n) for n in ("count", "new_tokens", "threads", "rounds", "longest")}
    for name, value in (sizes | {"contexts": min(args.contexts or [1])}).items():
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}: give 1 or more")
    if args.chat and args.contexts:
        parser.error("--contexts cuts text, and with it chat templates: leave out --chat")
    distinct(parser, args.bundles)
    return run_command(lambda: report.render(args.out) if args.again else fresh(args))


def fresh(args: argparse.Namespace) -> int:
    if not importlib.util.find_spec("matplotlib"):
        raise UnavailableError("matplotlib, which draws the plots, is missing: pip install '.[bench]'")
    for bundle in args.bundles:
        Bundle(bundle)
    prompts, tuning, cut = tokenized(args)
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    bench.add("ours", ours, ours.ways(args.bundles))
    for name in args.peers:
        peer = importlib.import_module(f"tools.peers.{name}")
        bench.add(name, peer, peer.ways())
    by_set = dict(Counter(prompt.set for prompt in prompts))
    setup = {"about": about(args, cut), "prompts": by_set, "lengths": sorted(set(args.contexts or ()))}

    def save() -> None:
        plain = [result["name"] for result in bench.results if not result["failed"] and not result["plain"]]
        reference = next((name for name in plain if name == "transformers, greedy"), plain[0] if plain else "")
        partial = args.out / ".bench.json.partial"
        partial.write_text(json.dumps({**setup, "reference": reference, "ways": bench.results}), "utf-8")
        partial.replace(args.out / "bench.json")

    try:
        bench.measure(prompts, tuning, save)
    finally:
        bench.close(bench.programs)
    return report.render(args.out)


if __name__ == "__main__":
    sys.exit(main())
