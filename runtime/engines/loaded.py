"""A bundle's engines in memory, and what all streams over them share."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, cast

from ..backends import Backend, Engine, close
from ..backends.allocator import return_free_memory
from ..backends.processor import physical_cores
from ..bundle.graphs import SHARED, Form
from ..bundle.reader import Bundle
from ..decoding.decoder import Decoder
from ..decoding.drafter_choice import DrafterChoice
from ..decoding.grammar import GrammarMatchers
from ..decoding.prices import Costs
from ..errors import GumihoError
from .devices import Device, Host
from .loop import EngineLoop
from .memory_check import require, require_stream
from .queued import QueuedEngine, QueuedTarget
from .store import find_record

if TYPE_CHECKING:
    from ..backends.onnxruntime_lanes import Lanes
    from ..decoding.text.chat_template import ChatTemplate
    from ..decoding.text.special_tokens import SpecialTokens


@dataclass(eq=False)
class LoadedBundle:
    """The engines of a bundle by graph name, their device, and by drafter the measured prices of their passes, if any.

    choices: which drafter a text gets that names none, for likeliest and for drawn texts. joins_passes: whether a pass
    of the target takes rows of several streams; otherwise each stream has the engines for a whole step, a cycle or a
    part of its prompt. numbers: of streams to come. proven: see ``store.Record``. closed: the engines are freed.
    """

    bundle: Bundle
    form: Form
    engines: Mapping[str, Engine]
    device: Device
    costs: Mapping[str, Costs | None] = field(default_factory=dict)
    backend: Backend | None = None
    joins_passes: bool = False
    loop: EngineLoop = field(default_factory=EngineLoop)
    numbers: Iterator[int] = field(default_factory=count)
    proven: bool = True
    closed: bool = False

    def __post_init__(self) -> None:
        weakref.finalize(self, self.loop.stop)

    def use_thread(self) -> None:
        """From now on the loop's own threads use the engines: to join passes, and since recordings of an accelerator
        belong to a thread."""
        if self.joins_passes or not isinstance(self.device, Host):
            self.loop.start()

    def require_stream(self) -> None:
        """Raises UnavailableError if memory does not hold another stream's caches."""
        if self.backend:
            require_stream(self.bundle, self.backend)

    def close(self) -> None:
        """Frees engines and device, after all streams have freed their buffers."""
        self.closed = True
        self.loop.stop()
        close(self.engines, self.device)
        return_free_memory()

    @cached_property
    def choices(self) -> tuple[DrafterChoice, DrafterChoice]:
        return DrafterChoice(self.bundle.manifest.each), DrafterChoice(self.bundle.manifest.each)

    def decoder(self, drafter: str, stream: int, sibling: Decoder | None = None) -> Decoder:
        """A stream's decoder with one drafter. stream: its number; sibling: see ``Decoder``."""
        engines, costs = self.engines_of(stream), self.costs.get(drafter)
        return Decoder.with_drafter(drafter, self.bundle, self.form, engines, self.device, costs, sibling)

    def engines_of(self, stream: int) -> Mapping[str, Engine]:
        """The engines as a stream uses them, by graph name. stream: its number."""
        if not self.joins_passes:
            return self.engines
        return {
            name: QueuedTarget(cast("Lanes", engine), self.loop, stream)
            if name == "target"
            else QueuedEngine(engine, self.loop, stream)
            for name, engine in self.engines.items()
        }

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        from ..decoding.text.chat_template import ChatTemplate  # imports jinja2, which only conversations need

        return ChatTemplate.of(self.bundle.path)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Those that contents of a conversation may not write."""
        from ..decoding.text.special_tokens import SpecialTokens

        written = self.chat_template.all_text if self.chat_template else ""
        return SpecialTokens(self.bundle.tokenizer, written, self.bundle.manifest.eos_token_ids)

    @cached_property
    def matchers(self) -> GrammarMatchers:
        manifest = self.bundle.manifest
        return GrammarMatchers(self.bundle.tokenizer.to_str(), manifest.vocabulary, manifest.eos_token_ids)

    @staticmethod
    def open(bundle: Bundle, backend: Backend, threads: int, streams: int) -> LoadedBundle:
        """Opens the current engines. Raises UnavailableError if there are none, or if memory does not hold them and the
        caches of so many streams."""
        while True:
            # first, since a machine that lacks what it takes cannot compile engines either
            require(bundle, backend, streams=streams)
            folder, record = find_record(bundle, backend)
            try:
                form, manifest = backend.form(bundle, folder), bundle.manifest
                costs = {name: Costs.load(folder, manifest.rows, manifest.suffix(name)) for name in manifest.each}
                first = costs[manifest.each[0]]
                measured = first.threads_on(physical_cores()) if first else 0
                engines, device = backend.open(bundle, folder, threads or measured, streams)
                shares = streams > 1 and SHARED in form.graphs
                loop = EngineLoop(cast("Lanes", engines["target"]) if shares else None)
                loaded = LoadedBundle(bundle, form, engines, device, costs, backend, shares, loop, proven=record.proven)
                if streams > 1:
                    loaded.use_thread()
                return loaded
            except GumihoError:
                if folder.exists():
                    raise  # otherwise a compile has just replaced them
