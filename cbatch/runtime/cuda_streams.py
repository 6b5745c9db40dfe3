"""CUDA's own streams and events behind the protocols of `streams`.

Nothing runs on the default stream. Operations are enqueued from the host's thread, which the device then runs behind.
"""

from __future__ import annotations

import time

import torch

from cbatch.runtime.streams import Operation, StreamError, Touched


class CudaClock:
    """Tells a device's events in the host's time: one moment that both know, and the device's distance from it.

    The distance is a float32 of milliseconds: exact to 8 microseconds in the first minute, to 0.25 ms in the first hour.
    """

    def __init__(self, device: torch.device) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.Stream(device))
        self._origin.synchronize()
        self._host_time = time.perf_counter()

    def time_of(self, event: torch.cuda.Event) -> float:
        """Seconds of `time.perf_counter` at which the event was reached."""
        milliseconds: float = self._origin.elapsed_time(event)
        return self._host_time + milliseconds / 1e3


class CudaEvent:
    """An event of `CudaStream`s."""

    def __init__(self, clock: CudaClock) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self._clock = clock

    def synchronize(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise StreamError(f"the device failed: {error}") from error

    def time(self) -> float:
        return self._clock.time_of(self.event)


class CudaStream:
    """A stream of a GPU. An operation is a function that enqueues kernels or copies on the current stream."""

    def __init__(self, device: torch.device, clock: CudaClock) -> None:
        self.stream = torch.cuda.Stream(device)
        self._clock = clock

    def event(self) -> CudaEvent:
        return CudaEvent(self._clock)

    def run(self, operation: Operation, reads: Touched = (), writes: Touched = ()) -> None:
        with torch.cuda.stream(self.stream):
            operation()

    def record(self, event: CudaEvent) -> None:
        event.event.record(self.stream)

    def wait(self, event: CudaEvent) -> None:
        self.stream.wait_event(event.event)

    def close(self) -> None:
        self.stream.synchronize()
