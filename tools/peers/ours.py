"""This project's runtime over bundles: speculative as planned, the same without prompt lookup, and plain."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime import Model, load
from runtime.bundle.reader import Bundle
from tools.peers.protocol import Text, Way, serve

REQUIREMENTS: tuple[tuple[str, ...], ...] = ()  # runs in the environment of the benchmark


def ways(bundles: list[Path]) -> list[Way]:
    all_ways = []
    for bundle in bundles:
        manifest = Bundle(bundle).manifest
        weights = manifest.weights.get("target", manifest.dtype).split(",")[0].replace("float", "fp")
        plain = f"ours, {bundle.name}, plain"
        all_ways += [
            Way(f"ours, {bundle.name}", weights, plain, str(bundle)),
            Way(f"ours, {bundle.name}, no lookup", weights, plain, str(bundle), settings=[{"lookup": False}]),
            Way(plain, weights, model=str(bundle), settings=[{"speculate": False}]),
        ]
    return all_ways


def timed(model: Model, ids: Sequence[int], count: int, **setting: Any) -> Text:
    started, first = time.perf_counter(), None
    generation = model.generate(ids, count, **setting)
    for cycle in generation.cycles():
        first = first or (time.perf_counter() - started, len(cycle.tokens))
    assert first
    return Text(generation.ids, time.perf_counter() - started, *first, generation.stats.cycles)


class Loaded:
    def __init__(self, model: str, threads: int) -> None:
        import numpy
        import onnxruntime

        self.model = load(model, threads=threads)
        self.versions = {"onnxruntime": onnxruntime.__version__, "numpy": numpy.__version__}

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        return timed(self.model, ids, count, **setting)


if __name__ == "__main__":
    serve(Loaded)
