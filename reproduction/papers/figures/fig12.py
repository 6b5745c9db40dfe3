"""Fig 12 of SARATHI (arXiv 2308.16369): GPT-3 on 64 A100s, bubble time per request, time to serve 10,000 requests.

orca: 8 pipeline stages of 8 GPUs, whole prompts mixed with decodes, 27 requests in each of 8 iterations in flight.
sarathi: the same with chunks, 256 tokens an iteration. tp: 8 replicas of 8 GPUs without a pipeline, Orca, 11 requests
each. P:D = 10, lengths by Zipf's law (theta 0.4) from 1K to 4K.

The paper does not say whether 27 requests are in each iteration or in the whole pipeline. Memory decides: beside 350 GB
of weights, 90% of 64 x 80 GB holds 220 requests of 4K, 27 for each of 8 iterations in flight; 90% of 8 x 80 GB holds 11
requests.

Chunks gain 2.7x over whole prompts here (3,000 requests), 1.91x in the paper: all iterations behind a whole prompt wait for that prompt, and
the ratio depends on how many prompts start in the same round of the pipeline. With 27 requests in all, the pipeline runs nearly empty, and
8 x TP8 is by far the fastest, against the figure.

Bubble time of a request: seconds that stages waited for the iterations it was part of, mean over the stages.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from cbatch import KVSize, Limits, Policy, Request, Server, Step
from cbatch.arrivals import listed
from cbatch.cluster import Cluster, RoundRobin
from cbatch.model.topology import Topology
from cbatch.sim import Profile, ProfileCost, SimExecutor
from cbatch.sim.stages import Span
from experiments.plots.style import line_style, new_figure
from experiments.setup.presets import load_spec
from experiments.workloads import AllAtOnce, OpenLoop, ZipfLengths
from policies.chunking import TileAligned
from policies.orca import Orca
from policies.sarathi import Sarathi
from reproduction.papers.claims import Claim
from reproduction.papers.frames import select
from reproduction.papers.machines import Machines
from reproduction.parts import legend, mark_printed, paper_style
from reproduction.profiles import convert
from reproduction.profiles.vidur import read_links

MODEL = "gpt-3"
SHORTEST, LONGEST, BLOCK = 1024, 4096, 16
NUM_REQUESTS = 10_000
NAMES = {"orca": "TP8-PP8, Orca", "sarathi": "TP8-PP8, Sarathi", "tp": "8 x TP8, Orca"}
HEADING = "GPT-3 on 64 A100s: 8 pipeline stages of 8 tensor-parallel GPUs (TP8-PP8) or 8 replicas of 8 (8 x TP8)"
HARDWARE, BUBBLES, ENDS = "64 A100s", "bubbles", "ends"


class BubbleTimes(SimExecutor):
    """Records for each request the bubbles before its iterations, in seconds summed over the stages."""

    def __init__(self, cost: ProfileCost) -> None:
        super().__init__(cost)
        self.bubbles: defaultdict[int, float] = defaultdict(float)

    def launch(self, step: Step) -> Span:
        span = super().launch(step)
        if span.bubbles:
            for request in step.requests:
                self.bubbles[request.id] += span.bubbles
        return span


@dataclass(frozen=True)
class Outcome:
    """One system's run. ends: seconds at which each request ended, sorted. bubbles: seconds of each request, mean over stages."""

    ends: list[float]
    bubbles: list[float]
    provenance: dict[str, Any]


def run_systems(profile: Profile) -> Iterator[tuple[str, Outcome]]:
    """Serves the requests with each of the three systems in turn."""
    pipeline, replicas = Topology(8, 8), Topology(8, replicas=8)
    yield "orca", run(profile, pipeline, 27, Orca(), requests())
    yield "sarathi", run(profile, pipeline, 27, Sarathi(TileAligned(256)), requests())
    yield "tp", run(profile, replicas, 11, Orca(), requests())


def requests() -> list[Request]:
    """Returns requests with lengths by Zipf's law from 1K to 4K, P:D = 10."""
    drawn = ZipfLengths(theta=0.4, min_length=SHORTEST, max_length=LONGEST, pd_ratio=1)
    drawn_requests = OpenLoop(num_requests=NUM_REQUESTS, arrivals=AllAtOnce(), lengths=drawn).requests(None)
    totals = [request.max_tokens for request in drawn_requests]
    return [Request(index, total - round(total / 11), round(total / 11)) for index, total in enumerate(totals)]


def run(profile: Profile, topology: Topology, batch: int, policy: Policy, work: Sequence[Request]) -> Outcome:
    """Serves the requests. The replicas share the policy, which must be stateless."""
    cost = ProfileCost(profile, load_spec(MODEL), topology)
    limits = Limits(batch, batch * LONGEST, LONGEST, num_stages=topology.pipeline_stages)
    executors = [BubbleTimes(cost) for _ in range(topology.replicas)]
    kv = KVSize(limits.max_running * LONGEST // BLOCK, BLOCK)
    servers = [Server(executor, limits, cost, kv, asynchronous=False) for executor in executors]
    cluster = Cluster([server.engine(policy) for server in servers], RoundRobin())
    cluster.attach(listed(work))
    record = cluster.run()
    shares = [executor.bubbles for executor in executors]
    bubbles = [sum(share[each.id] for share in shares) / topology.pipeline_stages for each in record.requests]
    return Outcome([request.finished_at or 0.0 for request in record.requests], bubbles, cost.provenance())


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Quantiles of both panels; empty without the tables of the A100 and its links.

    Columns: hardware, series, panel (bubbles, ends), share (of the requests, 0 to 1), value (seconds: bubbles of a
    request, or until this share has ended).
    """
    rows: list[tuple[str, str, str, float, float]] = []
    if machines.are_real:
        say("left out: 64 GPUs are simulated, with hardware=sim")
    elif machines.tables is None or machines.links is None:
        say("left out: give tables=.../aiconfigurator/a100_sxm and links=.../vidur/network/a100_dgx")
    else:
        tables, links = Path(machines.tables), Path(machines.links)
        profile = replace(convert(tables, [load_spec(MODEL)]), links=read_links(links))
        for name, outcome in run_systems(profile):
            say(NAMES[name])
            machines.note(HARDWARE, {"model": "gpt-3", **outcome.provenance})
            rows += _rows(name, outcome)
    return pd.DataFrame(rows, columns=["hardware", "series", "panel", "share", "value"])


def _rows(name: str, outcome: Outcome) -> Iterator[tuple[str, str, str, float, float]]:
    shares = np.linspace(0, 1, 201)
    panels = {ENDS: outcome.ends} | ({BUBBLES: outcome.bubbles} if name != "tp" else {})  # no pipeline, no bubbles
    for panel, seconds in panels.items():
        for share, value in zip(shares, np.quantile(seconds, shares, method="inverted_cdf"), strict=True):
            yield HARDWARE, NAMES[name], panel, float(share), float(value)


def bubbles_over(data: pd.DataFrame, over: str, under: str) -> float:
    """Median bubble time per request, of one system over another."""
    return _seconds(data, BUBBLES, over) / _seconds(data, BUBBLES, under)


def time_over(data: pd.DataFrame, over: str, under: str) -> float:
    """Seconds until all requests have ended, of one system over another."""
    return _seconds(data, ENDS, over) / _seconds(data, ENDS, under)


def _seconds(data: pd.DataFrame, panel: str, name: str) -> float:
    """A system's median bubble time, or the end of its last request."""
    rows = select(data, panel=panel, series=NAMES[name])
    return float(rows.loc[np.isclose(rows["share"], 0.5 if panel == BUBBLES else 1.0), "value"].iloc[0])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Bubbles as a distribution, and requests ended over time. The paper's ratios are applied to our Sarathi."""
    figure, [[bubbles, ends]] = new_figure(1, 2, 3.0)
    for index, series in enumerate(NAMES.values()):
        style = line_style(index) | {"markevery": 25, "label": series}
        for panel, name in ((bubbles, BUBBLES), (ends, ENDS)):
            shown = select(data, panel=name, series=series)
            served = shown["share"] * NUM_REQUESTS
            panel.plot(*((shown["value"], shown["share"]) if name == BUBBLES else (served, shown["value"])), **style)
    ends.plot([], [], **(paper_style() | {"label": "the paper's ratio to Sarathi"}))
    for claim in printed:
        if claim.printed is not None and claim.setting.get("under") == "sarathi":
            _mark(bubbles if claim.quantity == bubbles_over.__name__ else ends, data, claim, claim.printed)
    bubbles.set(title="pipeline bubbles", xlabel="bubble time of a request [s]", ylabel="share of requests")
    bubbles.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    bubbles.set_xlim(left=0)
    ends.set(title=f"time to serve {NUM_REQUESTS:,} requests", xlabel="requests served", ylabel="time [s]")
    ends.set(xlim=(0, 1.35 * NUM_REQUESTS), xticks=range(0, NUM_REQUESTS + 1, 2000))
    ends.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ends.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for panel in (bubbles, ends):
        panel.set_ylim(bottom=0)
    legend(figure, [ends], title=HEADING, title_fontsize=8)
    return figure


def _mark(panel: Axes, data: pd.DataFrame, claim: Claim, ratio: float) -> None:
    """Where a system would be if it had the printed ratio to our Sarathi; beside it the printed ratio and ours."""
    over, of_bubbles = claim.setting["over"], claim.quantity == bubbles_over.__name__
    seconds = ratio * _seconds(data, BUBBLES if of_bubbles else ENDS, "sarathi")
    ours = (bubbles_over if of_bubbles else time_over)(data, over, "sarathi")
    place = (seconds, 0.5) if of_bubbles else (NUM_REQUESTS, seconds)
    mark_printed(panel, [place], label="_")
    text = f"{NAMES[over]}\n{ratio:g} ({ours:.3g} here)"
    panel.annotate(text, place, xytext=(6, 5), textcoords="offset points", va="center", fontsize=6)
