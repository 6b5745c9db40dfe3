"""The cost of `runtime.check=races`: the same decodes with unchecked streams, checked ones, and unchecked ones again.

The second unchecked server shows the noise. The three decode a few iterations in turn, so that a busy machine slows all
alike: their ratios stand where their times do not. On a GPU if there is one, else on the CPU, where a small model makes
iterations short, the check's share large.
"""

import time
from itertools import cycle, islice, permutations
from typing import Literal, NamedTuple

from cbatch import Limits, ModelSpec
from cbatch.engine import Engine
from cbatch.runtime.options import Options
from cbatch.sim import load_profile
from experiments.settings.backends import Cpu, Cuda
from experiments.settings.command_line import Count
from experiments.settings.presets import load_spec
from experiments.settings.servers import real_server
from experiments.settings.this_machine import count_gpus
from experiments.store.benchmark_file import spread
from experiments.workloads import ClosedBatch
from policies.prefill_first import PrefillFirst
from reproduction import RESULTS
from reproduction.stored import write

Figures = dict[str, dict[str, dict[str, float]]]
CHECKS = {"off": Options(), "races": Options(check="races"), "off again": Options()}
WARM_UP, IN_A_TURN = 16, 8  # iterations


class Milliseconds(NamedTuple):
    """Mean time of an iteration of a turn. processor: CPU time of all threads."""

    wall: float
    processor: float


def main(
    model: str = "auto",
    batch: tuple[Count, ...] = (),
    prompt: Count = 64,
    turns: Count = 64,
    backend: Literal["auto", "cpu", "cuda"] = "auto",
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes checks.json. Default: tiny at 1, 32, 128 on a CPU, llama-3.1-8b at 32 on a GPU."""
    place = _place(backend)
    on_cpu = isinstance(place, Cpu)
    spec = load_spec(("tiny" if on_cpu else "llama-3.1-8b") if model == "auto" else model)
    batches = batch or ((1, 32, 128) if on_cpu else (32,))
    hardware = place.hardware(load_profile("h200"))
    print(f"{spec.name}, {turns} turns of {IN_A_TURN} decodes after prompts of {prompt} on {hardware}", flush=True)
    found = {f"batch {number}": _measure(place, spec, number, prompt, turns) for number in batches}
    asked = {"model": spec.name, "prompt": prompt, "iterations in a turn": IN_A_TURN}
    figures = {"unit": "ms per iteration", **asked, "figures": found}
    print(f"written: {write('checks', hardware, figures, folder)}")


def _place(backend: Literal["auto", "cpu", "cuda"]) -> Cpu | Cuda:
    return Cuda() if backend == "cuda" or (backend == "auto" and count_gpus() > 0) else Cpu()


def _measure(place: Cpu | Cuda, spec: ModelSpec, batch: int, num_prompt: int, turns: int) -> Figures:
    """Returns times by what is checked, and their ratios, turn by turn and of all turns together."""
    num_new = WARM_UP + turns * IN_A_TURN + 1
    length, ratio = num_prompt + num_new, num_prompt / num_new
    workload = ClosedBatch(length=length, pd_ratio=ratio, batch=batch, num_requests=batch)
    limits = Limits(batch, max(batch * num_prompt, 2048), length)
    servers = {name: real_server(place, spec, limits, options) for name, options in CHECKS.items()}
    vocabulary = place.vocabulary(spec)
    engines = {name: server.engine(PrefillFirst(), workload.requests(vocabulary)) for name, server in servers.items()}
    for engine in engines.values():
        while len(engine.view.decoding) < batch:
            engine.step()
        _time(engine, WARM_UP)
    orders = islice(cycle(permutations(CHECKS)), turns)  # each server follows each other one as often
    taken = [{name: _time(engines[name], IN_A_TURN) for name in order} for order in orders]
    for server in servers.values():
        server.close()
    found: Figures = {}
    for kind in Milliseconds._fields:
        values = {name: [getattr(times[name], kind) for times in taken] for name in CHECKS}
        found[kind] = {name: spread(milliseconds) for name, milliseconds in values.items()}
        for name in ("races", "off again"):
            ratios = spread([mine / off for mine, off in zip(values[name], values["off"], strict=True)])
            found[kind][f"{name} over off"] = {**ratios, "of all": sum(values[name]) / sum(values["off"])}
        print(f"  batch {batch:3}, {kind:9}  " + "  ".join(_shown(name, found[kind]) for name in CHECKS), flush=True)
    return found


def _time(engine: Engine, iterations: int) -> Milliseconds:
    began, began_processor = time.perf_counter(), time.process_time()
    for _ in range(iterations):
        engine.step()
    wall, processor = time.perf_counter() - began, time.process_time() - began_processor
    return Milliseconds(wall / iterations * 1e3, processor / iterations * 1e3)


def _shown(name: str, found: dict[str, dict[str, float]]) -> str:
    ratio = found.get(f"{name} over off")
    times = f"{name} {found[name]['median']:.3f} ms"
    return times if ratio is None else f"{times} (x {ratio['median']:.3f}, of all {ratio['of all']:.3f})"
