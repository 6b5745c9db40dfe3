"""Fig 12 of SARATHI (arXiv 2308.16369): GPT-3 on 64 A100s, bubble time per request, time to serve 10,000 requests.

`reproduction.papers.fig12_systems` runs the three systems, and explains them and the bubble time of a request.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from experiments.plots.style import line_style, new_figure
from reproduction.papers.claims import Claim
from reproduction.papers.fig12_systems import Outcome, load_linked_profile, run_systems
from reproduction.papers.frames import select
from reproduction.papers.machines import Machines
from reproduction.parts import legend, mark_printed, paper_style

NUM_REQUESTS = 10_000
NAMES = {"orca": "TP8-PP8, Orca", "sarathi": "TP8-PP8, Sarathi", "tp": "8 x TP8, Orca"}
HEADING = "GPT-3 on 64 A100s: 8 pipeline stages of 8 tensor-parallel GPUs (TP8-PP8) or 8 replicas of 8 (8 x TP8)"
HARDWARE, BUBBLES, ENDS = "64 A100s", "bubbles", "ends"


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
        for name, outcome in run_systems(load_linked_profile(machines.tables, machines.links), NUM_REQUESTS):
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
