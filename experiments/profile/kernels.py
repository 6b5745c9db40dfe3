"""Records which kernels the GPU runs, by PyTorch's profiler, and divides an iteration's time among them."""

import atexit
import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

ATTENTION = re.compile(r"flash|_decode_kernel|_chunk_kernel")
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk", re.IGNORECASE)
NORM = "_add_norm_kernel"
COPIES = ("Memcpy", "Memset")


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
        events = [
            event for event in self._profiler.events() or [] if event.device_type == torch.profiler.DeviceType.CUDA
        ]
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


class Shares(NamedTuple):
    """Shares of an iteration without its attention: the layers' matrix products, output head and sampling, all else."""

    linear: float
    head: float
    other: float


UNKNOWN = Shares(1.0, 0.0, 0.0)
"""If kernels cannot be distinguished, all time counts as matrix products."""


def kernel_times(compute: Callable[[], object]) -> list[tuple[str, float]]:
    """Returns (name, microseconds) of the kernels that the GPU runs during a call, in order.

    A kernel may start before the one that it waits for has ended. Its time counts from that end, so that the times add up
    to the iteration.
    """
    with KernelTrace() as trace:
        compute()
    times, reached = [], 0.0
    for start, end, name in trace.kernels:
        if not name.startswith(COPIES):
            times.append((name, max(end - max(start, reached), 0.0)))
            reached = max(reached, end)
    return times


def shares(kernels: list[tuple[str, float]]) -> Shares:
    """Returns the shares. The output head follows the fused model's last norm; without one it counts as `other`."""
    norms = [place for place, (name, _) in enumerate(kernels) if NORM in name]
    body, after = (kernels[: norms[-1] + 1], kernels[norms[-1] + 1 :]) if norms else (kernels, [])
    body = [(name, time) for name, time in body if not ATTENTION.search(name)]
    linear = sum(time for name, time in body if PRODUCT.search(name))
    head = sum(time for _, time in after)
    whole = sum(time for _, time in body) + head
    return Shares(linear / whole, head / whole, 1 - (linear + head) / whole) if whole else UNKNOWN


@cache
def detach_cupti_at_exit() -> None:
    """Detaches CUPTI from the process before it exits; does nothing where CUPTI is not loaded."""
    # Otherwise the release of the CUDA context at the end of the process may make CUPTI ask Kineto for another activity
    # buffer after Kineto's own state is destroyed, which crashes the process ("free(): invalid pointer").
    if path := loaded_library("libcupti.so"):
        atexit.register(ctypes.CDLL(path).cuptiFinalize)


def loaded_library(name: str) -> str | None:
    """Returns the path of a library that this process has loaded, by the start of its file's name; None if there is none."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    return next((path for path in paths if path.rpartition("/")[2].startswith(name)), None)
