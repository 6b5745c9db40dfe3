"""The asynchronous loop against the synchronous one: one batch of equal requests, prompts and decodes.

The loops share slots, graphs and policy and differ only in when the host plans. Beside the times: the share of time in
which the device computes iterations, and in which it runs kernels, from a profiler's window over a short run of its own
whose contexts are those in the middle of the long one.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from cbatch import ConfigError, Engine, Limits, Request, RunRecord, Server
from experiments.bench import repeat
from experiments.profile.kernels import KernelTrace
from experiments.settings.backends import Cuda
from experiments.settings.command_line import Count
from experiments.setup.presets import load_spec
from experiments.setup.servers import equal_requests, real_server, release_memory
from experiments.store.provenance import write_benchmark
from policies.prefill_first import PrefillFirst
from reproduction import BENCH, RESULTS

WARM_UP_TOKENS = 64
WINDOW = (100, 130)
"""Iterations that the profiler records; the lanes that are kept begin with the first of them."""


def main(
    model: str = "llama-3.1-8b",
    batch: Count = 32,
    prompt: Count = 256,
    new: tuple[Count, ...] = (2048, 8192),
    repeats: tuple[Count, ...] = (3, 1),
    loops: tuple[Literal["async", "sync"], ...] = ("async", "sync"),
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes async.json. `new` and `repeats` are of equal length."""
    if len(new) != len(repeats):
        raise ConfigError(f"async: {len(new)} of new and {len(repeats)} of repeats; give one of repeats per one of new")
    spec = load_spec(model)
    hardware = torch.cuda.get_device_name()
    figures: dict[str, Any] = {}
    for num_new, num_repeats in zip(new, repeats, strict=True):
        server = real_server(Cuda(), spec, Limits(batch, max(batch * prompt, prompt + num_new), prompt + num_new))
        ask = partial(equal_requests, batch, prompt, vocabulary=spec.vocab_size)
        server.serve(PrefillFirst(), ask(new=WARM_UP_TOKENS))
        found: dict[str, Any] = {}
        for loop in loops:
            asynchronous = loop == "async"
            runs = repeat(server, PrefillFirst, partial(ask, new=num_new), num_repeats, asynchronous=asynchronous)
            middle = equal_requests(batch, prompt + num_new // 2, 200, spec.vocab_size)
            [share] = kernel_shares(server, middle, WINDOW, asynchronous)
            found[loop] = {**runs.figures, "lanes": lanes(runs.record), "kernel_share": share}
            show(f"{num_new} new tokens, {loop}", found[loop])
        if len(found) == 2:
            found["sync_over_async"] = found["sync"]["seconds"]["median"] / found["async"]["seconds"]["median"]
            print(f"  sync over async: {found['sync_over_async']:.3f}")
        figures[f"{num_new} new"] = found
        server.close()
        del server
        release_memory()
    stamped = {"model": spec.name, "batch": batch, "prompt": prompt, "figures": figures}
    print(f"written: {write_benchmark('async', hardware, stamped, folder, BENCH)}")


def lanes(record: RunRecord) -> list[dict[str, float]]:
    """Returns when the host planned, launched and waited and the device computed, in ms from the window's start."""
    steps = record.steps[WINDOW[0] : WINDOW[0] + 8]
    names = ("planned_at", "launched_at", "waited_at", "received_at", "done_at", "started", "ended")
    return [{name: round((getattr(step, name) - steps[0].planned_at) * 1e3, 4) for name in names} for step in steps]


def kernel_shares(
    server: Server, requests: Sequence[Request], edges: tuple[int, int], asynchronous: bool = True
) -> list[float]:
    """Returns the share of these iterations in which each GPU runs at least one kernel or copy."""
    trace = KernelTrace()

    def on_step(engine: Engine) -> None:
        if engine.view.iteration == edges[0]:
            trace.start()
        elif engine.view.iteration == edges[1]:
            trace.stop()

    server.serve(PrefillFirst(), requests, asynchronous=asynchronous, on_step=on_step)
    return [covered_share(kernels) for _, kernels in sorted(trace.on_gpu.items())]


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


def show(name: str, figures: dict[str, Any]) -> None:
    seconds, iteration, active, host = (
        figures[key]["median"] for key in ("seconds", "ms_per_iteration", "active_share", "host_ms_per_iteration")
    )
    shares = f"device active {active:.2%}, kernels {figures['kernel_share']:.2%}"
    print(f"  {name:24} {seconds:7.2f} s  {iteration:6.3f} ms/iteration  {shares}  host {host:.3f} ms", flush=True)
