"""Checks texts by decoding them again plainly, with fresh caches, in separate processes."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from runtime import Generation, Model, Stream, load
from runtime.cli.checks.lossless import Difference, compare_with_plain, differences

_model: Model | None = None  # of this process


@dataclass(frozen=True)
class Verdict:
    """The result of a check. tokens: their number in plain decoding. margins: of near-ties, relative to the largest
    logit. differs: other differences, one line each."""

    tokens: int
    margins: Sequence[float] = ()
    differs: Sequence[str] = ()

    def __add__(self, other: "Verdict") -> "Verdict":
        return Verdict(self.tokens + other.tokens, [*self.margins, *other.margins], [*self.differs, *other.differs])


def start(model: Stream, request: Mapping[str, Any], speculate: bool = True) -> Generation:
    """Starts the generation of a request. request: ``messages`` or ``prompt`` (token ids), ``max_tokens``, and
    settings."""
    options = {name: value for name, value in request.items() if name not in ("messages", "prompt", "max_tokens")}
    prompt = request.get("prompt") or model.chat(request["messages"])
    return model.generate(prompt, request["max_tokens"], speculate, **options)


def check(model: Model, request: Mapping[str, Any], found: str | Sequence[int]) -> Verdict:
    """Compares the text of a request (see ``start``) with plain decoding. found: the text, or its token ids."""
    plain = start(model, request, speculate=False)
    text = "".join(plain)
    if found == (text if isinstance(found, str) else plain.ids):
        return Verdict(len(plain.ids))
    other = list[Difference]()
    if not isinstance(found, str):
        other = compare_with_plain(model, plain.prompt, found, plain.settings)
    elif "".join(again := start(model, request)) == found:
        other = differences(model, again)
    if other and all(one.near for one in other):
        return Verdict(len(plain.ids), [one.margin for one in other])
    return Verdict(
        len(plain.ids), differs=[f"{request}: {found!r} instead of {text if isinstance(found, str) else plain.ids!r}"]
    )


def _open(bundle: Path) -> None:
    global _model
    _model = load(bundle, threads=1)


def _check(request: Mapping[str, Any], found: str | Sequence[int]) -> Verdict:
    assert _model
    return check(_model, request, found)


@dataclass
class Checks:
    """Checks texts of a bundle in other processes of one thread each."""

    bundle: Path
    processes: int = 2
    _futures: list[Future[Verdict]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pool = ProcessPoolExecutor(self.processes, get_context("spawn"), _open, (self.bundle,))

    def add(
        self,
        request: Mapping[str, Any],
        found: str | Sequence[int],
        done: Callable[[Verdict], object] = lambda verdict: None,
    ) -> None:
        """Queues a check. done: called with the verdict, in any thread."""
        self._futures.append(future := self._pool.submit(_check, request, found))
        future.add_done_callback(lambda one: None if one.cancelled() or one.exception() else done(one.result()))

    @property
    def waiting(self) -> int:
        """The number of texts not yet checked."""
        return sum(not future.done() for future in self._futures)

    def verdict(self) -> Verdict:
        """The verdict over all texts, once all are checked. Raises the exception of a check."""
        return sum((future.result() for future in self._futures), Verdict(0))

    def __enter__(self) -> "Checks":
        return self

    def __exit__(self, *error: object) -> None:
        """Cancels checks that have not begun."""
        self._pool.shutdown(cancel_futures=True)
