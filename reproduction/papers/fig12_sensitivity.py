"""How the ratios of Fig 12 depend on what the SARATHI paper leaves open, changing one thing at a time.

    python -m reproduction.papers fig12_sensitivity tables=... links=... [num_requests=3000] [folder=results]

Requests are fewer than in Fig 12. Every row simulates the systems that its reading of the paper
changes; all rows together take three minutes.

The question is why chunks gain more over whole prompts in a pipeline here, 2.7x with 3,000 requests, than in the paper,
1.91x. A whole prompt takes seven times as long in each stage as an iteration of decodes, and all iterations behind it
wait for it to pass. Prompts that pass one behind the other, in different micro-batches, share that wait; a single
prompt causes it alone. The ratio therefore depends on how many prompts start in the same round of the pipeline, which
follows from how many requests end in it; the paper states neither. It does not matter whether a request stays in its
micro-batch, how many prompts share an iteration, the form of Zipf's law, how Sarathi counts its 256 tokens, or the
links. With 27 requests in all the pipeline runs nearly empty, and 8 x TP8 is by far the fastest, against the figure.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from tabulate import tabulate

from cbatch import Plan, Policy, Request, View
from cbatch.sim import Profile
from cbatch.sim.links import Links
from cbatch.sim.roofline import Affine
from cbatch.topology import Topology
from experiments.settings.command_line import Count
from experiments.workloads.lengths import split
from policies.chunking import Fixed, TileAligned
from policies.orca import Orca
from policies.sarathi import Sarathi
from reproduction import RESULTS
from reproduction.papers.fig12_systems import LONGEST, SHORTEST, Outcome, load_linked_profile, ratios, requests, run
from reproduction.papers.verdicts import write

PIPELINE, REPLICAS = Topology(8, 8), Topology(8, replicas=8)
RATIOS = ("bubbles orca/sarathi", "time orca/sarathi", "time tp/sarathi", "time orca/tp")
HEADERS = ("reading", *RATIOS, "prompts in a round", "why")
FREE = Affine(0.0, 0.0)

Work = Callable[[int], list[Request]]


class OneNewPrompt(Orca):
    """Orca that starts at most one prompt per iteration, as its best case in Fig 11 does (section 5.1.3)."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        for request in islice(view.waiting, 1):
            plan.add(request, whole=True, reserve=request.max_tokens)
        return plan.build()


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


class Pinned(Orca):
    """Orca whose requests stay in the micro-batch that admitted them: i modulo the stages, for iteration i."""

    def __init__(self) -> None:
        self._members: defaultdict[int, list[Request]] = defaultdict(list)

    def plan(self, view: View) -> Plan:
        stages = view.limits.num_stages
        members = self._members[view.iteration % stages]
        members[:] = [request for request in members if request in view.decoding]
        plan = view.plan()
        for request in members:
            plan.add(request, 1)
        for request in view.waiting:
            if not plan.add(request, whole=True, reserve=request.max_tokens):
                break
            members.append(request)
        if not plan.num_requests:  # the micro-batch is empty: there is nothing to pin
            plan.add_decodes()
        return plan.build()


def tile_aligned() -> Policy:
    return Sarathi(TileAligned(256))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read the paper; everything else is as in `fig12_systems`.

    work: makes the requests, given their number. batch: of an iteration in the pipeline. free_links: messages are free.
    """

    name: str
    why: str
    orca: Callable[[], Policy] = Orca
    sarathi: Callable[[], Policy] = tile_aligned
    work: Work = requests
    batch: int = 27
    free_links: bool = False

    def systems(self) -> dict[str, tuple[Topology, int, Callable[[], Policy]]]:
        """Topology, batch and policy maker of each system."""
        pipelined = {"orca": (PIPELINE, self.batch, self.orca), "sarathi": (PIPELINE, self.batch, self.sarathi)}
        return {**pipelined, "tp": (REPLICAS, 11, Orca)}


def stepped(step: int) -> Work:
    return lambda count: requests(count, step)


def law_over_lengths(theta: float) -> Work:
    """Lengths L from 1K to 4K with probability proportional to 1 / L^theta; P:D = 10."""

    def work(count: int) -> list[Request]:
        lengths = np.arange(SHORTEST, LONGEST + 1)
        weights = lengths**-theta
        drawn = np.random.default_rng(0).choice(lengths, count, p=weights / weights.sum())
        columns = (column.tolist() for column in split(drawn, 10))
        return [Request(index, prompt, output) for index, (prompt, output) in enumerate(zip(*columns, strict=True))]

    return work


READINGS = (
    Reading(name="as fig12", why="27 in each of 8 iterations in flight, lengths of any number of tokens"),
    Reading(name="27 in all", why="3 in each of 8 iterations", batch=27 // 8),
    Reading(name="pinned", why="a request stays in its micro-batch", orca=Pinned),
    Reading(name="one new prompt", why="at most one whole prompt per iteration: Fig 11's best case", orca=OneNewPrompt),
    Reading(name="aligned, 4 rounds", why="prompts start in every 4th round of the pipeline", orca=lambda: Aligned(4)),
    Reading(name="aligned, 8 rounds", why="in every 8th", orca=lambda: Aligned(8)),
    Reading(name="aligned, 16 rounds", why="in every 16th", orca=lambda: Aligned(16)),
    Reading(
        name="Zipf over L", why="probability of a length L: 1 / L^0.4, not 1 / rank^0.4", work=law_over_lengths(0.4)
    ),
    Reading(name="even lengths", why="theta 0", work=law_over_lengths(0.0)),
    Reading(name="steps of 128", why="lengths in multiples of 128 tokens", work=stepped(128)),
    Reading(name="steps of 256", why="in multiples of 256", work=stepped(256)),
    Reading(name="steps of 512", why="in multiples of 512", work=stepped(512)),
    Reading(
        name="256 + decodes", why="a chunk of 256 prompt tokens, decodes on top", sarathi=lambda: Sarathi(Fixed(256))
    ),
    Reading(name="free links", why="messages take no time", free_links=True),
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
        linked = replace(profile, links=_free(profile.links)) if reading.free_links else profile
        outcomes = dict(usual)
        for name, (topology, batch, policy) in reading.systems().items():
            differs = usual and reading.systems()[name] != READINGS[0].systems()[name]
            if not usual or differs or reading.work is not requests or reading.free_links:
                outcomes[name] = run(linked, topology, batch, policy(), reading.work(count))
        usual = usual or outcomes
        yield reading, outcomes


def _free(links: Links) -> Links:
    return replace(links, all_reduce=dict.fromkeys(links.all_reduce, FREE), within_node=FREE, between_nodes=FREE)
