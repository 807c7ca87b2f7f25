"""Open questions about ONNX Runtime on CUDA and TensorRT for RTX, each a function that adds to a report."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from runtime import load
from runtime.backends import backend
from runtime.bundle.reader import Bundle
from runtime.cli.checks import selftest
from runtime.device_check.prompts import prompts
from runtime.engines.store import compile_engines, find_engines
from runtime.errors import GumihoError

from .runner import Runner

_SETTINGS = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 7}}
_TOKENS = 48  # of a text
_TEXTS = 12  # prompts of a bundle
_BUILD = 50.0  # seconds that TensorRT for RTX may take for a plan


class Log(Protocol):
    """What a report is to these functions."""

    @property
    def left(self) -> float: ...

    def add(self, **result: Any) -> None: ...

    def attempt(
        self, what: Mapping[str, Any], needs: float, work: Callable[[], Mapping[str, Any]]
    ) -> Mapping[str, Any]: ...


def passes(runner: Runner, sets: Mapping[str, Any], report: Log, measure: Callable[..., Mapping[str, Any]]) -> None:
    """Times passes by their number of rows, and with int4 weights with and without the fused product of ONNX Runtime.
    All are profiled by node."""
    for name, graphs in sets.items():
        switches = ("1", "0") if "int4" in name else ("1",)
        for fused in switches:
            os.environ["ORT_FPA_INTB_GEMM"] = fused
            for kind in sorted(graphs, key=lambda kind: int(kind.partition("-")[2] or 0)):
                for variant in ("base", "decomposed", "grouped", "lengths"):
                    if variant not in graphs[kind]:
                        continue
                    what = {"passes": name, "graph": kind, "variant": variant}
                    what |= {"fused": fused} if len(switches) > 1 else {}
                    entry = graphs[kind][variant]
                    report.attempt(what, 8, partial(measure, runner, entry, {}, variant == "base"))
            os.environ.pop("ORT_FPA_INTB_GEMM")


def texts(bundles: Sequence[str], name: str, report: Log) -> None:
    """Compares texts of bundles with plain decoding's, with whole trees and no lookups, so that drafts matter. The time
    left is shared."""
    for i, path in enumerate(bundles):
        share = report.left / (len(bundles) - i)
        until = report.left - share
        report.attempt({"texts": path}, 10, partial(_texts, path, name, report, until))


def _texts(path: str, name: str, report: Log, until: float) -> dict[str, Any]:
    """until: how much time is left for others."""
    instance, bundle = backend(name), Bundle(path)
    try:
        find_engines(bundle, instance)
    except GumihoError:
        compile_engines(bundle, instance)
    found: dict[str, Any] = {}
    with load(path, name) as model:
        whole = {"rows": bundle.manifest.rows, "lookup": False}
        for kind, settings in _SETTINGS.items():
            tally = {"texts": 0, "alike": 0, "near_ties": 0, "defects": 0, "tokens": 0, "cycles": 0}
            for prompt in prompts(model)[:_TEXTS]:
                if report.left < until:
                    break
                one = selftest.compare(model, prompt, _TOKENS, {**whole, **settings})
                stats = one.speculative.stats
                counts = 1, one.alike, len(one.ties), one.defects, stats.cycle_tokens, stats.cycles
                tally = {key: tally[key] + int(count) for key, count in zip(tally, counts, strict=True)}
            found[kind] = tally | {"tau": round(tally["tokens"] / max(1, tally["cycles"]), 2)}
    return found


def rtx(graph: Path, report: Log) -> None:
    """Asks TensorRT for RTX for a plan of a small graph: for the current device, for its own capability, and without
    naming any. Each attempt is a process of its own, which may crash."""
    for asked in ("CURRENT", "SM90", ""):
        report.attempt({"rtx": asked or "none named"}, 10, partial(_apart, str(graph), asked, report.left))


def _apart(graph: str, asked: str, left: float) -> dict[str, Any]:
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_build, args=(graph, asked, sender))
    process.start()
    sender.close()
    said: dict[str, Any] = {}
    limit = min(_BUILD, left)
    try:
        while receiver.poll(limit):
            said |= receiver.recv()
    except EOFError:
        pass
    process.join(1)
    if process.is_alive():
        process.kill()
        said["killed"] = f"after {limit:.0f} s"
    return said | {"exit": process.exitcode}


def _build(graph: str, asked: str, sender: Any) -> None:
    """Builds, deserializes and makes a context. Sends what is known after every step."""
    import tensorrt_rtx_bindings as trt

    lines: list[str] = []

    class Log(trt.ILogger):
        def log(self, severity: Any, msg: str) -> None:
            if int(severity) <= int(trt.ILogger.WARNING):
                lines.append(msg.strip()[:300])

    def tell(**facts: Any) -> None:
        sender.send({**facts, "log": lines[-6:]})

    log = Log()
    tell(version=trt.__version__, capabilities=[name for name in dir(trt.ComputeCapability) if name.isupper()])
    try:
        builder = trt.Builder(log)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        tell(parsed=trt.OnnxParser(network, log).parse(Path(graph).read_bytes()), step="parse")
        config = builder.create_builder_config()
        if asked:
            config.num_compute_capabilities = 1
            tell(set=str(config.set_compute_capability(getattr(trt.ComputeCapability, asked), 0)), step="set")
        plan = builder.build_serialized_network(network, config)
        tell(plan=plan and plan.nbytes, step="build")
        if plan:
            engine = trt.Runtime(log).deserialize_cuda_engine(plan)
            tell(engine=engine is not None, step="deserialize")
            tell(context=bool(engine and engine.create_execution_context()), step="context")
    except Exception as error:
        tell(failed=f"{type(error).__name__}: {error}"[:400])
