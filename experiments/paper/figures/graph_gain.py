"""CUDA graphs and torch.compile against the batch size: where the gain of Fireworks AI's post (August 2023) ends.

The post has one request: LLaMA-2-7B, batch 1, on an A100-80GB, 30 tokens/s without and 69 with graphs. A larger batch gives
the device more to do for the same launches. Measured by `python -m experiments.bench graphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from tabulate import tabulate

from experiments.paper.claims import Claim
from experiments.paper.machines import Machines
from experiments.paper.measured import left_out, measured, stamped
from experiments.plots.style import line_style, new_figure, paper_style
from experiments.plots.style import printed as page

EAGER = {
    "fused, graphs": "fused, eager",
    "transformers, graphs": "transformers, eager",
    "torch.compile, graphs": "torch.compile",
}
"""What the gain of graphs is over: the same operations launched one by one."""

PRICES = ("capture_seconds", "warm_up_seconds", "sizes")
"""Seconds of all captures and of the first request; and the batch sizes that were captured."""
SLOTS = 2  # each size is captured once for each I/O slot


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the way), what ("rate", or one of `PRICES`), batch (0 for prices), value (tokens/s, s)."""
    found = measured("graphs")
    columns = ["hardware", "series", "what", "batch", "value"]
    if found is None or not any("by_batch" in way for way in found["figures"].values()):
        say(left_out("graphs"))
        return pd.DataFrame(columns=columns)
    rows = []
    for name, way in found["figures"].items():
        rows += [(found["hardware"], name, *row) for row in _of_way(way)]
    return stamped(pd.DataFrame(rows, columns=columns), found)


def _of_way(way: dict[str, Any]) -> list[tuple[str, int, float]]:
    rates = [("rate", int(batch), float(rate["median"])) for batch, rate in way.get("by_batch", {}).items()]
    prices = (way["capture_seconds"], way["warm_up_seconds"], way["graphs"] / SLOTS)
    return rates + [(name, 0, float(value)) for name, value in zip(PRICES, prices, strict=True)]


def rate(data: pd.DataFrame, way: str, batch: int = 1) -> float:
    """Output tokens a second; NaN if it was not measured."""
    rates = _rates(data)
    return float(rates[way].get(batch, float("nan"))) if way in rates else float("nan")


def gain(data: pd.DataFrame, way: str, over: str, batch: int = 1, marked: bool = True) -> float:
    """Tokens a second of one way over another's. marked: whether the printed value is drawn, as a gain of graphs."""
    return rate(data, way, batch) / rate(data, over, batch)


def share_left(data: pd.DataFrame, way: str, over: str, batch: int) -> float:
    """Of the time that a way saves at batch 1, as a share of an iteration's, what it still saves at this batch."""
    saved = [1 - 1 / gain(data, way, over, size) for size in (1, batch)]
    return saved[1] / saved[0]


def price(data: pd.DataFrame, way: str, what: str) -> float:
    """Seconds before a way runs at full speed: `what` is one of `PRICES`."""
    shown = data[(data["series"] == way) & (data["what"] == what)]["value"]
    return float(shown.iloc[0]) if len(shown) else float("nan")


def seconds_a_size(data: pd.DataFrame, way: str) -> float:
    """Seconds of capturing the graphs of one batch size."""
    return price(data, way, "capture_seconds") / price(data, way, "sizes")


def price_ratio(data: pd.DataFrame, way: str, over: str) -> float:
    """Seconds of captures and first request of one way over another's."""
    first, second = (
        price(data, name, "capture_seconds") + price(data, name, "warm_up_seconds") for name in (way, over)
    )
    return first / second


def _rates(data: pd.DataFrame) -> pd.DataFrame:
    """Tokens a second, [batch, way], the ways in the benchmark's order."""
    table = data[data["what"] == "rate"].pivot_table(index="batch", columns="series", values="value")
    return table[list(dict.fromkeys(data["series"]))]


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Left, tokens/s; right, what graphs gain over launching the same operations one by one. The post's values at batch 1."""
    rates = _rates(data)
    with page():
        figure, [[speeds, gains]] = new_figure(1, 2, 3.1)
        for index, name in enumerate(rates):
            speeds.plot(rates.index, rates[name], label=name, **line_style(index))
        for name, eager in EAGER.items():
            if name in rates and eager in rates:
                gains.plot(rates.index, rates[name] / rates[eager], **line_style(list(rates).index(name)))
        gains.axhline(1, color="#888888", linewidth=0.6)
        for panel, quantity in ((speeds, "rate"), (gains, "gain")):
            marks = [
                claim.printed
                for claim in printed
                if claim.quantity == quantity
                and claim.printed is not None
                and claim.setting.get("batch", 1) == 1
                and claim.setting.get("marked", True)
            ]
            if marks:
                panel.plot([1] * len(marks), marks, **{**paper_style(), "label": "post, LLaMA-2-7B on an A100"})
        _axes(speeds, f"LLaMA-2-7B on {data['hardware'].iloc[0]}", "output tokens/s")
        _axes(gains, "gain of graphs", "tokens/s over those without")
        speeds.set_yscale("log")
        figure.legend(*speeds.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _axes(panel: Axes, title: str, label: str) -> None:
    panel.set_title(title, loc="left")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("batch size [requests]")
    panel.set_ylabel(label)
    panel.grid(visible=True)


def text(data: pd.DataFrame) -> str:
    """Tokens/s by way and batch, and the seconds that a way costs before."""
    rates = _rates(data)
    rows = [
        [name, *rates[name], *(price(data, name, what) for what in PRICES[:2])]
        for name in dict.fromkeys(data["series"])
    ]
    return tabulate(rows, ["tokens/s at batch", *rates.index, "captures [s]", "first request [s]"], floatfmt=",.1f")
