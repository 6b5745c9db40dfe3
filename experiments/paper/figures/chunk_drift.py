"""Ablation of chunk selection: the ratio of prompt to output tokens drifts twice in one run, and `pd_aware` follows.

It is told nothing: its estimate is that of the requests which have ended. Beside it stands the fixed total that serves the
whole run fastest, which only a sweep of the whole run can find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch import Engine, Limits, Request
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from experiments.paper.claims import Claim
from experiments.paper.machines import Machines
from experiments.paper.steady import BLOCK, Load
from experiments.plots.style import line_style, new_figure
from experiments.plots.style import printed as page
from policies.chunking import ChunkSelector, PDAware, TileAligned
from policies.sarathi import Sarathi

LENGTH, BATCH = 1024, 18
RATIOS, EACH = (50, 5, 14), 180
"""P:D of the requests, and how many come of each."""
HARDWARE = ("a6000", "h200")
AWARE, FIXED = "P:D-aware", "best fixed total"
STRETCH = BATCH
"""Ends of requests between two points of the throughput's line."""


class Drift(NamedTuple):
    """One run. chunks: (second, total of tokens) where it changed. ends: seconds at which requests ended, [requests]."""

    chunks: list[tuple[float, int]]
    ends: list[float]


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """The chosen total and the throughput over the run.

    Columns: hardware, series, what ("total" of tokens, or "rate" in tokens a second), second, value.
    """
    rows: list[tuple[str, str, str, float, float]] = []
    for hardware in HARDWARE:
        if (at := machines.get(hardware)) is None:
            continue
        say(hardware)
        tile = at.cost.profile.ceilings.tile
        sweep = {total: run(at.cost, TileAligned(total)) for total in range(tile, LENGTH + 1, tile)}
        best = min(sweep.values(), key=lambda drift: drift.ends[-1])
        for series, drift in ((AWARE, run(at.cost, PDAware())), (FIXED, best)):
            rows += [(hardware, series, "total", second, total) for second, total in drift.chunks]
            rows += [(hardware, series, "rate", second, rate) for second, rate in _rates(drift.ends)]
    return pd.DataFrame(rows, columns=["hardware", "series", "what", "second", "value"])


def run(cost: ProfileCost, selector: ChunkSelector) -> Drift:
    """Serve all requests, in the order of the ratios, on a host that takes no time."""
    limits = Limits(BATCH, BATCH * LENGTH, LENGTH, tile=cost.profile.ceilings.tile)
    engine = Engine(Sarathi(selector), SimExecutor(cost), limits, cost, num_blocks=BATCH * -(-LENGTH // BLOCK),
                    block_size=BLOCK, asynchronous=False)  # fmt: skip
    outputs = [Load(LENGTH, BATCH, ratio).output for ratio in RATIOS for _ in range(EACH)]
    engine.submit(Request(index, LENGTH - output, output) for index, output in enumerate(outputs))
    chunks: list[tuple[float, int]] = []

    def note(engine: Engine) -> None:
        total = selector.total if isinstance(selector, PDAware) else getattr(selector, "chunk", 0)
        if not chunks or chunks[-1][1] != total:
            chunks.append((engine.record.steps[-1].started, total))

    record = engine.run(note)
    ends = [request.finished_at or 0.0 for request in record.requests]
    return Drift([*chunks, (ends[-1], chunks[-1][1])], ends)


def _rates(ends: Sequence[float]) -> list[tuple[float, float]]:
    """(second in the middle, tokens a second) of every stretch of requests; each has `LENGTH` tokens."""
    edges = np.array([0.0, *ends[STRETCH - 1 :: STRETCH]])
    return list(zip((edges[1:] + edges[:-1]) / 2, STRETCH * LENGTH / np.diff(edges), strict=True))


def seconds_of(data: pd.DataFrame, hardware: str, series: str) -> float:
    """Of the whole run."""
    shown = data[(data["hardware"] == hardware) & (data["series"] == series) & (data["what"] == "total")]
    return float(shown["second"].max())


def lead_over_fixed(data: pd.DataFrame, hardware: str) -> float:
    """Throughput of the whole run over that of the best fixed total."""
    return seconds_of(data, hardware, FIXED) / seconds_of(data, hardware, AWARE)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A column for each machine: the total above, throughput below. No paper has this."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, (totals, rates) = new_figure(2, len(machines), 3.8)
        for upper, lower, hardware in zip(totals, rates, machines, strict=True):
            shown = data[data["hardware"] == hardware]
            for index, series in enumerate((AWARE, FIXED)):
                mine = shown[shown["series"] == series]
                label = f"{series}: {seconds_of(data, hardware, series):,.1f} s in all"
                _lines(upper, lower, mine, {**line_style(index), "label": label})
            upper.set_title(f"{hardware}, P:D {', then '.join(map(str, RATIOS))}", loc="left")
            upper.set_ylabel("tokens an iteration")
            upper.set_ylim(bottom=0)
            lower.set_ylabel("throughput [tokens/s]")
            lower.set_ylim(bottom=0)
            lower.set_xlabel("time [s]")
            upper.legend(loc="upper right")
            upper.grid(visible=True)
            lower.grid(visible=True)
    return figure


def _lines(upper: Axes, lower: Axes, shown: pd.DataFrame, style: dict[str, object]) -> None:
    total, rate = (shown[shown["what"] == what] for what in ("total", "rate"))
    upper.step(total["second"], total["value"], where="post", **{**style, "marker": ""})  # type: ignore[arg-type]
    lower.plot(rate["second"], rate["value"], **style)  # type: ignore[arg-type]
