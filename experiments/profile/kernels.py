"""The shares of an iteration's kernels, from a profiler's record of one iteration.

A kernel may start before the one that it waits for has ended, so it counts from there on: times add up to the iteration.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from experiments.profile.kernel_trace import KernelTrace

ATTENTION = re.compile(r"flash|_decode_kernel|_chunk_kernel")
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk", re.IGNORECASE)
NORM = "_add_norm_kernel"
COPIES = ("Memcpy", "Memset")


class Shares(NamedTuple):
    """Shares of an iteration without its attention: the layers' matrix products, output head and sampling, all else."""

    linear: float
    head: float
    other: float


UNKNOWN = Shares(1.0, 0.0, 0.0)
"""If kernels cannot be distinguished, all time counts as matrix products."""


def kernel_times(compute: Callable[[], object]) -> list[tuple[str, float]]:
    """(name, microseconds after the end of all before) of the kernels that the GPU runs during a call, in order."""
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
