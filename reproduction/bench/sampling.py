"""What choosing the next tokens costs in vLLM 0.11.1, whose default is PyTorch: penalties, temperature, top-k, top-p and the draw.

Repeats the operations of its sources (vllm/v1/sample, vllm/model_executor/layers/utils.py) on random logits. Penalties count the tokens of every prompt and output again for each
token: they take longer the longer the longest prompt and output of a batch are, and the host makes a table of all outputs first (`host_seconds`).
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.gpu.energy import EnergyMeter, nvml_counters
from experiments.settings.command_line import Count
from experiments.store.provenance import write_benchmark
from reproduction import BENCH, RESULTS

REPEATS = 5
POWERED = (64, 256)
"""Requests for which the power is measured, 1.5 s each."""
BATCHES = (2, 8, 16, 32, 64, 96, 127, 128, 160, 192, 256, 320, 384, 448, 512)
LONGEST = ((256, 256), (1024, 256), (4096, 256), (1024, 1024), (1024, 4096))
"""Tokens of the longest prompt and of the longest output."""


def main(
    vocabularies: tuple[Count, ...] = (128256, 151936),
    batches: tuple[Count, ...] = BATCHES,
    device: str = "cuda",
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes sampling.json."""
    rows: list[dict[str, Any]] = []
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    for batch in batches:
        for size in vocabularies:
            rows.append({"vocabulary": size, "requests": batch} | measure(batch, size, device))
            shown = [f"{key} {1e6 * value / batch:.1f}" for key, value in rows[-1]["seconds"].items()]
            print(f"{size} entries, {batch} requests, us per request: {', '.join(shown)}", flush=True)
        path = write_benchmark("sampling", card, {"repeats": REPEATS, "rows": rows}, folder, BENCH)
    print(f"written: {path}")


def measure(batch: int, size: int, device: str) -> dict[str, Any]:
    """Returns the median seconds of each part, and the most bytes that drawing takes beside the logits."""
    given = torch.randn(batch, size, device=device).bfloat16()
    top_k, top_p, heat = (torch.full((batch,), value, device=device) for value in (20, 0.95, 0.8))
    zero, seconds, host = torch.zeros(batch, device=device), dict[str, float](), dict[str, float]()
    for longest, generated in LONGEST:
        prompts, outputs = (_tokens(batch, most, size) for most in (longest, generated))
        made = []
        for _ in range(3):
            began = time.perf_counter()
            table = _padded(outputs, size, device)
            made.append(time.perf_counter() - began)
        host[str(generated)] = statistics.median(made)
        penalise = partial(_penalise, given, _padded(prompts, size, device).to(device), table, zero)
        seconds[f"penalties {longest} {generated}"] = _timed(penalise, device)
    logits = given.float()
    seconds["top-p"] = _timed(lambda: _draw(logits.clone().div_(heat[:, None]), None, top_p), device)
    seconds["top-k, top-p"] = _timed(lambda: _draw(logits.clone().div_(heat[:, None]), top_k, top_p), device)
    seconds["sort"] = _timed(lambda: logits.sort(dim=-1), device)
    seconds["copy"] = _timed(lambda: logits.clone(), device)
    if device != "cuda":
        return {"seconds": seconds}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _draw(logits, top_k, top_p)
    most = torch.cuda.max_memory_allocated() - before
    watts = _watts(lambda: _draw(penalise(), top_k, top_p)) if batch in POWERED else None
    return {"seconds": seconds, "host_seconds": host, "bytes": most, "watts": watts}


def _watts(compute: Callable[[], object]) -> float | None:
    """Returns the watts of the GPU while it computes this again and again; None: they are not known."""
    meter = EnergyMeter(lambda: nvml_counters([str(torch.cuda.get_device_properties(0).uuid)]), time.perf_counter)
    begun = time.perf_counter()
    with meter:
        while time.perf_counter() < begun + 1.5:
            compute()
            torch.cuda.synchronize()
    late = [reading for reading in meter.readings if reading[0] > begun + 0.4]
    return (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0]) if len(late) > 1 else None


def _timed(compute: Callable[[], object], device: str) -> float:
    """Returns the median seconds of the device, which is kept from starting until all is launched."""
    if device != "cuda":
        began = time.perf_counter()
        compute()
        return time.perf_counter() - began
    taken = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        begin.record()
        compute()
        end.record()
        torch.cuda.synchronize()
        taken.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(taken[1:])


def _tokens(batch: int, longest: int, size: int) -> list[list[int]]:
    drawn = np.random.default_rng(0)
    lengths = [longest, *drawn.integers(1, longest // 2, batch - 1)]
    return [drawn.integers(size, size=length).tolist() for length in lengths]


def _padded(tokens: list[list[int]], size: int, device: str) -> Tensor:
    table = np.full((len(tokens), max(map(len, tokens))), size, np.int64)
    for row, of_request in zip(table, tokens, strict=True):
        row[: len(of_request)] = of_request
    return torch.from_numpy(table).pin_memory() if device == "cuda" else torch.from_numpy(table)


def _counts(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    counts = torch.zeros(len(tokens), size + 1, dtype=torch.int64, device=tokens.device)
    found = counts.scatter_add_(1, tokens, torch.ones_like(tokens))[:, :size]
    return found, found > 0


def _penalise(given: Tensor, prompts: Tensor, outputs: Tensor, zero: Tensor) -> Tensor:
    """In place of vLLM's kernel, which reads both masks and changes the logits of their tokens, it unites the masks."""
    logits, size = given.float(), given.shape[1]
    generated = outputs.to(logits.device, non_blocking=True)
    generated.masked_fill_(generated == -1, size)
    _, of_prompts = _counts(prompts, size)
    counts, of_outputs = _counts(generated, size)
    of_prompts |= of_outputs
    logits -= zero[:, None] * counts
    logits -= zero[:, None] * of_outputs
    return logits


def _draw(logits: Tensor, top_k: Tensor | None, top_p: Tensor) -> Tensor:
    ordered, places = logits.sort(dim=-1)
    if top_k is not None:
        least = ordered.gather(1, (ordered.shape[1] - top_k.long())[:, None])
        ordered.masked_fill_(ordered < least, -torch.inf)
    shares = ordered.softmax(dim=-1)
    left = torch.cumsum(shares, dim=-1, out=shares) <= 1 - top_p[:, None]
    left[:, -1] = False
    ordered.masked_fill_(left, -torch.inf)
    shares = ordered.scatter(-1, places, ordered).softmax(dim=-1)
    return shares.div_(torch.empty_like(shares).exponential_()).argmax(dim=-1)
