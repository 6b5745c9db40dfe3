"""CUDA graphs and torch.compile against the batch size: where the gain of Fireworks AI's post (August 2023) ends.

The post serves one request: LLaMA-2-7B, batch 1, on an A100-80GB, 30 tokens/s without graphs and 69 with them. A larger
batch gives the device more to do for the same launches. Measured by `python -m reproduction.bench graphs`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots.style import line_style, new_figure
from reproduction.papers.claims import Claim
from reproduction.papers.frames import add_provenance, pivot, read_stored, select
from reproduction.papers.machines import Machines
from reproduction.papers.quantities import value
from reproduction.parts import legend, log_x, mark_printed

EAGER = {
    "fused, graphs": "fused, eager",
    "transformers, graphs": "transformers, eager",
    "torch.compile, graphs": "torch.compile",
}
"""The same operations launched one by one, by way: the gain of graphs is over these."""

PRICES = ("capture_seconds", "warm_up_seconds", "sizes")
"""Seconds of all captures and of the first request; and the number of batch sizes captured."""
SLOTS = 2  # each size is captured once for each I/O slot


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the way), what ("rate", or one of `PRICES`), batch (0 for prices), value."""
    if not (file := read_stored("graphs", say)):
        return pd.DataFrame()
    rows = [(file["hardware"], *row) for name, way in file["figures"].items() for row in _rows(name, way)]
    return add_provenance(pd.DataFrame(rows, columns=["hardware", "series", "what", "batch", "value"]), file)


def _rows(name: str, way: dict[str, Any]) -> Iterator[tuple[str, str, int, float]]:
    yield from ((name, "rate", int(batch), rate["median"]) for batch, rate in way["by_batch"].items())
    prices = (way["capture_seconds"], way["warm_up_seconds"], way["graphs"] / SLOTS)
    yield from ((name, what, 0, price) for what, price in zip(PRICES, prices, strict=True))


def gain(data: pd.DataFrame, way: str, over: str, batch: int = 1) -> float:
    """Tokens per second of one way over another's."""
    rate, other = (value(data, series=each, what="rate", batch=batch) for each in (way, over))
    return rate / other


def share_left(data: pd.DataFrame, way: str, over: str, batch: int) -> float:
    """Share of an iteration's time that a way saves at this batch, over the share that it saves at batch 1."""
    saved = [1 - 1 / gain(data, way, over, size) for size in (1, batch)]
    return saved[1] / saved[0]


def seconds_per_size(data: pd.DataFrame, way: str) -> float:
    """Seconds of capturing the graphs of one batch size."""
    return value(data, series=way, what="capture_seconds") / value(data, series=way, what="sizes")


def seconds_to_start(data: pd.DataFrame, way: str) -> float:
    """Seconds of captures and first request."""
    return sum(value(data, series=way, what=what) for what in ("capture_seconds", "warm_up_seconds"))


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Left, tokens/s; right, the gain of graphs over launching one by one. The post's values are at batch 1."""
    rates = pivot(select(data, what="rate"), "batch").sort_index()  # the ways in the benchmark's order
    figure, [[speeds, gains]] = new_figure(1, 2, 3.1)
    for index, name in enumerate(map(str, rates)):
        speeds.plot(rates.index, rates[name], label=name, **line_style(index))
        if EAGER.get(name) in rates:
            gains.plot(rates.index, rates[name] / rates[EAGER[name]], **line_style(index))
    gains.axhline(1, color="#888888", linewidth=0.6)
    for panel, quantity in ((speeds, value.__name__), (gains, gain.__name__)):
        points = [(1, claim.printed) for claim in printed if claim.quantity == quantity and claim.printed]
        mark_printed(panel, points, label="post, LLaMA-2-7B on an A100")
        log_x(panel, base=2)
        panel.set_xlabel("batch size [requests]")
    speeds.set(title=f"LLaMA-2-7B on {data['hardware'].iloc[0]}", ylabel="output tokens/s", yscale="log")
    gains.set(title="gain of graphs", ylabel="tokens/s over those without")
    legend(figure, [speeds])
    return figure
