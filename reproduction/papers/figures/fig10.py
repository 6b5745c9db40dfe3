"""Fig 10 of SARATHI (arXiv 2308.16369): device time per request by operation, baseline against chunks, at the peak.

L = 1K and B = 18, each chunk size at the P:D where its chunks last as long as the decodes. The A6000's profile, made
from printed numbers, holds the matrix products as one sum, which is split by weights: 3 : 1 : 8 of 12 H^2 parameters
for preproj, postproj and ffn. All three therefore speed up equally there.
"""

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch import Step
from cbatch.sim import ProfileCost, SimExecutor
from cbatch.sim.stages import Span
from reproduction.papers.claims import Claim
from reproduction.papers.frames import Row, data_frame, select
from reproduction.papers.machines import TITLES, Machines
from reproduction.papers.operations import ORDER, seconds_by_operation
from reproduction.papers.panels import PANELS, predicted_peak
from reproduction.papers.steady import COUNTED, Load, Scheme, find_span, policy_of, simulate, tile_of
from reproduction.parts import facet, legend, stacked_bars

HARDWARE = ("a6000", "h200-13b")
CHUNKS = (256, 512)
SCHEMES: tuple[Scheme, ...] = ("baseline", "sarathi")


class OperationTimes(SimExecutor):
    """Records the seconds of every iteration by operation, and when it ended."""

    def __init__(self, cost: ProfileCost) -> None:
        super().__init__(cost)
        self.operations = cost
        self.iterations: list[tuple[float, dict[str, float]]] = []

    def launch(self, step: Step) -> Span:
        span = super().launch(step)
        self.iterations.append((span.ended, seconds_by_operation(self.operations, span.shape)))
        return span


@data_frame("hardware", "series", "scheme", "chunk", "pd_ratio", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Milliseconds of device time per request, by operation; simulated, as a GPU run does not separate operations."""
    for hardware, at in machines.available(HARDWARE):
        for chunk in CHUNKS:
            load = Load(*PANELS[0], predicted_peak(chunk, PANELS[0].batch))
            for scheme in SCHEMES:
                for name, seconds in _seconds(at.cost, scheme, load, chunk).items():
                    yield hardware, name, scheme, chunk, round(load.pd_ratio, 2), 1e3 * seconds


def _seconds(cost: ProfileCost, scheme: Scheme, load: Load, chunk: int) -> dict[str, float]:
    """Mean seconds per request, by operation."""
    executor, policy = OperationTimes(cost), policy_of(scheme, chunk)
    begin, end = find_span(simulate(executor, cost, policy, load, tile=tile_of(cost, chunk)), load, COUNTED)
    within = [seconds for ended, seconds in executor.iterations if begin < ended <= end]
    return {name: sum(seconds[name] for seconds in within) / (COUNTED * load.batch) for name in ORDER}


def speedup(data: pd.DataFrame, hardware: str, operation: str, chunk: int) -> float:
    """Time of an operation under the baseline over that in chunks."""
    times = select(data, hardware=hardware, series=operation, chunk=chunk).set_index("scheme")["value"]
    return float(times["baseline"] / times["sarathi"])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Stacked bars for each machine; beside them the speedup of each operation, and the paper's range."""
    figure, facets = facet(data, 1, 3.6, across=True)
    for hardware, shown, [panel] in facets:
        ranges = {
            (claim.setting["operation"], claim.setting["chunk"]): f"\n({claim.at_least:g} to {claim.at_most:g})"
            for claim in printed
            if claim.hardware == hardware and claim.quantity == speedup.__name__
        }
        _draw_bars(panel, shown, hardware, ranges)
        panel.set(title=TITLES[hardware], ylabel="device time per request [ms]")
    legend(figure, facets[0].panels, ncols=len(ORDER))
    figure.supxlabel("matrix products split by their weights, 3 : 1 : 8; beside the bars: speedup (paper's range)")
    return figure


def _draw_bars(panel: Axes, shown: pd.DataFrame, hardware: str, ranges: dict[tuple[str, int], str]) -> None:
    bars = [(scheme, chunk) for chunk in CHUNKS for scheme in SCHEMES]
    places = [3.3 * CHUNKS.index(chunk) + SCHEMES.index(scheme) for scheme, chunk in bars]
    table = shown.pivot_table(index=["scheme", "chunk"], columns="series", values="value")[list(ORDER)]
    middles = stacked_bars(panel, places, table.reindex(bars), 0.9)
    for operation in ORDER:
        for (scheme, chunk), place, middle in zip(bars, places, middles[operation], strict=True):
            if scheme == "sarathi":
                text = f"{speedup(shown, hardware, operation, chunk):.2f}x" + ranges.get((operation, chunk), "")
                panel.text(place + 0.5, middle, text, va="center", fontsize=5.5, linespacing=0.95)
    ratios = shown.groupby("chunk")["pd_ratio"].first()
    names = [f"C = {chunk}" if scheme == "sarathi" else "baseline" for scheme, chunk in bars]
    ticks = [f"{name}\nP:D {ratios[chunk]:.0f}" for name, (_, chunk) in zip(names, bars, strict=True)]
    panel.set_xticks(places, ticks, fontsize=7)
    panel.set_xlim(right=max(places) + 1.8)
