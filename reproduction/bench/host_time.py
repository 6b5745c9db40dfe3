"""Where the host's time goes at batch 1, launched operation by operation and by a captured graph: the question of Fireworks AI's post.

PyTorch's profiler names what the host's thread does, innermost first. Profiling makes the host slower, so the iteration without a profiler is
stored as well. Modules are those of `transformers`, the setting is the post's: LLaMA-2-7B, one request.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cbatch import Engine, Limits, Server
from cbatch.runtime.options import Options
from experiments.bench import figures_of
from experiments.profile.kernels import _detach_cupti_at_exit
from experiments.settings.backends import Cuda
from experiments.setup.presets import load_spec
from experiments.setup.servers import equal_requests, real_server, release_memory
from experiments.store.provenance import write_benchmark
from policies.orca import Orca
from reproduction import BENCH, RESULTS

WAYS = {
    "eager": Options(graphs="off", fused=False),
    "graphs": Options(graphs="decode", fused=False),
    "fused, graphs": Options(graphs="decode"),
}
KINDS = USER, DISPATCHER, ALLOCATOR, DRIVER, WAIT = "user logic", "dispatcher", "allocator", "driver", "waits"
DEVICE = "device"
FIRST, LAST = 64, 72
"""Iterations that are recorded."""
SHOWN_MS = 2.0
MARK = "iteration"
_DRIVER = re.compile(r"cu(da)?[A-Z]")
_WAITS = re.compile(r"cuda\w*Synchronize")
_ALLOCATES = re.compile(r"aten::(empty|resize)|cudaMalloc|cudaFree")


def kind_of(name: str) -> str:
    """Returns the kind of work of an event of the profiler, by its name."""
    if _WAITS.match(name):
        return WAIT
    if _ALLOCATES.match(name):
        return ALLOCATOR
    return DRIVER if _DRIVER.match(name) else DISPATCHER


def main(model: str = "llama-2-7b", prompt: int = 32, new: int = 128, folder: str = RESULTS) -> None:
    """Measures, prints and writes host.json."""
    spec, figures = load_spec(model), dict[str, Any]()
    for name, way in WAYS.items():
        server = real_server(Cuda(), spec, Limits(1, prompt, prompt + new), way)
        ask = partial(equal_requests, 1, prompt, new, spec.vocab_size)
        server.serve(Orca(), ask())
        alone = figures_of(server.serve(Orca(), ask()))
        found = figures[name] = {**alone, **recorded(server, ask())}
        milliseconds = ", ".join(f"{kind} {value:.3f}" for kind, value in found["host_ms"].items())
        print(
            f"  {name}: {alone['ms_per_iteration']:.3f} ms; profiled {found['profiled_ms']:.3f}: {milliseconds}",
            flush=True,
        )
        server.close()
        del server
        release_memory()
    content = {"model": spec.name, "prompt": prompt, "new": new, "figures": figures}
    print(f"written: {write_benchmark('host', torch.cuda.get_device_name(), content, folder, BENCH)}")


def recorded(server: Server, requests: Any) -> dict[str, Any]:
    """Returns the host's milliseconds per iteration by kind, and what host and device do in the first milliseconds of one."""
    kinds = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])

    def on_step(engine: Engine) -> None:
        if engine.view.iteration == FIRST:
            profiler.start()
        if FIRST <= engine.view.iteration <= LAST:
            with torch.profiler.record_function(MARK):
                pass
        if engine.view.iteration == LAST:
            torch.cuda.synchronize()
            profiler.stop()

    server.serve(Orca(), requests, on_step=on_step)
    _detach_cupti_at_exit()
    return divided([event for event in profiler.events() or [] if event.time_range.end > event.time_range.start])


def divided(events: Sequence[Any]) -> dict[str, Any]:
    """Returns the same of the profiler's events, whose marks begin iterations; the first iteration still starts the profiler.

    An event's time is what its inner events leave; the rest is user logic. Lanes have outer events before their inner ones.
    """
    on_gpu = torch.profiler.DeviceType.CUDA
    marks = sorted((event for event in events if event.name == MARK), key=_place)
    _, begin, *_, end = times = [mark.time_range.end for mark in marks]
    milliseconds, first = 1e3 * (len(times) - 2), times[len(times) // 2]
    last, spent = first + 1e3 * SHOWN_MS, dict.fromkeys((*KINDS, DEVICE), 0.0)
    lanes = [(first, last, USER)]
    for event in sorted(events, key=_place):
        device, (start, stop) = event.device_type == on_gpu, (event.time_range.start, event.time_range.end)
        if event.name == MARK or not (device or event.thread == marks[0].thread):
            continue
        kind = DEVICE if device else kind_of(event.name)
        if begin <= start < end:
            spent[kind] += (stop - start if device else event.self_cpu_time_total) / milliseconds
        if stop > first and start < last:
            lanes.append((max(start, first), min(stop, last), kind))
    profiled = (end - begin) / milliseconds
    spent[USER] = profiled - sum(spent[kind] for kind in KINDS)
    return {
        "profiled_ms": profiled,
        "host_ms": {kind: spent[kind] for kind in KINDS},
        "device_ms": spent[DEVICE],
        "lanes": [
            (round((start - first) / 1e3, 4), round((stop - start) / 1e3, 4), kind) for start, stop, kind in lanes
        ],
    }


def _place(event: Any) -> tuple[float, float]:
    return event.time_range.start, -event.time_range.end
