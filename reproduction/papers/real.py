"""Steady states of equal requests with real tokens, on this machine's GPU or, for a small model, its CPU.

One server is built for the largest load and serves them all in turn: weights are loaded and graphs captured once. Times
are the host's clock between the ends of requests. Policies, requests and what is counted are those of `steady`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cbatch import ConfigError, Limits, ModelSpec, Server
from cbatch.kv import blocks_for
from cbatch.model.checkpoint import Vocabulary
from experiments.settings.backends import Cpu, Cuda
from experiments.settings.hardware import cost_model, count_gpus
from experiments.setup.presets import load_spec
from experiments.setup.servers import real_server
from reproduction.papers import steady
from reproduction.papers.panels import PANELS, Panel
from reproduction.papers.steady import WARM_UP, Load, Scheme, SteadyState

MODEL = "llama-13b"
COUNTED = 1
"""Generations of requests that are measured, after as many warm-up generations as in simulation."""


@dataclass(eq=False)
class RealSteadyState(SteadyState):
    """Measures loads by serving them. `cost` predicts single iterations from the profile of the same kind of GPU.

    server: its limits and KV cache hold every load.
    """

    server: Server = field(kw_only=True)
    hardware: str = field(kw_only=True)

    def provenance(self) -> dict[str, Any]:
        return {
            "measured_on": self.hardware,
            "model": self.cost.spec.name,
            "counted_generations": COUNTED,
            "single_iterations": self.cost.provenance(),
        }

    def close(self) -> None:
        self.server.close()

    def _run(self, scheme: Scheme, load: Load, chunk: int) -> float:
        server = replace(self.server, limits=steady.limits_of(load, steady.tile_of(self.cost, chunk)))
        generations = WARM_UP + COUNTED + 1
        requests = steady.requests_of(load, generations, steady.stagger_of(scheme), Vocabulary(self.cost.spec))
        begin, end = steady.find_span(server.serve(steady.policy_of(scheme, chunk), requests), load, COUNTED)
        return (end - begin) / (COUNTED * load.batch)


def on_gpu() -> RealSteadyState:
    """Builds a server of LLaMA-13B on this machine's GPU.

    Raises:
        ConfigError: there is no GPU. CapacityError: its memory does not hold the model and a batch.
    """
    if count_gpus() == 0:
        raise ConfigError("hardware=gpu, but there is no GPU; leave it out to simulate")
    return serve_on(Cuda(), load_spec(MODEL), PANELS)


def serve_on(backend: Cpu | Cuda, spec: ModelSpec, loads: Sequence[Panel]) -> RealSteadyState:
    """Builds a server that holds the batch of every load."""
    tokens = max(load.batch * load.length for load in loads)
    limits = Limits(max(load.batch for load in loads), tokens, max(load.length for load in loads))
    # two batches: one may end at once, and its blocks are freed an iteration later
    num_blocks = max(2 * load.batch * blocks_for(load.length, backend.block_size) for load in loads)
    server = real_server(backend, spec, limits, kv_tokens=num_blocks * backend.block_size)
    cost = cost_model(Cuda.predicts_with, spec, max_batch=limits.max_batch)
    return RealSteadyState(cost, server=server, hardware=backend.hardware(cost.profile))
