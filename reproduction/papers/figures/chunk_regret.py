"""Ablation of chunk selection: the cost of each selector against an exhaustive sweep, on pairs of model and GPU.

SARATHI (arXiv 2308.16369, section 5.1.3) finds chunks by sweeping; `pd_aware` chooses during the run, from lengths and
the cost model. Regret is the throughput lost against the best total of the sweep, over all multiples of half a tile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from policies.chunking import ChunkSelector, Fixed, PDAware, TileAligned
from policies.sarathi import Sarathi
from reproduction.experiment_files import composed, swept_numbers
from reproduction.papers.claims import Claim
from reproduction.papers.frames import Row, data_frame, pivot, select
from reproduction.papers.machines import TITLES, Machines
from reproduction.papers.steady import Load, SteadyState, load_of, seconds_per_request
from reproduction.parts import facet, grouped_bars, legend

EXPERIMENT = "chunk_regret"
HARDWARE = ("a6000", "a100", "h200", "h200-13b")
OTHER_BATCHES = {"a100": 10}
"""Batch by machine where it is not the experiment's: as many requests as fit in the paper's Table 4 at 1,024 tokens."""
BOUND = 2.0  # percent
SELECTORS = ("fixed", "tile-aligned", "P:D-aware")
AWARE, BEST = SELECTORS[2], "best of the sweep"


@data_frame("hardware", "series", "pd_ratio", "chunk", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Tokens per second of each selector and of the sweep's best; chunk: the total it runs at, for `fixed` without decodes."""
    for hardware, at in machines.available(HARDWARE):
        for ratio in swept_numbers(EXPERIMENT, "workload.pd_ratio"):
            say(f"{hardware}, P:D {ratio:g}")
            load = _load(hardware, ratio)
            for series, chunk, seconds in _measure(at, load, composed(EXPERIMENT).keys["chunk"]):
                yield hardware, series, ratio, chunk, load.length / seconds


def _load(hardware: str, pd_ratio: float) -> Load:
    load = load_of(EXPERIMENT, pd_ratio)
    return replace(load, batch=OTHER_BATCHES.get(hardware, load.batch))


def _measure(at: SteadyState, load: Load, chunk: int) -> list[tuple[str, int, float]]:
    """(selector, chunk, seconds per request) at one load; `chunk` is that of the selectors that do not choose."""

    def seconds(selector: ChunkSelector, tile: int | None = None) -> float:
        return seconds_per_request(at.cost, Sarathi(selector), load, tile=tile)

    half = max(at.cost.profile.ceilings.tile // 2, 1)
    totals = [total for total in range(half, load.length + load.batch + half, half) if total >= load.batch]
    sweep = {total: seconds(TileAligned(total), tile=half) for total in totals}
    best = min(sweep, key=lambda total: sweep[total])
    aware = PDAware()
    fixed, aligned, chosen = seconds(Fixed(chunk)), sweep[chunk], seconds(aware)
    chunks = (chunk, chunk, aware.total)
    return [*zip(SELECTORS, chunks, (fixed, aligned, chosen), strict=True), (BEST, best, sweep[best])]


def regret(data: pd.DataFrame) -> pd.DataFrame:
    """`data` without the sweep's best, its values replaced by the percentage of the best throughput that is lost."""
    keys = ["hardware", "pd_ratio"]
    best = select(data, series=BEST).set_index(keys)["value"].rename("best")
    rest = data[data["series"] != BEST].join(best, on=keys)
    return rest.assign(value=100 * (1 - rest["value"] / rest["best"])).drop(columns="best")


def worst_regret(data: pd.DataFrame, series: str = AWARE, hardware: str | None = None) -> float:
    """The largest regret of a selector in percent, on all machines or on one."""
    return float(select(regret(data), series=series, **({"hardware": hardware} if hardware else {}))["value"].max())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Regrets of each machine by P:D, the chosen and the best chunk below them. The paper prints no regrets."""
    figure, facets = facet(data, 1, 2.9, across=True)
    for hardware, shown, [panel] in facets:
        panel.sharey(facets[0].panels[0])
        _draw_bars(panel, pivot(regret(shown), "pd_ratio"), pivot(shown, "pd_ratio", values="chunk"))
        panel.set_title(f"{TITLES[hardware]}\nB = {_load(hardware, 1).batch}")
        panel.set_xlabel("P:D\nchosen total\n/ best total", fontsize=7)
    facets[0].panels[0].set_ylabel("throughput lost against\nthe best of the sweep [%]")
    legend(figure, facets[0].panels)
    return figure


def _draw_bars(panel: Axes, regrets: pd.DataFrame, chunks: pd.DataFrame) -> None:
    """regrets: [P:D, selector]. chunks: the same, and the sweep's best."""
    chunk = composed(EXPERIMENT).keys["chunk"]
    names = [series if series == AWARE else f"{series}, C = {chunk}" for series in SELECTORS]
    grouped_bars(panel, regrets[list(SELECTORS)], (3, 1, 0), labels=names)
    panel.axhline(BOUND, color="black", linewidth=0.7, linestyle=(0, (4, 2)), label=f"{BOUND:g}%")
    totals = zip(chunks.index, chunks[AWARE], chunks[BEST], strict=True)
    ticks = [f"{ratio:g}\n{chosen:.0f}\n/{best:.0f}" for ratio, chosen, best in totals]
    panel.set_xticks(range(len(ticks)), ticks, fontsize=6.5)
