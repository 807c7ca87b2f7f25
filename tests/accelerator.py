"""An accelerator made of host memory whose stream does nothing until it is waited for.

What runs on it shows two kinds of mistake that a processor hides: a buffer read on the wrong side, since its memory is
a copy of its own, and a buffer that the host changes before the device has read it, since everything happens as late as
it may.
"""

import ctypes
from collections.abc import Callable, Mapping
from threading import get_ident

import numpy as np
import onnxruntime as ort

from runtime.engines.devices import Accelerator, DeviceArray, Staging


class Lazy(Accelerator):
    def __init__(self) -> None:
        self.stream = 0
        self.enter()
        self.queue: list[Callable[[], None]] = []
        self.blocks: list[np.ndarray] = []
        self.launches = 0

    unified = False

    def memory(self) -> tuple[int, int]:
        return 1 << 34, 1 << 35

    def details(self) -> dict[str, str]:
        return {}

    def enter(self) -> None:
        self.thread = get_ident()

    def allocate(self, nbytes: int) -> int:
        assert self.thread == get_ident(), "the thread has not entered the device"
        return self.allocate_pinned(nbytes).ctypes.data

    def allocate_pinned(self, nbytes: int) -> np.ndarray:
        self.blocks.append(np.full(nbytes, 0xA5, np.uint8))
        return self.blocks[-1]

    def fill(self, address: int, nbytes: int) -> None:
        assert self.thread == get_ident(), "the thread has not entered the device"
        self.queue.append(lambda: ctypes.memset(address, 0, nbytes))

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        assert self.thread == get_ident(), "the thread has not entered the device"
        self.queue.append(lambda: ctypes.memmove(destination, source, nbytes))

    def copy_strided(
        self, destination: int, pitch: int, source: int, source_pitch: int, width: int, height: int
    ) -> None:
        assert width <= min(pitch, source_pitch)
        for i in range(height):
            self.copy(destination + i * pitch, source + i * source_pitch, width)

    def synchronize(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        assert not self.queue, "recording begins on an idle stream"
        enqueue()
        recorded, self.queue = self.queue, []

        def replay() -> None:
            self.launches += 1
            self.queue += recorded

        return replay

    def close(self) -> None:
        self.blocks.clear()


class LazyEngine:
    """ONNX Runtime on the processor behind a ``Lazy`` stream."""

    def __init__(self, session: ort.InferenceSession, device: Lazy, capturable: bool) -> None:
        self.session, self.device, self.capturable = session, device, capturable
        self.inputs = {value.name for value in session.get_inputs()}
        self.outputs = {value.name for value in session.get_outputs()}

    def bind(self, buffers: Mapping[str, np.ndarray | DeviceArray]) -> Staging:
        def launch(places: Mapping[str, DeviceArray]) -> None:
            binding = self.session.io_binding()
            for name, place in places.items():
                bind = binding.bind_input if name in self.inputs else binding.bind_output
                bind(name, "cpu", 0, place.dtype, place.shape, place.address)
            self.device.queue.append(lambda: self.session.run_with_iobinding(binding))

        capturable = (lambda: True) if self.capturable else None
        return Staging(self.device, buffers, self.inputs, self.outputs, launch, capturable)

    def close(self) -> None:
        pass
