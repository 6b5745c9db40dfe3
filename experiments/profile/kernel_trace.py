"""Records which kernels and copies the GPU runs, by PyTorch's profiler; the only place that uses it."""

import atexit
import ctypes
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch


class Kernel(NamedTuple):
    """A kernel or copy; microseconds."""

    start: float
    end: float
    name: str


class KernelTrace:
    """Records from `start` to `stop`, or inside a `with` block.

    on_gpu: what each GPU ran, in order of start, by its number; filled by `stop`.
    """

    def __init__(self) -> None:
        self.on_gpu: dict[int, list[Kernel]] = {}
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> None:
        """Wait for the device, then stop recording."""
        torch.cuda.synchronize()
        self._profiler.stop()
        detach_cupti_at_exit()
        events = [each for each in self._profiler.events() or [] if each.device_type == torch.profiler.DeviceType.CUDA]
        for event in sorted(events, key=lambda event: event.time_range.start):
            kernel = Kernel(event.time_range.start, event.time_range.end, event.name)
            self.on_gpu.setdefault(event.device_index, []).append(kernel)

    @property
    def kernels(self) -> list[Kernel]:
        """What the current GPU ran."""
        return self.on_gpu.get(torch.cuda.current_device(), [])

    def __enter__(self) -> "KernelTrace":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def covered_share(events: Iterable[tuple[float, float, str]]) -> float:
    """Returns the share of the time from the first kernel to the last end that kernels and copies cover.

    events: (start, end, name). A profiler records only what is launched after its start. The iteration in flight then
    leaves a hole after the copy of the next one's inputs, so copies before the first kernel do not count.
    """
    spans = sorted(events)
    first = next(begin for begin, _, name in spans if not name.startswith("Memcpy"))
    busy, reached = 0.0, first
    for begin, end, _ in spans:
        busy += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return busy / (reached - first)


@cache
def detach_cupti_at_exit() -> None:
    """Detaches CUPTI from the process before it exits; does nothing where CUPTI is not loaded."""
    # Otherwise the release of the CUDA context at the end of the process may make CUPTI ask Kineto for another activity
    # buffer after Kineto's own state is destroyed, which crashes the process ("free(): invalid pointer").
    if path := loaded_library("libcupti.so"):
        atexit.register(ctypes.CDLL(path).cuptiFinalize)


def loaded_library(name: str) -> str | None:
    """Path of a library that this process has loaded, by the start of its file's name; None if there is none."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    return next((path for path in paths if path.rpartition("/")[2].startswith(name)), None)
