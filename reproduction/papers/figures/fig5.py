"""Fig 5 of SARATHI (arXiv 2308.16369): bubbles of a two-stage pipeline by cause, with prompts whole and in chunks.

Two micro-batches of seven requests decode, one at long contexts and one at short ones. Then three prompts arrive: two
of different lengths at once, and one later. Each engine serves the same requests. The paper's figure is a sketch; this
one is simulated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cbatch import BatchShape, KVSize, Limits, Policy, Request, Server, Step
from cbatch.model.topology import Topology
from cbatch.sim import ProfileCost, SimExecutor
from cbatch.sim.links import Links
from cbatch.sim.roofline import Affine
from cbatch.sim.stages import Span
from experiments.plots.parts import draw_spans, lane_axes
from experiments.plots.style import DECODE, IDLE, PREFILL
from policies.chunking import TileAligned
from policies.orca import Orca
from policies.sarathi import Sarathi
from reproduction.papers.claims import Claim
from reproduction.papers.frames import Row, data_frame, select
from reproduction.papers.machines import SINGLE_ITERATIONS, TITLES, Machines
from reproduction.parts import facet

STAGES, BATCH, CHUNK, BLOCK, LONGEST = 2, 8, 256, 16, 4096
LINK = Affine(0.0, 1 / 25e9)  # 25 GB/s between the stages: PCIe 4.0, assumed
LONG, SHORT, OUTPUT = 2800, 512, 1000  # tokens of the prompts, and of the outputs, which outlast what is shown
ARRIVAL, SHOWN, BEFORE = 150, 7.5, 0.6  # decode-only iterations until prompts arrive, shown after that, and before it
LATER = 4  # the same, from the first two prompts to the third
ORCA, SARATHI = "Orca", f"Sarathi, C = {CHUNK}"

CAUSES = {"pb1": "prompts differ", "pb2": "prompts against decodes", "pb3": "decodes differ"}
"""Causes of a bubble, as `cbatch.sim.stages.StageAccount` names them."""
HATCHES = {"pb1": "////", "pb2": "....", "pb3": "xxxxx"}


@data_frame("hardware", "series", "stage", "begin", "doing", "iteration", "prompt", "decodes", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """What each of two stages, on the first available machine, does around the arrivals.

    begin: milliseconds since the first prompts arrived. prompt, decodes: tokens of the iteration. value: milliseconds.
    """
    policies: dict[str, Policy] = {ORCA: Orca(), SARATHI: Sarathi(TileAligned(CHUNK))}
    for hardware, at in islice(machines.available(SINGLE_ITERATIONS), 1):
        profile = replace(at.cost.profile, links=Links(within_node=LINK))
        cost = ProfileCost(profile, at.cost.spec, Topology(pipeline_stages=STAGES))
        for name, policy in policies.items():
            yield from ((hardware, name, *row) for row in _simulate(policy, cost))


def _simulate(policy: Policy, cost: ProfileCost) -> Iterator[tuple[int, float, str, int, int, int, float]]:
    unit = cost.predict(BatchShape((), BATCH, BATCH * LONG)) * STAGES  # `predict` is of one stage
    arrival = ARRIVAL * unit
    begin, end = arrival - BEFORE * unit, arrival + SHOWN * unit
    executor = Calendar(cost)
    limits = Limits(BATCH, BATCH * LONGEST, LONGEST, num_stages=STAGES)
    kv = KVSize(limits.max_running * LONGEST // BLOCK, BLOCK)
    requests = _requests(arrival, arrival + LATER * unit)
    engine = Server(executor, limits, cost, kv, asynchronous=False).engine(policy, requests)
    while not engine.record.steps or engine.record.steps[-1].started < end:
        engine.step()
    steps = {step.iteration: step for step in engine.record.steps}
    for interval in executor.intervals:
        first, last = max(interval.begin, 1e3 * begin), min(interval.begin + interval.milliseconds, 1e3 * end)
        if first < last:
            step = steps[interval.iteration]
            tokens = step.num_prefill_tokens, step.num_decode_tokens
            yield interval.stage, first - 1e3 * arrival, interval.doing, interval.iteration, *tokens, last - first


def _requests(arrival: float, later: float) -> list[Request]:
    """Eight long and eight short ones, of which the last of each ends soon and leaves a place in either micro-batch."""
    running = [(LONG, OUTPUT)] * (BATCH - 1) + [(LONG, 4)] + [(SHORT, OUTPUT)] * (BATCH - 1) + [(SHORT, 4)]
    prompts = [(768, OUTPUT, arrival), (256, 3, arrival), (512, OUTPUT, later)]
    together = [*((*lengths, 0.0) for lengths in running), *prompts]
    return [Request(index, prompt, output, arrival_time=time) for index, (prompt, output, time) in enumerate(together)]


def bubble_share(data: pd.DataFrame, hardware: str, series: str = ORCA, cause: str = "") -> float:
    """Share of the time shown that both stages spend in bubbles, of one cause or of all."""
    shown = select(data, hardware=hardware, series=series)
    bubbles = shown["doing"].isin([cause] if cause else list(CAUSES))
    return float(shown.loc[bubbles, "value"].sum() / shown["value"].sum())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A pair of lanes for each policy, idle time hatched by its cause. The paper's figure has no numbers to mark."""
    figure, facets = facet(data, 1, 1.1, extra=0.9, by="series", sharex=True)
    for series, shown, [panel] in facets:
        _draw_lanes(panel, shown)
        hardware = shown["hardware"].iloc[0]
        each = ", ".join(f"{cause.upper()} {bubble_share(shown, hardware, series, cause):.1%}" for cause in CAUSES)
        shares = f"{bubble_share(shown, hardware, series):.1%} of the time in bubbles ({each})"
        panel.set_title(f"{TITLES[hardware]}, {series}: {shares}")
    panel.set_xlabel("time since the first two prompts arrived [ms]")
    kinds = {"prompt tokens + decodes": 1, "decodes": 0}
    handles = [Patch(label=label, **_style("compute", prompt)) for label, prompt in kinds.items()]
    handles += [Patch(label=f"{cause.upper()}: {what}", **_style(cause, 0)) for cause, what in CAUSES.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def _draw_lanes(panel: Axes, shown: pd.DataFrame) -> None:
    begin, end = float(shown["begin"].min()), float((shown["begin"] + shown["value"]).max())
    lane_axes(panel, [f"stage {stage}" for stage in range(STAGES - 1, -1, -1)], begin, end)
    letter = 0.009 * (end - begin)  # milliseconds as wide as a letter
    for row in shown.itertuples():
        interval: Any = row  # its fields are the columns
        lane, working = STAGES - 1 - interval.stage, interval.doing == "compute"
        draw_spans(panel, lane, [(interval.begin, interval.value)], **_style(interval.doing, interval.prompt))
        tokens = f"{interval.prompt} + {interval.decodes}" if interval.prompt else str(interval.decodes)
        text = tokens if working else interval.doing.upper()
        if (working or interval.doing in CAUSES) and interval.value > letter * len(text):
            colour = "white" if working and interval.prompt else "black"
            box = None if working else {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
            middle = interval.begin + interval.value / 2
            panel.text(middle, lane, text, ha="center", va="center", fontsize=6, color=colour, bbox=box)


def _style(doing: str, prompt: int) -> dict[str, Any]:
    if doing == "compute":
        return {"facecolor": PREFILL if prompt else DECODE, "edgecolor": "white", "linewidth": 0.6}
    return {"facecolor": IDLE, "edgecolor": "#555555", "hatch": HATCHES.get(doing, ""), "linewidth": 0.4}


class Interval(NamedTuple):
    """What a stage did for `milliseconds`. doing: a field of `StageAccount`; idle intervals end with `iteration`."""

    iteration: int
    stage: int
    begin: float
    doing: str
    milliseconds: float


class Calendar(SimExecutor):
    """Records the intervals of every stage. Assumes no all-reduces: a stage computes, or waits."""

    def __init__(self, cost: ProfileCost) -> None:
        super().__init__(cost)
        self.intervals: list[Interval] = []

    def launch(self, step: Step) -> Span:
        before = [replace(account) for account in self._stages.accounts]
        span = super().launch(step)
        for stage, (past, account) in enumerate(zip(before, self._stages.accounts, strict=True)):
            begin = 1e3 * past.span  # an account's seconds sum to its span
            for doing in ("no_work", "host", "pb1", "pb2", "pb3", "communication", "compute"):  # in this order
                milliseconds = 1e3 * (getattr(account, doing) - getattr(past, doing))
                if milliseconds > 0:
                    self.intervals.append(Interval(step.index, stage, begin, doing, milliseconds))
                    begin += milliseconds
        return span
