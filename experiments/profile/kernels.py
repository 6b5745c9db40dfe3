"""Records the GPU's kernels with PyTorch's profiler, and divides an iteration's time among them."""

import atexit
import ctypes
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

ATTENTION = re.compile(r"flash|_decode_kernel|_chunk_kernel")
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk", re.IGNORECASE)
NORM = "_add_norm_kernel"
COPIES = ("Memcpy", "Memset")


class Kernel(NamedTuple):
    """A kernel or copy; times in microseconds."""

    start: float
    end: float
    name: str


class KernelTrace:
    """Records kernels from `start` to `stop`. on_gpu: kernels in order of start, by the GPU's index; filled by `stop`."""

    def __init__(self) -> None:
        self.on_gpu: dict[int, list[Kernel]] = {}
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> None:
        """Waits for the device, then stops recording."""
        torch.cuda.synchronize()
        self._profiler.stop()
        _detach_cupti_at_exit()
        for event in sorted(self._profiler.events() or [], key=lambda event: event.time_range.start):
            if event.device_type == torch.profiler.DeviceType.CUDA:
                kernel = Kernel(event.time_range.start, event.time_range.end, event.name)
                self.on_gpu.setdefault(event.device_index, []).append(kernel)


class KernelShares(NamedTuple):
    """Shares of an iteration, excluding attention: the layers' matrix products, output head with sampling, and the rest."""

    linear: float
    head: float
    other: float


ShareOf = Callable[[float], KernelShares]  # returns the shares of an iteration's kernels by its tokens


def unknown(tokens: float) -> KernelShares:
    """Counts all time as matrix products, for devices whose kernels cannot be distinguished."""
    return KernelShares(1.0, 0.0, 0.0)


def kernel_times(compute: Callable[[], object]) -> list[tuple[str, float]]:
    """Returns `times_in_turn` of the kernels that the current GPU runs during a call."""
    trace = KernelTrace()
    trace.start()
    compute()
    trace.stop()
    return times_in_turn(trace.on_gpu.get(torch.cuda.current_device(), []))


def times_in_turn(kernels: Iterable[Kernel]) -> list[tuple[str, float]]:
    """Returns (name, microseconds) of kernels in order of start, without copies.

    A kernel may start before the kernel that it waits for has ended. Its time then counts from that kernel's end, so that the
    times add up to the iteration.
    """
    times, reached = [], 0.0
    for start, end, name in kernels:
        if not name.startswith(COPIES):
            times.append((name, max(end - max(start, reached), 0.0)))
            reached = max(reached, end)
    return times


def shares(kernels: list[tuple[str, float]]) -> KernelShares:
    """Returns the shares. The output head follows the fused model's last norm; without that norm the head counts as `other`."""
    norms = [place for place, (name, _) in enumerate(kernels) if NORM in name]
    body, after = (kernels[: norms[-1] + 1], kernels[norms[-1] + 1 :]) if norms else (kernels, [])
    body = [(name, time) for name, time in body if not ATTENTION.search(name)]
    linear = sum(time for name, time in body if PRODUCT.search(name))
    head = sum(time for _, time in after)
    whole = sum(time for _, time in body) + head
    return KernelShares(linear / whole, head / whole, 1 - (linear + head) / whole) if whole else unknown(0)


@cache
def _detach_cupti_at_exit() -> None:
    """Detaches CUPTI, which the profiler has loaded, before the process exits.

    Otherwise, when the CUDA context is released at exit, CUPTI may request another activity buffer from Kineto after Kineto's
    state has been destroyed, which crashes the process ("free(): invalid pointer").
    """
    if library := re.search(r"/.*/libcupti\.so.*", Path("/proc/self/maps").read_text()):
        atexit.register(ctypes.CDLL(library[0]).cuptiFinalize)
