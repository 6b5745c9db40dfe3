"""Fig 7 of SARATHI (arXiv 2308.16369): iteration time against tokens, which rises with each tile of the products."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from cbatch import BatchShape
from experiments.plots.style import PREFILL
from reproduction.papers.claims import Claim, printed_points
from reproduction.papers.frames import Row, data_frame, select
from reproduction.papers.machines import SINGLE_ITERATIONS, TITLES, Machines
from reproduction.parts import facet, mark_printed

MOST = 1024


@data_frame("hardware", "series", "tile", "tokens", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Milliseconds of one whole prompt of 1 to 1,024 tokens."""
    for hardware, at in machines.available(SINGLE_ITERATIONS):
        for tokens in range(1, MOST + 1):
            milliseconds = 1e3 * at.cost.predict(BatchShape(((tokens, 0),)))
            yield hardware, "prompt", at.cost.profile.ceilings.tile, tokens, milliseconds


def rise(data: pd.DataFrame, hardware: str, smaller: int, larger: int) -> float:
    """Relative growth of an iteration's time from one number of tokens to another."""
    times = select(data, hardware=hardware).set_index("tokens")["value"]
    return float(times[larger] / times[smaller] - 1)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Time of the iteration and time per token, for each machine."""
    figure, facets = facet(data, 2, 2.2, extra=0.3)
    for hardware, shown, [whole, each] in facets:
        values, tile = shown.set_index("tokens")["value"], int(shown["tile"].iloc[0])
        per_token = values / values.index
        _draw_curve(whole, values, "time of the iteration [ms]", tile)
        _draw_curve(each, per_token, "time per token [ms]", tile)
        each.set_ylim(0, 4 * per_token.min())
        whole.set_title(TITLES[hardware])
        _mark(whole, values, printed_points(printed, "iteration_ms", "prompt", hardware=hardware))
    return figure


def _draw_curve(panel: Axes, values: "pd.Series[float]", label: str, tile: int) -> None:
    panel.plot(values.index, values.to_numpy(), color=PREFILL, linewidth=1.2)
    panel.set(xlabel="tokens in the iteration", ylabel=label, xlim=(0, MOST + 8))
    panel.set_ylim(bottom=0)
    panel.xaxis.set_major_locator(MultipleLocator(2 * tile))
    panel.xaxis.set_minor_locator(MultipleLocator(tile))
    panel.yaxis.grid(visible=False)
    panel.grid(visible=True, which="both", axis="x")


def _mark(panel: Axes, values: "pd.Series[float]", points: Sequence[tuple[int, float]]) -> None:
    """The paper's milliseconds, and our rise from each of these sizes to the next."""
    mark_printed(panel, points)
    if points:
        panel.legend(loc="upper left")
    for smaller, larger in pairwise(sorted(tokens for tokens, _ in points)):
        text = f"{smaller} to {larger}: {values[larger] / values[smaller] - 1:+.0%}"
        panel.annotate(text, (larger, values[larger]), (7, -10), textcoords="offset points", fontsize=7)
