"""Metrics for Prometheus, under vLLM's names where the meaning is the same."""

from collections.abc import Callable
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from ..decoding.stats import Stats
from .slots import Slots

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """A server's metrics. Times are in seconds."""

    def __init__(self, slots: Slots) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(name, text, registry=registry).set_function(value)

        gauge("vllm:num_requests_running", "Texts being decoded.", lambda: slots.busy)
        gauge("vllm:num_requests_waiting", "Texts waiting for a stream.", lambda: slots.queued)
        gauge("gumiho:streams", "Streams, each with caches of its own.", lambda: slots.count)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.requests = counter("gumiho:http_requests", "Requests by path and status.", "path", "status")
        self._ended = counter("vllm:request_success", "Texts that ended, by reason.", "finished_reason")
        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts, cached ones included.")
        self._hits = counter("vllm:prefix_cache_hits", "Tokens of prompts that were in a stream's caches.")
        self._tokens = counter("vllm:generation_tokens", "Tokens emitted.")
        self._passes = counter("gumiho:target_passes", "Passes of the target after prefills.")
        self._drafts = counter("vllm:spec_decode_num_drafts", "Draft trees verified.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._depths = counter("vllm:spec_decode_num_accepted_tokens_per_pos", "The same by depth.", "position")
        self._lookups = counter("gumiho:lookups", "Prompt lookups verified.")
        self._looked_up = counter("gumiho:looked_up_tokens", "Looked-up tokens accepted.")
        self._first = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the request to its first token, queue included.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._whole = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the request to its last token.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._each = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Between the first and the last token, by token.",
            registry=registry,
            buckets=_PER_TOKEN,
        )

    def count(self, stats: Stats, begun: float, first: float | None) -> None:
        """Counts a text that has ended or was cancelled. begun, first: times (``perf_counter``) of the request's
        arrival and of the first token sent, None if none was."""
        now = perf_counter()
        self._ended.labels(stats.finish_reason or "abort").inc()
        self._prompt.inc(stats.prompt_tokens)
        self._hits.inc(stats.cached_tokens)
        self._tokens.inc(stats.tokens)
        self._passes.inc(stats.cycles)
        self._drafts.inc(stats.cycles - stats.lookups - stats.rows.get(1, 0))
        self._accepted.inc(sum(stats.accepted))
        for depth, count in enumerate(stats.accepted):
            self._depths.labels(str(depth)).inc(count)
        self._lookups.inc(stats.lookups)
        self._looked_up.inc(stats.looked_up)
        self._whole.observe(now - begun)
        if first is not None:
            self._first.observe(first - begun)
            if stats.tokens > 1:
                self._each.observe((now - first) / (stats.tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)
