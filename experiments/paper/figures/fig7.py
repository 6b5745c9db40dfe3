"""Fig 7 of SARATHI (arXiv 2308.16369): an iteration's time against its tokens, which rises by tiles of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from cbatch import BatchShape
from experiments.paper.claims import Claim
from experiments.paper.machines import TITLES, Machines
from experiments.plots.style import PREFILL, new_figure, paper_style
from experiments.plots.style import printed as page

MOST = 1024


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """One prompt of 1 to 1,024 tokens, whole.

    Columns: hardware, series ("prompt"), tile (tokens), tokens, value (milliseconds).
    """
    return pd.DataFrame(
        [
            {
                "hardware": hardware,
                "series": "prompt",
                "tile": at.cost.profile.ceilings.tile,
                "tokens": tokens,
                "value": 1e3 * at.cost.predict(BatchShape(((tokens, 0),))),
            }
            for hardware, at in machines.single_iterations()
            for tokens in range(1, MOST + 1)
        ]
    )


def rise(data: pd.DataFrame, hardware: str, smaller: int, larger: int) -> float:
    """By which share of its time an iteration grows from one number of tokens to another."""
    times = data[data["hardware"] == hardware].set_index("tokens")["value"]
    return float(times[larger] / times[smaller] - 1)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A panel for each machine: time of the iteration, and what a token of it costs."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, axes = new_figure(len(machines), 2, 0.3 + 2.2 * len(machines))
        for [whole, each], hardware in zip(axes, machines, strict=True):
            shown = data[data["hardware"] == hardware].set_index("tokens")
            claims = [claim for claim in printed if claim.hardware == hardware]
            _curve(whole, shown["value"], "time of the iteration [ms]", int(shown["tile"].iloc[0]))
            _curve(each, shown["value"] / shown.index, "time a token [ms]", int(shown["tile"].iloc[0]))
            each.set_ylim(0, 4 * (shown["value"] / shown.index).min())
            whole.set_title(TITLES[hardware], loc="left")
            _printed(whole, shown["value"], claims)
    return figure


def _curve(panel: Axes, values: pd.Series[float], label: str, tile: int) -> None:
    panel.plot(values.index, values.to_numpy(), color=PREFILL, linewidth=1.2)
    panel.set_xlabel("tokens in the iteration")
    panel.set_ylabel(label)
    panel.set_xlim(0, MOST + 8)
    panel.set_ylim(bottom=0)
    panel.xaxis.set_major_locator(MultipleLocator(2 * tile))
    panel.xaxis.set_minor_locator(MultipleLocator(tile))
    panel.grid(visible=True, which="both", axis="x")


def _printed(panel: Axes, values: pd.Series[float], claims: Sequence[Claim]) -> None:
    """The paper's milliseconds, and by how much ours rise from each of these sizes to the next."""
    found = {
        claim.setting["prompt"]: claim.printed
        for claim in claims
        if claim.printed is not None and claim.quantity == "iteration_ms"
    }
    if found:
        panel.plot(list(found), list(found.values()), **paper_style())
        panel.legend(loc="upper left")
    for smaller, larger in pairwise(sorted(found)):
        panel.annotate(
            f"{smaller} to {larger}: {values[larger] / values[smaller] - 1:+.0%}",
            (larger, values[larger]),
            (7, -10),
            textcoords="offset points",
            fontsize=7,
        )
