"""Measures copies between host and device, and between the GPUs of one host through torch.distributed."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import multiprocessing

Curve = dict[str, list[float]]
"""{"bytes": [...], "seconds": [...]}, as in a profile's file."""

COPIED = tuple(2**power for power in range(12, 27, 2))
SENT = tuple(2**power for power in range(10, 29, 2))
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


def link_times(backend: str, num_gpus: int, sizes: Sequence[int] = SENT) -> dict[str, Any]:
    """Times all-reduces over 2, 4, ... GPUs of this host, and sends between two; returns nothing for a single GPU.

    backend: of torch.distributed: "nccl" for GPUs, "gloo" for processes on a CPU.
    Returns {"all_reduce": {GPUs: curve}, "within_node": curve}, as in a profile's file.
    """
    if num_gpus < 2:
        return {}
    counts = [2**power for power in range(1, num_gpus.bit_length()) if 2**power <= num_gpus]
    spawn: Any = multiprocessing.spawn  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            spawn(_measure_links, (count, backend, folder, tuple(sizes)), nprocs=count)
        measured = {count: json.loads((Path(folder) / f"{count}.json").read_text()) for count in counts}
    curves = {str(count): {"bytes": list(sizes), "seconds": measured[count]["all_reduce"]} for count in counts}
    return {"all_reduce": curves, "within_node": {"bytes": list(sizes), "seconds": measured[2]["send"]}}


def _measure_links(rank: int, count: int, backend: str, folder: str, sizes: tuple[int, ...]) -> None:
    """Runs in each of `count` processes; the first one writes its measurements."""
    on_gpu = backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(rank)
    meeting = (Path(folder) / f"meeting-{count}").absolute().as_uri()
    distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=count)
    found: dict[str, list[float]] = {"all_reduce": [], "send": []}
    for size in sizes:
        values = torch.zeros(max(size // 4, 1), dtype=torch.float32, device="cuda" if on_gpu else "cpu")
        found["all_reduce"].append(_median(lambda values=values: distributed.all_reduce(values), on_gpu))  # type: ignore[misc]
        if count == 2:
            found["send"].append(_median(lambda values=values: _pass_on(rank, values), on_gpu))  # type: ignore[misc]
    if rank == 0:
        (Path(folder) / f"{count}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def _pass_on(rank: int, values: torch.Tensor) -> None:
    if rank == 0:
        distributed.send(values, 1)
    else:
        distributed.recv(values, 0)


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
