"""Fig 12 of the SARATHI paper: GPT-3 on 64 A100s, 10,000 requests, served by three systems.

    python -m experiments.paper fig12_systems tables=.../aiconfigurator/a100_sxm links=.../vidur/network/a100_dgx
                                      [num_requests=10000] [step=1] [folder=results]

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
from tabulate import tabulate

from cbatch import KVSize, Limits, Policy, Request, Server, Step
from cbatch.cluster import Cluster, RoundRobin
from cbatch.sim import Profile, ProfileCost, SimExecutor, load_profile
from cbatch.sim.importers.vidur import read_links
from cbatch.sim.stages import Span, StageAccount
from cbatch.topology import Topology
from experiments.config.command_line import Count
from experiments.config.presets import load_spec
from experiments.paper.claims import Verdict, read_claims
from experiments.paper.verdicts import conclusion, table, write
from experiments.workloads import AllAtOnce, OpenLoop, ZipfLengths
from policies.chunking import TileAligned
from policies.orca import Orca
from policies.sarathi import Sarathi

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


def main(tables: str, links: str, num_requests: Count = 10_000, step: Count = 1, folder: str = "results") -> int:
    """Run the three systems, print and check their ratios, write fig12_systems.json; returns 1 if a claim fails."""
    outcomes = dict(run_systems(load_linked_profile(tables, links), num_requests, step))
    print(_tabulate(outcomes))
    values = ratios(outcomes)
    verdicts = []
    for claim in read_claims("fig12"):
        what = "bubbles" if claim.quantity == "bubbles_over" else "time"
        verdicts.append(Verdict(claim, values[f"{claim.setting['over']} {what} / {claim.setting['under']} {what}"]))
    print(f"\n{table(verdicts)}\n\n{conclusion(verdicts)}")
    figures = {
        "num_requests": num_requests,
        "step": step,
        "claims": [verdict.row() for verdict in verdicts],
        "systems": {name: _figures(outcome) for name, outcome in outcomes.items()},
    }
    provenance = {name: outcome.provenance for name, outcome in outcomes.items()}
    name = "fig12_systems" if step == 1 else f"fig12_systems_step{step}"
    print(f"written: {write(name, figures, provenance, folder)}")
    return 1 if any(verdict.failed for verdict in verdicts) else 0


def load_linked_profile(tables: str, links: str) -> Profile:
    """The profile of the A100, with its published links."""
    return replace(load_profile(tables), links=read_links(Path(links)))


def run_systems(profile: Profile, count: int, step: int = 1) -> Iterator[tuple[str, Outcome]]:
    """Serve `count` requests with each of the three systems in turn."""
    yield "orca", run(profile, Topology(8, 8), 27, Orca(), requests(count, step))
    yield "sarathi", run(profile, Topology(8, 8), 27, Sarathi(TileAligned(256)), requests(count, step))
    yield "tp", run(profile, Topology(8, replicas=8), 11, Orca(), requests(count, step))


def requests(count: int, step: int = 1) -> list[Request]:
    """Lengths by Zipf's law over the multiples of `step` from 1K to 4K, P:D = 10."""
    drawn = ZipfLengths(theta=0.4, min_length=SHORTEST // step, max_length=LONGEST // step, pd_ratio=1)
    steps = OpenLoop(num_requests=count, arrivals=AllAtOnce(), lengths=drawn).requests(None)
    totals = [step * request.max_tokens for request in steps]
    return [Request(index, total - round(total / 11), round(total / 11)) for index, total in enumerate(totals)]


def run(profile: Profile, topology: Topology, batch: int, policy: Policy, work: Sequence[Request]) -> Outcome:
    """Serve the requests. The replicas share the policy, which must be stateless."""
    cost = ProfileCost(profile, load_spec("gpt-3"), topology)
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


def _tabulate(outcomes: dict[str, Outcome]) -> str:
    """Where the stages' time went, as shares of the time of all stages."""
    names = ("compute", "communication", "pb1", "pb2", "pb3", "no_work")
    rows = [
        (
            name,
            outcome.num_iterations,
            outcome.wall_seconds,
            outcome.seconds,
            float(np.median(outcome.bubbles)),
            *(f"{_share(outcome, part):.1%}" for part in names),
        )
        for name, outcome in outcomes.items()
    ]
    headers = ("system", "iterations", "simulated in s", "seconds", "median bubble s", *names)
    return tabulate(rows, headers, floatfmt=("", "d", ".1f", ".1f", ".2f"))


def _share(outcome: Outcome, part: str) -> float:
    seconds: float = sum(getattr(stage, part) for stage in outcome.stages)
    return seconds / sum(stage.span for stage in outcome.stages)


def _figures(outcome: Outcome) -> dict[str, Any]:
    """Percentiles 0 to 100 of bubble time and of ends, and the times of each stage."""
    percentiles = np.percentile(outcome.bubbles, range(101))
    ends = np.percentile(outcome.ends, range(101), method="lower")
    return {
        "seconds": outcome.seconds,
        "iterations": outcome.num_iterations,
        "wall_seconds": outcome.wall_seconds,
        "bubble_seconds_percentiles": percentiles.tolist(),
        "end_percentiles": ends.tolist(),
        "stages": [{name: getattr(stage, name) for name in StageAccount.__slots__} for stage in outcome.stages],
    }
