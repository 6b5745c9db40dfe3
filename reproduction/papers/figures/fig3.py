"""Fig 3 of SARATHI (arXiv 2308.16369): cost of a prompt token and of a decode, by operation, against the batch size."""

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch import BatchShape
from reproduction.papers.claims import Claim, printed_points
from reproduction.papers.frames import Row, data_frame, pivot, select
from reproduction.papers.machines import SINGLE_ITERATIONS, TITLES, Machines
from reproduction.papers.operations import ORDER, seconds_by_operation
from reproduction.parts import facet, mark_printed, stacked_bars

LENGTH = 1024
BATCHES = range(1, 19)
PHASES = ("prefill", "decode")


@data_frame("hardware", "series", "phase", "batch", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Milliseconds per token of prompts of 1,024 tokens, and of decodes at that context, by operation."""
    for hardware, at in machines.available(SINGLE_ITERATIONS):
        for batch in BATCHES:
            shapes = {"prefill": BatchShape(((LENGTH, 0),) * batch), "decode": BatchShape((), batch, batch * LENGTH)}
            for phase, shape in shapes.items():
                for name, seconds in seconds_by_operation(at.cost, shape).items():
                    yield hardware, name, phase, batch, 1e3 * seconds / shape.num_tokens


def others_share(data: pd.DataFrame, hardware: str, phase: str) -> float:
    """The largest share of "others" in any batch."""
    shown = select(data, hardware=hardware, phase=phase)
    others = select(shown, series="others").set_index("batch")["value"]
    return float((others / shown.groupby("batch")["value"].sum()).max())


def prefill_spread(data: pd.DataFrame, hardware: str) -> float:
    """Cost of a prompt token in the most expensive batch over that in the cheapest."""
    tokens = select(data, hardware=hardware, phase="prefill").groupby("batch")["value"].sum()
    return float(tokens.max() / tokens.min())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Prompts and decodes of each machine; the paper prints how many times as much a decode costs."""
    figure, facets = facet(data, len(PHASES), 2.3, extra=0.4)
    for hardware, shown, panels in facets:
        for panel, phase in zip(panels, PHASES, strict=True):
            table = pivot(select(shown, phase=phase), "batch")[list(ORDER)]
            stacked_bars(panel, table.index, table)
            panel.set_xticks([batch for batch in table.index if batch == 1 or batch % 2 == 0])
            panel.set(xlabel="batch size B [requests]", ylabel="time per token [ms]")
            panel.set_title(f"{TITLES[hardware]}: {phase}")
            panel.margins(y=0.12)
        _mark_ratios(panels[1], shown, dict(printed_points(printed, "cost_ratio", "decodes", hardware=hardware)))
    handles, labels = facets[0].panels[1].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    figure.supxlabel("above the bars: a decode's time over a prompt token's (the paper's), without others")
    return figure


def _mark_ratios(panel: Axes, shown: pd.DataFrame, ratios: dict[int, float]) -> None:
    """Mark the cost of a decode by the paper's ratio to a prompt token, and write our ratio; both without "others"."""
    times = shown[shown["series"] != "others"].groupby(["phase", "batch"])["value"].sum().to_dict()
    for batch in ratios or (BATCHES[0], BATCHES[-1]):
        ours, prompt = times["decode", batch], times["prefill", batch]
        text = f"{ours / prompt:.3g}x" + (f" ({ratios[batch]:g}x)" if batch in ratios else "")
        side = "left" if batch < BATCHES[-1] else "right"
        panel.annotate(text, (batch, ours), (5, 5), textcoords="offset points", fontsize=7, ha=side)
        if batch in ratios:
            mark_printed(panel, [(batch, ratios[batch] * prompt)], label="paper" if batch == BATCHES[0] else "_")
