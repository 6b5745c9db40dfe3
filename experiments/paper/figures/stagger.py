"""Ablation between Orca's worst and best case in Fig 11 of SARATHI (arXiv 2308.16369): the gain against the stagger.

If all requests start together, whole prompts never meet decodes (worst case); if starts are spread evenly over a request's
life of D iterations, D / B apart, each does (best case, the last point of a line). Sarathi makes its own stagger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch import Policy
from experiments.config.composition import composed, swept, swept_numbers
from experiments.paper.claims import Claim
from experiments.paper.closed_batch import load_of, seconds_per_request
from experiments.paper.machines import TITLES, Machines
from experiments.paper.steady import Load
from experiments.plots.style import line_style, new_figure, paper_style
from experiments.plots.style import printed as page
from policies.chunking import TileAligned
from policies.orca import Orca
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi

EXPERIMENT = "stagger"
HARDWARE = ("a6000", "h200")


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Throughput over the baseline's against the stagger.

    Columns: hardware, series (the policy), pd_ratio, stagger (iterations between two starts), value.
    """
    rows, policies = [], _policies(composed(EXPERIMENT)["chunk"])
    for hardware in HARDWARE:
        if (at := machines.get(hardware)) is None:
            continue
        for ratio in swept_numbers(EXPERIMENT, "workload.pd_ratio"):
            say(f"{hardware}, P:D {ratio:g}")
            load = load_of(EXPERIMENT, ratio)
            baseline = seconds_per_request(at.cost, RequestLevel(), load)
            for stagger in _staggers(load):
                rows += [
                    (
                        hardware,
                        series,
                        ratio,
                        stagger,
                        baseline / seconds_per_request(at.cost, make(), load, stagger=stagger),
                    )
                    for series, make in policies.items()
                ]
    return pd.DataFrame(rows, columns=["hardware", "series", "pd_ratio", "stagger", "value"])


def _policies(chunk: int) -> dict[str, Callable[[], Policy]]:
    """What makes each policy, by its name in the figure."""
    return {"Orca": Orca, f"Sarathi, C = {chunk}": lambda: Sarathi(TileAligned(chunk))}


def _staggers(load: Load) -> list[float]:
    """Iterations between two arrivals, up to the even spread over a life."""
    even = load.output / load.batch
    given = [even if value == "even" else float(value) for value in swept(EXPERIMENT, "workload.stagger")]
    return sorted(stagger for stagger in given if stagger <= even)


def worst_case(data: pd.DataFrame, hardware: str) -> float:
    """Orca's gain where all requests start together; the lowest of any P:D."""
    gains = _orca(data, hardware)
    return float(gains.xs(0.0, level="stagger").min())


def best_case(data: pd.DataFrame, hardware: str) -> float:
    """Orca's highest gain of any P:D and stagger."""
    return float(_orca(data, hardware).max())


def reached(data: pd.DataFrame, hardware: str, pd_ratio: float, stagger: float = 1.0) -> float:
    """Share of Orca's gain at an even spread that it has at this stagger."""
    gains = _orca(data, hardware).xs(pd_ratio, level="pd_ratio") - 1
    return float(gains[stagger] / gains.iloc[-1])


def _orca(data: pd.DataFrame, hardware: str) -> pd.Series[float]:
    """Orca's gains, [P:D, stagger]."""
    lines = data[(data["hardware"] == hardware) & (data["series"] == "Orca")]
    return lines.set_index(["pd_ratio", "stagger"])["value"]


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A panel for each machine, a line for each policy and P:D; the paper's values at either end."""
    machines = list(dict.fromkeys(data["hardware"]))
    load = load_of(EXPERIMENT, data["pd_ratio"].iloc[0])
    with page():
        figure, [panels] = new_figure(1, len(machines), 2.8)
        for panel, hardware in zip(panels, machines, strict=True):
            shown = data[data["hardware"] == hardware]
            for index, ((series, ratio), line) in enumerate(shown.groupby(["series", "pd_ratio"], sort=False)):
                panel.plot(line["stagger"], line["value"], label=f"{series}, P:D {ratio:g}", **line_style(index))
            _mark(panel, [claim for claim in printed if claim.hardware == hardware], _orca(data, hardware))
            panel.set_title(f"{TITLES[hardware]}: L = {load.length}, B = {load.batch}", loc="left")
            panel.set_xlabel("stagger: iterations between two starts of a batch")
            panel.set_ylabel("throughput over the baseline's")
            panel.grid(visible=True)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _mark(panel: Axes, claims: Sequence[Claim], ours: pd.Series[float]) -> None:
    """The paper's worst case where all start together, and its best case where ours is; it prints neither's stagger."""
    for quantity, place in (("worst_case", 0.0), ("best_case", ours.index[int(ours.argmax())][1])):
        for claim in claims:
            if claim.quantity == quantity and claim.printed is not None:
                label = "_" if place else "paper: Orca, worst and best case"
                panel.plot([place], [claim.printed], **{**paper_style(), "label": label})
