"""The cases by which simulation is validated: workloads, each under several policies, served and then simulated.

No case was used to build the profile: rows of the trace, arrivals and policies differ.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from cbatch import SLO, ConfigError, Policy, Request
from cbatch.kv import blocks_for
from cbatch.request import spec_of
from experiments.settings.compose import compose_run
from experiments.settings.settings import Settings
from experiments.workloads import GammaArrivals, TraceReplay
from experiments.workloads.base import Limit, Tier, Vocabulary
from experiments.workloads.seeds import Purpose, generator
from reproduction.selection import beginning_with

_TABLES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))

POLICIES: Mapping[str, str] = _TABLES["policies"]
"""Settings of `experiments.run` by the names that results files have."""

SERVE = "sarathi_serve, 512 tokens"

TIERS = {"interactive": Tier(share=0.5, slo=SLO(ttft=1.0, tbt=0.05)), "batch": Tier(share=0.5, slo=SLO(total=30.0))}
"""Service classes of the requests, which are also their clients."""

MOST_NEW_TOKENS = 1024
"""Limit of a request's output, which hides the true length; the longest output of the Azure conversation trace is 992."""

_BLOCK, _TILE = 128, 128  # of the GPU backend

Arrivals = float | Literal["recorded"]
Loop = Literal["async", "sync"]


@dataclass(frozen=True, slots=True)
class Case:
    """One workload.

    model: a preset. batch, max_tokens: of an iteration.
    policies: names in `POLICIES`.
    load: share of the capacity at which requests of an open loop arrive; None: all arrive at the start.
    arrivals: of an open loop: "recorded", scaled to the load, or gamma-distributed intervals with this coefficient of
        variation; 1 is Poisson.
    capacity_of: the case whose requests per second under `SERVE` are the capacity.
    rate: requests per second of an open loop, instead of that share of a measured capacity.
    start: seconds into the trace at which the requests begin. slo: objectives of both tiers instead of their own.
    kv_blocks: most blocks of the KV cache; None: as many as the batch can use, if there is room. loop: the engine's.
    tensor_parallel: GPUs that share every layer.
    """

    name: str
    model: str
    batch: int
    max_tokens: int
    policies: tuple[str, ...]
    num_requests: int = 400
    load: float | None = None
    arrivals: Arrivals = 1.0
    capacity_of: str = "held out, queued"
    rate: float | None = None
    start: float = 0.0
    slo: SLO | None = None
    kv_blocks: int | None = None
    loop: Loop = "async"
    tensor_parallel: int = 1

    def fits(self, other: "Case") -> bool:
        """Whether an executor built for the other case serves this one too."""
        return self._server == other._server

    @property
    def _server(self) -> tuple[str, int, int, int]:
        return self.model, self.batch, self.max_tokens, self.tensor_parallel


CASES = tuple(Case(**{**entry, "policies": tuple(entry["policies"])}) for entry in _TABLES["cases"])


def make_policy(name: str) -> Policy:
    """Returns a new policy of this name in `POLICIES`, or of these settings."""
    return _settings(name).policy()


@cache
def _settings(name: str) -> Settings:
    return compose_run(*POLICIES.get(name, name).split())


def workload(case: Case, path: str, capacity: float | None) -> "HeldOut":
    """Returns the workload of a case.

    path: a trace, for its lengths. capacity: requests per second; open loops without a capacity or a rate raise ConfigError.
    """
    rate = case.rate
    if rate is None and case.load is not None and capacity is not None:
        rate = case.load * capacity
    elif rate is None and case.load is not None:
        problem = f"arrives at a share of the capacity, which case {case.capacity_of} measures"
        raise ConfigError(f"fidelity: case {case.name!r} {problem}; add {case.capacity_of} to cases")
    tiers = TIERS if case.slo is None else {tier: Tier(share=0.5, slo=case.slo) for tier in TIERS}
    held = HeldOut(path=path, num_requests=case.num_requests, start=case.start, rate=rate, arrivals=case.arrivals)
    return replace(held, tiers=tiers)


def sizes(case: Case, asked: Sequence[Request]) -> dict[str, Any]:
    """Returns the model and limits of a GPU's server with room for a batch of the longest request, as a run keeps them."""
    longest = max(request.max_tokens for request in asked)
    blocks = min(case.kv_blocks or sys.maxsize, case.batch * blocks_for(longest, _BLOCK))
    tokens = {"tile": _TILE, "max_tokens": case.max_tokens, "longest": longest}
    limits = {"batch": case.batch, **tokens, "num_blocks": blocks, "block_size": _BLOCK}
    return {"model": case.model, "tensor_parallel": case.tensor_parallel, **limits}


@dataclass(frozen=True, kw_only=True)
class HeldOut(TraceReplay):
    """A stretch of a trace with hidden output lengths and service classes; a request's class is its client, too.

    rate: requests per second on average; None: all arrive at the start. arrivals: see `Case`.
    """

    rate: float | None = None
    arrivals: Arrivals = 1.0
    max_new_tokens: Limit = MOST_NEW_TOKENS
    tiers: Mapping[str, Tier] | None = field(default_factory=lambda: dict(TIERS))

    def requests(self, vocabulary: Vocabulary | None) -> list[Request]:
        specs = [spec_of(request) for request in super().requests(vocabulary)]
        times = np.array([spec.arrival_time for spec in specs])
        if self.rate is None:
            times[:] = 0
        elif self.arrivals == "recorded":
            times *= (len(times) - 1) / times[-1] / self.rate
        else:
            drawn = generator(self.seed, Purpose.ARRIVALS)
            times = GammaArrivals(rate=self.rate, cv=self.arrivals).times(drawn, len(times))
        return [
            Request.from_spec(replace(spec, arrival_time=time, client=spec.tier))
            for spec, time in zip(specs, times.tolist(), strict=True)
        ]


def chosen_cases(cases: str, policies: str = "") -> list[Case]:
    """Returns the cases and their policies whose names begin with one of these beginnings, separated by ";"."""
    wanted = beginning_with("cases", cases, [case.name for case in CASES])
    allowed = beginning_with("policies", policies, POLICIES)
    chosen = []
    for case in CASES:
        policies_of = tuple(name for name in case.policies if name in allowed)
        if case.name in wanted and policies_of:
            chosen.append(replace(case, policies=policies_of))
    return chosen
