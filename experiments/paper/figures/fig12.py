"""Fig 12 of SARATHI (arXiv 2308.16369): GPT-3 on 64 A100s, bubbles of a request and how soon 10,000 requests are served.

What the three systems are, and what a request's bubble time is, stands in `experiments.paper.fig12`, which runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cbatch.sim.importers.vidur import read_links
from cbatch.sim.profile_file import load_profile
from experiments.paper.claims import Claim
from experiments.paper.fig12 import Outcome, systems
from experiments.paper.machines import Machines
from experiments.plots.style import line_style, new_figure, paper_style
from experiments.plots.style import printed as page

NUM_REQUESTS = 10_000
NAMES = {"orca": "TP8-PP8, Orca", "sarathi": "TP8-PP8, Sarathi", "tp": "8 x TP8, Orca"}
HARDWARE, BUBBLES, ENDS = "64 A100s", "bubbles", "ends"


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Quantiles of both panels; empty without the tables of the A100 and its links.

    Columns: hardware, series, panel (bubbles, ends), share (of the requests, 0 to 1), value (seconds: bubbles of a request,
    or until so many have ended).
    """
    rows: list[tuple[str, str, str, float, float]] = []
    if machines.are_real:
        say("left out: 64 GPUs are simulated, with hardware=sim")
    elif machines.tables is None or machines.links is None:
        say("left out: give tables=.../aiconfigurator/a100_sxm and links=.../vidur/network/a100_dgx")
    else:
        profile = replace(load_profile(machines.tables), links=read_links(Path(machines.links)))
        for name, outcome in systems(profile, NUM_REQUESTS):
            say(f"{NAMES[name]}: {outcome.num_iterations:,} iterations simulated in {outcome.wall_seconds:.0f} s")
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
    """Median bubble time of a request, of one system over another."""
    return _seconds(data, BUBBLES, over) / _seconds(data, BUBBLES, under)


def time_over(data: pd.DataFrame, over: str, under: str) -> float:
    """Seconds until all requests have ended, of one system over another."""
    return _seconds(data, ENDS, over) / _seconds(data, ENDS, under)


def _seconds(data: pd.DataFrame, panel: str, name: str) -> float:
    """Of a system: the median of bubbles, or the end of the last request."""
    share = 0.5 if panel == BUBBLES else 1.0
    rows = data[(data["panel"] == panel) & (data["series"] == NAMES[name]) & np.isclose(data["share"], share)]
    return float(rows["value"].iloc[0])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Bubbles as a distribution, and requests ended over time. The paper prints ratios: they are drawn from our Sarathi on."""
    with page():
        figure, [[bubbles, ends]] = new_figure(1, 2, 2.7)
        for index, series in enumerate(NAMES.values()):
            style = line_style(index) | {"markevery": 25}
            for panel, name in ((bubbles, BUBBLES), (ends, ENDS)):
                shown = data[(data["panel"] == name) & (data["series"] == series)]
                x, y = (
                    (shown["value"], shown["share"])
                    if name == BUBBLES
                    else (shown["share"] * NUM_REQUESTS, shown["value"])
                )
                panel.plot(x, y, label=series, **style)
        ends.plot([], [], **(paper_style() | {"label": "paper, times our Sarathi"}))
        _printed(bubbles, ends, data, printed)
        bubbles.set_xlabel("bubble time of a request [s]")
        bubbles.set_ylabel("share of requests")
        bubbles.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        bubbles.set_xlim(left=0)
        ends.set_xlabel("requests served")
        ends.set_ylabel("time since the start [s]")
        ends.set_xlim(0, 1.05 * NUM_REQUESTS)
        for panel in (bubbles, ends):
            panel.set_ylim(bottom=0)
            panel.grid(visible=True)
        handles, labels = ends.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return figure


def _printed(bubbles: Axes, ends: Axes, data: pd.DataFrame, claims: Sequence[Claim]) -> None:
    """Where a system would be, had it the printed ratio to our Sarathi; beside it the ratio printed, and ours."""
    for claim in claims:
        if claim.printed is None or claim.setting.get("under") != "sarathi":
            continue
        over, of_bubbles = claim.setting["over"], claim.quantity == bubbles_over.__name__
        seconds = claim.printed * _seconds(data, BUBBLES if of_bubbles else ENDS, "sarathi")
        ours = (bubbles_over if of_bubbles else time_over)(data, over, "sarathi")
        panel, place = (bubbles, (seconds, 0.5)) if of_bubbles else (ends, (NUM_REQUESTS, seconds))
        panel.plot(*place, **(paper_style() | {"label": "_"}))
        side: dict[str, Any] = {"xytext": (6, 0)} if of_bubbles else {"xytext": (-6, 0), "ha": "right"}
        name = NAMES[over].partition(",")[0]
        panel.annotate(
            f"{name}: {claim.printed:g}x\nours {ours:.3g}x",
            place,
            textcoords="offset points",
            va="center",
            fontsize=6,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            **side,
        )
