"""The three systems of Fig 12 of the SARATHI paper: GPT-3 on 64 A100s. `figures.fig12` draws 10,000 requests of them.

orca: 8 pipeline stages of 8 GPUs, whole prompts mixed with decodes, 27 requests in each of 8 iterations in flight.
sarathi: the same with chunks, 256 tokens an iteration. tp: 8 replicas of 8 GPUs without a pipeline, Orca, 11 requests
each. P:D = 10, lengths by Zipf's law (theta 0.4) from 1K to 4K, in multiples of `step` tokens.

The paper does not say whether 27 requests are in each iteration or in the whole pipeline. Memory decides: beside 350 GB
of weights, 90% of 64 x 80 GB holds 220 requests of 4K, 27 for each of 8 iterations in flight; 90% of 8 x 80 GB holds 11
requests. `fig12_sensitivity` shows what else the paper leaves open, and how it changes the ratios.

Bubble time of a request: seconds that stages waited for the iterations it was part of, mean over the stages.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cbatch import KVSize, Limits, Policy, Request, Server, Step
from cbatch.cluster import Cluster, RoundRobin
from cbatch.model.topology import Topology
from cbatch.sim import Profile, ProfileCost, SimExecutor
from cbatch.sim.stages import Span, StageAccount
from experiments.settings.presets import load_spec
from experiments.workloads import AllAtOnce, OpenLoop, ZipfLengths
from policies.chunking import TileAligned
from policies.orca import Orca
from policies.sarathi import Sarathi
from reproduction.profiles import convert
from reproduction.profiles.vidur import read_links

MODEL = "gpt-3"
SHORTEST, LONGEST, BLOCK = 1024, 4096, 16


class BubbleTimes(SimExecutor):
    """Records for each request the bubbles before its iterations, in seconds summed over the stages."""

    def __init__(self, cost: ProfileCost) -> None:
        super().__init__(cost)
        self.bubbles: defaultdict[int, float] = defaultdict(float)
        self.prompts_started: list[int] = []

    def launch(self, step: Step) -> Span:
        span = super().launch(step)
        self.prompts_started.append(len(step.start) - int(np.count_nonzero(step.start)))
        if span.bubbles:
            for request in step.requests:
                self.bubbles[request.id] += span.bubbles
        return span


@dataclass(frozen=True)
class Outcome:
    """One system's run.

    seconds: to the end of the last request.
    ends: of each request, sorted. bubbles: of each request, mean over stages.
    prompts_started: number of requests whose prompt begins in each iteration, [iterations of all replicas].
    """

    seconds: float
    ends: list[float]
    bubbles: list[float]
    stages: list[StageAccount]
    num_iterations: int
    prompts_started: list[int]
    wall_seconds: float
    provenance: dict[str, Any]


def load_linked_profile(tables: str, links: str) -> Profile:
    """The profile of the A100, with its published links."""
    return replace(convert(Path(tables), [load_spec(MODEL)]), links=read_links(Path(links)))


def run_systems(profile: Profile, count: int) -> Iterator[tuple[str, Outcome]]:
    """Serve `count` requests with each of the three systems in turn."""
    yield "orca", run(profile, Topology(8, 8), 27, Orca(), requests(count))
    yield "sarathi", run(profile, Topology(8, 8), 27, Sarathi(TileAligned(256)), requests(count))
    yield "tp", run(profile, Topology(8, replicas=8), 11, Orca(), requests(count))


def requests(count: int, step: int = 1) -> list[Request]:
    """Lengths by Zipf's law over the multiples of `step` from 1K to 4K, P:D = 10."""
    drawn = ZipfLengths(theta=0.4, min_length=SHORTEST // step, max_length=LONGEST // step, pd_ratio=1)
    steps = OpenLoop(num_requests=count, arrivals=AllAtOnce(), lengths=drawn).requests(None)
    totals = [step * request.max_tokens for request in steps]
    return [Request(index, total - round(total / 11), round(total / 11)) for index, total in enumerate(totals)]


def run(profile: Profile, topology: Topology, batch: int, policy: Policy, work: Sequence[Request]) -> Outcome:
    """Serve the requests. The replicas share the policy, which must be stateless."""
    cost = ProfileCost(profile, load_spec(MODEL), topology)
    limits = Limits(batch, batch * LONGEST, LONGEST, num_stages=topology.pipeline_stages)
    executors = [BubbleTimes(cost) for _ in range(topology.replicas)]
    kv = KVSize(limits.max_running * LONGEST // BLOCK, BLOCK)
    servers = [Server(executor, limits, cost, kv, asynchronous=False) for executor in executors]
    cluster = Cluster([server.engine(policy) for server in servers], RoundRobin())
    begin = time.perf_counter()
    cluster.submit(work)
    record = cluster.run()
    wall_seconds = time.perf_counter() - begin
    shares = [executor.bubbles for executor in executors]
    bubbles = [sum(share[each.id] for share in shares) / topology.pipeline_stages for each in record.requests]
    ends = [request.finished_at or 0.0 for request in record.requests]
    started = [number for executor in executors for number in executor.prompts_started]
    stages, num_iterations = cluster.executor.accounts(), len(record.steps)
    return Outcome(ends[-1], ends, bubbles, stages, num_iterations, started, wall_seconds, cost.provenance())


def ratios(outcomes: dict[str, Outcome]) -> dict[str, float]:
    """The ratios that the paper prints, by name."""
    orca, sarathi, tp = (outcomes[name] for name in ("orca", "sarathi", "tp"))
    return {
        "orca bubbles / sarathi bubbles": float(np.median(orca.bubbles) / np.median(sarathi.bubbles)),
        "orca time / sarathi time": orca.seconds / sarathi.seconds,
        "tp time / sarathi time": tp.seconds / sarathi.seconds,
        "orca time / tp time": orca.seconds / tp.seconds,
    }


def time_shares(outcome: Outcome) -> dict[str, float]:
    """Where the time of all stages went, as shares of it."""
    span = sum(stage.span for stage in outcome.stages)
    parts = ("compute", "communication", "pb1", "pb2", "pb3", "no_work")
    return {part: sum(getattr(stage, part) for stage in outcome.stages) / span for part in parts}
