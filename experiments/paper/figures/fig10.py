"""Fig 10 of SARATHI (arXiv 2308.16369): where a request's time goes by operation, under the baseline and in chunks, at the peak.

L = 1K and B = 18, each chunk size at the P:D where its chunks last as long as the decodes. The profile of the A6000, made from
printed numbers, has the matrix products as a whole: they are split as their weights are, 3 : 1 : 8 of 12 H^2 parameters for
preproj, postproj and ffn. Preproj, postproj and ffn can therefore only speed up alike there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch import Step
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.stages import Span
from experiments.paper.claims import Claim
from experiments.paper.machines import TITLES, Machines
from experiments.paper.operations import ORDER, seconds_by_operation
from experiments.paper.panels import PANELS, predicted_peak
from experiments.paper.steady import COUNTED, Load, Scheme, counted, simulate
from experiments.plots.style import fill_style, new_figure
from experiments.plots.style import printed as page

CHUNKS = (256, 512)
SCHEMES: tuple[Scheme, ...] = ("baseline", "sarathi")
HARDWARE = ("a6000", "h200-13b", "gpu")


class OperationTimes(SimExecutor):
    """Keeps the seconds of every iteration by operation, and when it ended."""

    def __init__(self, cost: ProfileCost) -> None:
        super().__init__(cost)
        self.operations = cost
        self.iterations: list[tuple[float, dict[str, float]]] = []

    def launch(self, step: Step) -> Span:
        span = super().launch(step)
        self.iterations.append((span.ended, seconds_by_operation(self.operations, span.shape)))
        return span


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Milliseconds of the device a request. Always simulated: the GPU does not tell operations apart.

    Columns: hardware, series (the operation), scheme, chunk, pd_ratio, value.
    """
    rows = []
    for hardware in HARDWARE:
        if (at := machines.get(hardware)) is None:
            continue
        for chunk in CHUNKS:
            load = Load(*PANELS[0], predicted_peak(chunk, PANELS[0].batch))
            rows += [
                (hardware, name, scheme, chunk, round(load.pd_ratio, 2), 1e3 * seconds)
                for scheme in SCHEMES
                for name, seconds in _seconds(at.cost, scheme, load, chunk).items()
            ]
    return pd.DataFrame(rows, columns=["hardware", "series", "scheme", "chunk", "pd_ratio", "value"])


def _seconds(cost: ProfileCost, scheme: Scheme, load: Load, chunk: int) -> dict[str, float]:
    """Of one request by operation, on average over those that are counted."""
    executor = OperationTimes(cost)
    begin, end = counted(simulate(executor, cost, scheme, load, chunk), load, COUNTED)
    within = [seconds for ended, seconds in executor.iterations if begin < ended <= end]
    return {name: sum(seconds[name] for seconds in within) / (COUNTED * load.batch) for name in ORDER}


def speedup(data: pd.DataFrame, hardware: str, operation: str, chunk: int) -> float:
    """Time of an operation under the baseline over that in chunks."""
    mine = data[(data["hardware"] == hardware) & (data["series"] == operation) & (data["chunk"] == chunk)]
    baseline, sarathi = mine.set_index("scheme")["value"][list(SCHEMES)]
    return float(baseline / sarathi)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A panel for each machine: stacked bars; beside them the speedup of each operation, and the paper's range."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, [panels] = new_figure(1, len(machines), 3.6)
        for panel, hardware in zip(panels, machines, strict=True):
            claims = {
                (claim.setting["operation"], claim.setting["chunk"]): claim
                for claim in printed
                if claim.hardware == hardware and claim.quantity == speedup.__name__
            }
            _bars(panel, data[data["hardware"] == hardware], hardware, claims)
            panel.set_title(TITLES[hardware], loc="left")
            panel.set_ylabel("device time of a request [ms]")
            panel.grid(visible=True, axis="y")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(ORDER))
        figure.supxlabel("matrix products split by their weights, 3 : 1 : 8; beside the bars: speedup (paper's range)")
    return figure


def _bars(panel: Axes, shown: pd.DataFrame, hardware: str, claims: dict[tuple[str, int], Claim]) -> None:
    places: dict[tuple[str, int], float] = {
        (scheme, chunk): 3.3 * CHUNKS.index(chunk) + SCHEMES.index(scheme) for chunk in CHUNKS for scheme in SCHEMES
    }
    bottoms = dict.fromkeys(places, 0.0)
    for index, operation in enumerate(ORDER):
        mine = shown[shown["series"] == operation].set_index(["scheme", "chunk"])["value"]
        heights = [float(mine[key]) for key in places]
        style = fill_style(index)
        panel.bar(list(places.values()), heights, 0.9, bottom=list(bottoms.values()), label=operation, **style)
        for chunk in CHUNKS:
            key = ("sarathi", chunk)
            text = f"{speedup(shown, hardware, operation, chunk):.2f}x" + _range(claims.get((operation, chunk)))
            panel.text(
                places[key] + 0.5, bottoms[key] + mine[key] / 2, text, va="center", fontsize=5.5, linespacing=0.95
            )
        bottoms = {key: bottom + height for (key, bottom), height in zip(bottoms.items(), heights, strict=True)}
    ratios = shown.groupby("chunk")["pd_ratio"].first()
    names = [f"C = {chunk}" if scheme == "sarathi" else "baseline" for scheme, chunk in places]
    ticks = [f"{name}\nP:D {ratios[chunk]:.0f}" for name, (_, chunk) in zip(names, places, strict=True)]
    panel.set_xticks(list(places.values()), ticks, fontsize=7)
    panel.set_xlim(right=max(places.values()) + 1.8)


def _range(claim: Claim | None) -> str:
    return "" if claim is None else f"\n({claim.at_least:g} to {claim.at_most:g})"
