"""What goes wrong without events: the share of wrong tokens by the event that is missing. Measured by `python -m reproduction.bench events`."""

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots.style import new_figure
from reproduction.papers.claims import Claim
from reproduction.papers.frames import add_provenance, pivot, read_stored, select
from reproduction.papers.machines import Machines
from reproduction.parts import grouped_bars, legend

TITLES = {"off": "eager", "decode": "graphs"}
LOOPS = ("sync", "async")


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, graphs, loop, late (the stream), missing (the event), value: the share of wrong tokens."""
    if not (file := read_stored("events", say)):
        return pd.DataFrame()
    data = pd.DataFrame(file["figures"]).rename(columns={"wrong_share": "value"})
    data.insert(0, "hardware", file["hardware"])
    return add_provenance(data, file)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A row for each loop, a column for operation by operation and for graphs."""
    figure, axes = new_figure(2, 2, 4.0, sharex=True)
    for row, loop in zip(axes, LOOPS, strict=True):
        for panel, (graphs, title) in zip(row, TITLES.items(), strict=True):
            shown = select(data, loop=loop, graphs=graphs).assign(value=lambda rows: 100 * rows["value"])
            shown["missing"] = [
                name.replace(" before ", "\nbefore ").replace(" of a slot", "\nof a slot") for name in shown["missing"]
            ]
            table = pivot(shown, "missing", "late")
            grouped_bars(panel, table, labels=[f"{late} late" for late in table], fmt="%.0f", fontsize=5)
            panel.set(title=f"{loop}, {title}", ylim=(0, 112), ylabel="wrong tokens [%]")
            panel.tick_params(axis="x", labelsize=5.5)
    legend(figure, axes[0])
    return figure
