"""The cost of `runtime.check=races`: the same decodes with unchecked streams, checked ones, and unchecked ones again.

The second unchecked server shows the noise. The three serve in turn, so that the machine's speed cancels out of the
ratios. On a GPU if there is one, else on the CPU, where a small model makes iterations short, the check's share large.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

from cbatch import ConfigError, Limits, ModelSpec, Request, Server
from cbatch.runtime.options import Options
from cbatch.sim import load_profile
from experiments.config.backends import Cpu, Cuda
from experiments.config.command_line import Count
from experiments.config.presets import load_spec
from experiments.config.servers import real_server
from experiments.config.this_machine import count_gpus
from experiments.store.benchmark_file import spread, write
from experiments.workloads import ClosedBatch
from policies.prefill_first import PrefillFirst

CHECKS = {"off": Options(), "races": Options(check="races"), "off again": Options()}
WARM_UP_TOKENS = 16


class Milliseconds(NamedTuple):
    """Mean time of an iteration. wall: from the first plan to the last token. processor: CPU time of all threads."""

    wall: float
    processor: float


def main(
    model: str = "auto",
    batch: tuple[Count, ...] = (),
    prompt: Count = 64,
    new: Count = 256,
    repeats: Count = 5,
    backend: str = "auto",
    folder: str = "results",
) -> None:
    """Measures, prints and writes checks.json. Default: tiny at 1, 32, 128 on a CPU, llama-3.1-8b at 32 on a GPU."""
    place = _place(backend)
    on_cpu = isinstance(place, Cpu)
    spec = load_spec(("tiny" if on_cpu else "llama-3.1-8b") if model == "auto" else model)
    batches = batch or ((1, 32, 128) if on_cpu else (32,))
    hardware = place.hardware(load_profile("h200"))
    print(f"{spec.name}, requests of {prompt} + {new} tokens on {hardware}", flush=True)
    found = {f"batch {number}": _measure(place, spec, number, prompt, new, repeats) for number in batches}
    figures = {"unit": "ms per iteration", "model": spec.name, "prompt": prompt, "new": new, "figures": found}
    print(f"written: {write('checks', hardware, figures, Path(folder))}")


def _place(backend: str) -> Cpu | Cuda:
    if backend not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"checks: backend={backend}: give auto, cpu or cuda")
    return Cuda() if backend == "cuda" or (backend == "auto" and count_gpus() > 0) else Cpu()


def _measure(
    place: Cpu | Cuda, spec: ModelSpec, batch: int, num_prompt: int, num_new: int, repeats: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns times by what is checked, and their ratios."""

    def ask(num_new: int) -> list[Request]:
        length, ratio = num_prompt + num_new, num_prompt / num_new
        workload = ClosedBatch(length=length, pd_ratio=ratio, batch=batch, num_requests=batch)
        return workload.requests(place.vocabulary(spec))

    limits = Limits(batch, max(batch * num_prompt, 2048), num_prompt + num_new)
    servers = {name: real_server(place, spec, limits, options) for name, options in CHECKS.items()}
    for server in servers.values():
        _time(server, ask(min(WARM_UP_TOKENS, num_new)))
    times: dict[str, list[Milliseconds]] = {name: [] for name in servers}
    for _ in range(repeats):
        for name, server in servers.items():
            times[name].append(_time(server, ask(num_new)))
    for server in servers.values():
        server.close()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in Milliseconds._fields:
        values = {name: [getattr(time, kind) for time in taken] for name, taken in times.items()}
        found[kind] = {name: spread(milliseconds) for name, milliseconds in values.items()}
        for name in ("races", "off again"):
            ratio = spread([mine / off for mine, off in zip(values[name], values["off"], strict=True)])
            found[kind][f"{name} over off"] = {**ratio, "of least": min(values[name]) / min(values["off"])}
        print(f"  batch {batch:3}, {kind:9}  " + "  ".join(_shown(name, found[kind]) for name in CHECKS), flush=True)
    return found


def _time(server: Server[Any], requests: list[Request]) -> Milliseconds:
    began = time.process_time()
    steps = server.serve(PrefillFirst(), requests).steps
    processor = time.process_time() - began
    wall = steps[-1].received_at - steps[0].planned_at
    return Milliseconds(wall / len(steps) * 1e3, processor / len(steps) * 1e3)


def _shown(name: str, found: dict[str, dict[str, float]]) -> str:
    ratio = found.get(f"{name} over off")
    times = f"{name} {found[name]['median']:.3f} ms"
    return times if ratio is None else f"{times} (x {ratio['median']:.3f}, of the least {ratio['of least']:.3f})"
