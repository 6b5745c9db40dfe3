"""How the ratios of Fig 12 depend on what the SARATHI paper leaves open, changing one thing at a time.

    python -m reproduction.papers fig12_sensitivity tables=... links=... [num_requests=3000] [folder=results]

Chunks gain more over whole prompts in a pipeline here, 2.7x with 3,000 requests, than in the paper, 1.91x. A whole prompt takes seven times as long
in each stage as an iteration of decodes, and all iterations behind it wait for it to pass. Prompts that pass one behind the other, in
different micro-batches, share that wait; a single prompt causes it alone. The ratio therefore depends on how many prompts start in the same round
of the pipeline, which the paper does not state. With 27 requests in all the pipeline runs nearly empty, and 8 x TP8 is by far the fastest,
against the figure. All rows together take two minutes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from tabulate import tabulate

from cbatch import Plan, Policy, Request, View
from cbatch.model.topology import Topology
from cbatch.sim import Profile
from cbatch.sim.roofline import Affine
from experiments.settings.command_line import Count
from policies.chunking import Fixed, TileAligned
from policies.orca import Orca
from policies.sarathi import Sarathi
from reproduction import RESULTS
from reproduction.papers.fig12_systems import Outcome, load_linked_profile, ratios, requests, run
from reproduction.papers.verdicts import write

PIPELINE, REPLICAS = Topology(8, 8), Topology(8, replicas=8)
RATIOS = ("bubbles orca/sarathi", "time orca/sarathi", "time tp/sarathi", "time orca/tp")
HEADERS = ("reading", *RATIOS, "prompts in a round", "why")
FREE = Affine(0.0, 0.0)

Work = Callable[[int], list[Request]]


class Aligned(Orca):
    """Orca that starts prompts only in every `rounds`-th round of the pipeline, in any iteration of it."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        if view.iteration // view.limits.num_stages % self.rounds == 0 or not plan.num_requests:
            for request in view.waiting:
                if not plan.add(request, whole=True, reserve=request.max_tokens):
                    break
        return plan.build()


def tile_aligned() -> Policy:
    return Sarathi(TileAligned(256))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read the paper; everything else is as in `fig12_systems`.

    step: lengths are multiples of so many tokens. batch: of an iteration in the pipeline.
    """

    name: str
    why: str
    orca: Callable[[], Policy] = Orca
    sarathi: Callable[[], Policy] = tile_aligned
    step: int = 1
    batch: int = 27

    def systems(self) -> dict[str, tuple[Topology, int, Callable[[], Policy]]]:
        """Returns topology, batch and policy maker of each system."""
        pipelined = {"orca": (PIPELINE, self.batch, self.orca), "sarathi": (PIPELINE, self.batch, self.sarathi)}
        return {**pipelined, "tp": (REPLICAS, 11, Orca)}


READINGS = (
    Reading(name="as fig12", why="27 in each of 8 iterations in flight, lengths of any number of tokens"),
    Reading(name="27 in all", why="3 in each of 8 iterations", batch=27 // 8),
    Reading(name="aligned, 4 rounds", why="prompts start in every 4th round of the pipeline", orca=lambda: Aligned(4)),
    Reading(name="aligned, 8 rounds", why="in every 8th", orca=lambda: Aligned(8)),
    Reading(name="aligned, 16 rounds", why="in every 16th", orca=lambda: Aligned(16)),
    Reading(name="steps of 512", why="lengths in multiples of 512 tokens", step=512),
    Reading(name="256 + decodes", why="a chunk of 256 tokens, decodes on top", sarathi=lambda: Sarathi(Fixed(256))),
)


def main(tables: str, links: str, num_requests: Count = 3000, folder: str = RESULTS) -> int:
    """Simulate every reading, print its ratios and write fig12_sensitivity.json."""
    rows, provenance = [], {}
    for reading, outcomes in _simulate(load_linked_profile(tables, links), num_requests):
        values = ratios(outcomes)
        rows.append((reading.name, *values.values(), prompts_in_a_round(outcomes["orca"]), reading.why))
        provenance = {name: outcome.provenance for name, outcome in outcomes.items()}
        print(f"{reading.name}: orca/sarathi {values['orca time / sarathi time']:.2f}", flush=True)
    print(f"\n{tabulate(rows, HEADERS, floatfmt='.2f')}")
    figures = {"num_requests": num_requests, "readings": [dict(zip(HEADERS, row, strict=True)) for row in rows]}
    print(f"written: {write('fig12_sensitivity', figures, provenance, folder)}")
    return 0


def prompts_in_a_round(outcome: Outcome) -> float:
    """Mean number of prompts that start in a round (one iteration of each micro-batch), over the rounds with any."""
    stages = len(outcome.stages)
    started = np.array(outcome.prompts_started[: len(outcome.prompts_started) // stages * stages])
    rounds = started.reshape(-1, stages).sum(axis=1)
    return float(rounds[rounds > 0].mean())


def _simulate(profile: Profile, count: int) -> Iterator[tuple[Reading, dict[str, Outcome]]]:
    """The three systems under each reading; those that it does not change are not simulated again."""
    usual: dict[str, Outcome] = {}
    for reading in READINGS:
        outcomes = dict(usual)
        for name, system in reading.systems().items():
            if not usual or system != READINGS[0].systems()[name] or reading.step > 1:
                topology, batch, policy = system
                outcomes[name] = run(profile, topology, batch, policy(), requests(count, reading.step))
        usual = usual or outcomes
        yield reading, outcomes
