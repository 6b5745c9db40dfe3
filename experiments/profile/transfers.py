"""Measures copies between host and device, and the largest rates of the device."""

import time
from collections.abc import Callable

import numpy as np
import torch

Curve = dict[str, list[float]]
"""{"bytes": [...], "seconds": [...]}, as in a profile's file."""

COPIED = tuple(2**power for power in range(12, 27, 2))
REPEATS = 15


def copy_times(device: torch.device) -> dict[str, Curve]:
    """Times copies from pinned host memory to the GPU ("to_device") and back ("to_host")."""
    found: dict[str, Curve] = {name: {"bytes": [], "seconds": []} for name in ("to_device", "to_host")}
    for size in COPIED:
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        there = torch.zeros(size, dtype=torch.uint8, device=device)
        for name, target, source in (("to_device", there, host), ("to_host", host, there)):
            found[name]["bytes"].append(size)
            found[name]["seconds"].append(_median(lambda to=target, of=source: to.copy_(of, non_blocking=True), True))  # type: ignore[misc]
    return found


def ceilings(device: torch.device) -> dict[str, float]:
    """Returns bytes/s of a copy on the device, reads and writes counted, and FLOP/s of a large bfloat16 product."""
    on_gpu = device.type == "cuda"
    size, edge = (2**31, 8192) if on_gpu else (2**24, 256)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, square = torch.empty_like(source), torch.randn((edge, edge), device=device).bfloat16()
    copied = _median(lambda: target.copy_(source), on_gpu)
    multiplied = _median(lambda: torch.mm(square, square), on_gpu)
    return {"bandwidth_bytes_per_second": 2 * size / copied, "flops_per_second": 2 * edge**3 / multiplied}


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
