"""Measures copies between host and device, and the largest rates of the device."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.roofline import Ceilings

COPIED = tuple(2**power for power in range(12, 27, 2))
REPEATS = 15


def copy_times(device: torch.device) -> Links:
    """Times copies from pinned host memory to the GPU and back."""
    to_device, to_host = [], []
    for size in COPIED:
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        there = torch.zeros(size, dtype=torch.uint8, device=device)
        to_device.append((size, _median(partial(there.copy_, host, non_blocking=True), True)))
        to_host.append((size, _median(partial(host.copy_, there, non_blocking=True), True)))
    return Links(to_device=PiecewiseLinear.through(to_device), to_host=PiecewiseLinear.through(to_host))


def ceilings(device: torch.device, tile: int) -> Ceilings:
    """Measures bytes/s of a copy on the device, reads and writes counted, and FLOP/s of a large bfloat16 product."""
    on_gpu = device.type == "cuda"
    size, edge = (2**31, 8192) if on_gpu else (2**24, 256)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, square = torch.empty_like(source), torch.randn((edge, edge), device=device).bfloat16()
    copied = _median(partial(target.copy_, source), on_gpu)
    multiplied = _median(partial(torch.mm, square, square), on_gpu)
    return Ceilings(2 * size / copied, 2 * edge**3 / multiplied, tile)


def _median(operation: Callable[[], object], on_gpu: bool) -> float:
    """Returns the median seconds of `REPEATS` calls, after three to warm up."""
    for _ in range(3):
        operation()
    return float(np.median([_once(operation, on_gpu) for _ in range(REPEATS)]))


def _once(operation: Callable[[], object], on_gpu: bool) -> float:
    if not on_gpu:
        begin = time.perf_counter()
        operation()
        return time.perf_counter() - begin
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    operation()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
