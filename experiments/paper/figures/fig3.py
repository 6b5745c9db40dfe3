"""Fig 3 of SARATHI (arXiv 2308.16369): what a prompt token and a decode cost, by operation, against the batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch import BatchShape
from experiments.paper.claims import Claim
from experiments.paper.machines import TITLES, Machines
from experiments.paper.operations import ORDER, seconds_by_operation
from experiments.plots.style import fill_style, new_figure, paper_style
from experiments.plots.style import printed as page

LENGTH = 1024
BATCHES = range(1, 19)
PHASES = ("prefill", "decode")


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Milliseconds a token: of prompts of 1,024 tokens, and of decodes at that context.

    Columns: hardware, series (the operation), phase, batch, value.
    """
    rows = []
    for hardware, at in machines.single_iterations():
        for batch in BATCHES:
            shapes = {"prefill": BatchShape(((LENGTH, 0),) * batch), "decode": BatchShape((), batch, batch * LENGTH)}
            for phase, shape in shapes.items():
                rows += [
                    (hardware, name, phase, batch, 1e3 * seconds / shape.num_tokens)
                    for name, seconds in seconds_by_operation(at.cost, shape).items()
                ]
    return pd.DataFrame(rows, columns=["hardware", "series", "phase", "batch", "value"])


def others_share(data: pd.DataFrame, hardware: str, phase: str) -> float:
    """The largest share of "others" among all batches."""
    shown = data[(data["hardware"] == hardware) & (data["phase"] == phase)]
    others = shown[shown["series"] == "others"].set_index("batch")["value"]
    return float((others / shown.groupby("batch")["value"].sum()).max())


def prefill_spread(data: pd.DataFrame, hardware: str) -> float:
    """The dearest over the cheapest prompt token among all batches."""
    tokens = data[(data["hardware"] == hardware) & (data["phase"] == "prefill")].groupby("batch")["value"].sum()
    return float(tokens.max() / tokens.min())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Two panels for each machine: prompts, and decodes, of which the paper prints how many times as much they cost."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, axes = new_figure(len(machines), len(PHASES), 0.4 + 2.3 * len(machines))
        for panels, hardware in zip(axes, machines, strict=True):
            shown = data[data["hardware"] == hardware]
            for panel, phase in zip(panels, PHASES, strict=True):
                _stack(
                    panel, shown[shown["phase"] == phase].pivot_table(index="batch", columns="series", values="value")
                )
                panel.set_title(f"{TITLES[hardware]}: {phase}", loc="left")
            _ratios(panels[1], shown, [claim for claim in printed if claim.hardware == hardware])
        handles, labels = axes[0][1].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center")
        figure.supxlabel("above the bars: a decode's time over a prompt token's (the paper's), others left out")
    return figure


def _stack(panel: Axes, table: pd.DataFrame) -> None:
    """table: milliseconds, [batch, operation]."""
    bottom = 0.0 * table[ORDER[0]]
    for index, name in enumerate(ORDER):
        panel.bar(table.index, table[name], 0.8, bottom=bottom, label=name, **fill_style(index))
        bottom += table[name]
    panel.set_xlabel("batch size B [requests]")
    panel.set_ylabel("time a token [ms]")
    panel.margins(y=0.12)
    panel.set_xticks([batch for batch in table.index if batch == 1 or batch % 2 == 0])
    panel.grid(visible=True, axis="y")


def _ratios(panel: Axes, shown: pd.DataFrame, claims: Sequence[Claim]) -> None:
    """Where a decode costs as many prompt tokens as the paper prints, and how many it costs here, "others" left out."""
    times = shown[shown["series"] != "others"].groupby(["phase", "batch"])["value"].sum().to_dict()
    ratios = {
        claim.setting["decodes"]: claim.printed
        for claim in claims
        if claim.quantity == "cost_ratio" and claim.printed is not None
    }
    for batch in ratios or (BATCHES[0], BATCHES[-1]):
        ours, prompt = times["decode", batch], times["prefill", batch]
        text = f"{ours / prompt:.3g}x" + (f" ({ratios[batch]:g}x)" if batch in ratios else "")
        side = "left" if batch < BATCHES[-1] else "right"
        panel.annotate(text, (batch, ours), (5, 5), textcoords="offset points", fontsize=7, ha=side)
        if batch in ratios:
            panel.plot(
                batch, ratios[batch] * prompt, **(paper_style() | {"label": "paper" if batch == BATCHES[0] else "_"})
            )
