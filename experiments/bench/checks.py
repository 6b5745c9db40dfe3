"""What `runtime.check=races` costs: the same decodes with unchecked streams, with checked ones, and unchecked once more.

The second unchecked executor is built from scratch and shows the noise: what "off" costs cannot be told from it. The three
serve in turn, so that the machine's speed cancels out of the ratios. On a GPU if there is one, else on the CPU, where a
small model makes an iteration short and the check's share of it large.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from cbatch import ConfigError, Engine, Executor, Limits, Request
from cbatch.kv import blocks_for
from cbatch.model import ModelSpec
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import load_profile
from experiments.config.backends import Backend, Cpu, Cuda, Runtime, count_gpus
from experiments.config.command_line import Count
from experiments.config.presets import load_spec
from experiments.store.benchmark_file import spread, write
from experiments.workloads import ClosedBatch
from policies.prefill_first import PrefillFirst

PROFILE = load_profile("h200")
"""No figure depends on it: it names the hardware, and the policy predicts nothing."""

CHECKS = {"off": "off", "races": "races", "off again": "off"}
WARM_UP_TOKENS = 16


class Milliseconds(NamedTuple):
    """Of one iteration. wall: from the first plan to the last token. processor: of all threads, which others' work spares."""

    wall: float
    processor: float


class Server:
    """An executor; serves one set of requests after another."""

    def __init__(self, place: Backend, spec: ModelSpec, limits: Limits, check: str) -> None:
        self._cost = ProfileCost(PROFILE, spec)
        self._limits, self._block_size = limits, place.block_size
        self._num_blocks = limits.max_running * blocks_for(limits.max_request_tokens, place.block_size)
        runtime = Runtime(asynchronous=True, graphs="all", compile=False, check=check)  # type: ignore[arg-type]
        self.executor: Executor = place.executor(spec, self._cost, limits, runtime, self._num_blocks, self._block_size)

    def serve(self, requests: list[Request]) -> Milliseconds:
        engine = Engine(
            PrefillFirst(),
            self.executor,
            self._limits,
            self._cost,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
        )
        engine.submit(requests)
        began = time.process_time()
        steps = engine.run().steps
        processor = time.process_time() - began
        return Milliseconds(
            *(seconds / len(steps) * 1e3 for seconds in (steps[-1].received_at - steps[0].planned_at, processor))
        )


def main(
    model: str = "auto",
    batch: tuple[Count, ...] = (),
    prompt: Count = 64,
    new: Count = 256,
    repeats: Count = 5,
    backend: str = "auto",
    folder: str = "results",
) -> None:
    """Measure, print and write checks.json. auto, no batch: tiny at 1, 32 and 128 on a CPU, llama-3.1-8b at 32 on a GPU."""
    place = _place(backend)
    on_cpu = isinstance(place, Cpu)
    spec = load_spec(("tiny" if on_cpu else "llama-3.1-8b") if model == "auto" else model)
    batches = batch or ((1, 32, 128) if on_cpu else (32,))
    hardware = place.hardware(PROFILE)
    print(f"{spec.name}, requests of {prompt} + {new} tokens on {hardware}", flush=True)
    found = {f"batch {number}": _measure(place, spec, number, prompt, new, repeats) for number in batches}
    figures = {"unit": "ms per iteration", "model": spec.name, "prompt": prompt, "new": new, "figures": found}
    print(f"written: {write('checks', hardware, figures, Path(folder))}")


def _place(backend: str) -> Backend:
    if backend not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"checks: backend={backend}: give auto, cpu or cuda")
    return Cuda() if backend == "cuda" or (backend == "auto" and count_gpus() > 0) else Cpu()


def _measure(
    place: Backend, spec: ModelSpec, batch: int, num_prompt: int, num_new: int, repeats: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Times by what is checked, and their ratios; the three take turns."""

    def ask(num_new: int) -> list[Request]:
        return ClosedBatch(
            length=num_prompt + num_new, pd_ratio=num_prompt / num_new, batch=batch, num_requests=batch
        ).requests(place.vocabulary(spec))

    limits = Limits(batch, max(batch * num_prompt, 2048), num_prompt + num_new)
    servers = {name: Server(place, spec, limits, check) for name, check in CHECKS.items()}
    for server in servers.values():
        server.serve(ask(min(WARM_UP_TOKENS, num_new)))
    times: dict[str, list[Milliseconds]] = {name: [] for name in servers}
    for _ in range(repeats):
        for name, server in servers.items():
            times[name].append(server.serve(ask(num_new)))
    for server in servers.values():
        server.executor.close()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in Milliseconds._fields:
        values = {name: [getattr(time, kind) for time in taken] for name, taken in times.items()}
        found[kind] = {name: spread(milliseconds) for name, milliseconds in values.items()}
        for name in ("races", "off again"):
            ratio = spread([mine / off for mine, off in zip(values[name], values["off"], strict=True)])
            found[kind][f"{name} over off"] = {**ratio, "of least": min(values[name]) / min(values["off"])}
        print(f"  batch {batch:3}, {kind:9}  " + "  ".join(_shown(name, found[kind]) for name in CHECKS), flush=True)
    return found


def _shown(name: str, found: dict[str, dict[str, float]]) -> str:
    ratio = found.get(f"{name} over off")
    times = f"{name} {found[name]['median']:.3f} ms"
    return times if ratio is None else f"{times} (x {ratio['median']:.3f}, of the least {ratio['of least']:.3f})"
