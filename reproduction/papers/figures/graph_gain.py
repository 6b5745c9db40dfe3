"""CUDA graphs and torch.compile against the batch size: where the gain of Fireworks AI's post (August 2023) ends.

The post serves one request: LLaMA-2-7B, batch 1, on an A100-80GB, 30 tokens/s without graphs and 69 with them. A larger
batch gives the device more to do for the same launches. Measured by `python -m reproduction.bench graphs`; in graphs-ways.json, on another card and a slower host, a
single request with the post's further ways: a static KV cache, and the compiler's own graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from experiments.plots.parts import label_log
from experiments.plots.style import PAGE, PREFILL, line_style
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
ONE = "one request"
"""Marks the card of graphs-ways.json, another one of the same kind."""
SLOTS = 2  # each size is captured once for each I/O slot


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the way), what ("rate", or one of `PRICES`), batch (0 for prices), value."""
    if not (file := read_stored("graphs", say)):
        return pd.DataFrame()
    files = {file["hardware"]: file}
    if ways := read_stored("graphs-ways", say):
        files[f"{ways['hardware']}, {ONE}"] = ways
    rows = [
        (card, *row)
        for card, file in files.items()
        for name, way in file["figures"].items()
        for row in _rows(name, way)
    ]
    return add_provenance(pd.DataFrame(rows, columns=["hardware", "series", "what", "batch", "value"]), *files.values())


def _rows(name: str, way: dict[str, Any]) -> Iterator[tuple[str, str, int, float]]:
    yield from ((name, "rate", int(batch), rate["median"]) for batch, rate in way["by_batch"].items())
    prices = (way["capture_seconds"], way["warm_up_seconds"], way["graphs"] / SLOTS)
    yield from ((name, what, 0, price) for what, price in zip(PRICES, prices, strict=True))


def gain(data: pd.DataFrame, hardware: str, way: str, over: str, batch: int = 1) -> float:
    """Tokens per second of one way over another's."""
    rate, other = (value(data, hardware=hardware, series=each, what="rate", batch=batch) for each in (way, over))
    return rate / other


def share_left(data: pd.DataFrame, hardware: str, way: str, over: str, batch: int) -> float:
    """Share of an iteration's time that a way saves at this batch, over the share that it saves at batch 1."""
    saved = [1 - 1 / gain(data, hardware, way, over, size) for size in (1, batch)]
    return saved[1] / saved[0]


def seconds_per_size(data: pd.DataFrame, hardware: str, way: str) -> float:
    """Seconds of capturing the graphs of one batch size."""
    seconds, sizes = (value(data, hardware=hardware, series=way, what=what) for what in ("capture_seconds", "sizes"))
    return seconds / sizes


def seconds_to_start(data: pd.DataFrame, hardware: str, way: str) -> float:
    """Seconds of captures and first request."""
    return sum(value(data, hardware=hardware, series=way, what=what) for what in ("capture_seconds", "warm_up_seconds"))


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Left, tokens/s; right, the gain of graphs over launching one by one; below, one request on another card. The post's values are at batch 1."""
    first, *others = dict.fromkeys(data["hardware"])
    rates = pivot(select(data, what="rate", hardware=first), "batch").sort_index()  # the ways in the benchmark's order
    figure = plt.figure(figsize=(PAGE, 3.1 + 2.0 * len(others)), layout="constrained")
    axes = figure.subplot_mosaic(
        [["speeds", "gains"], *([card, card] for card in others)], height_ratios=[3] + [2] * len(others)
    )
    speeds, gains = axes["speeds"], axes["gains"]
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
    for card in others:
        ways = select(data, what="rate", hardware=card, batch=1)
        axes[card].bar_label(
            axes[card].barh(ways["series"], ways["value"], color=PREFILL), fmt="%.0f", padding=2, fontsize=6
        )
        axes[card].invert_yaxis()
        axes[card].yaxis.grid(visible=False)
        axes[card].set(title=card, xlabel="output tokens/s")
    speeds.set(title=f"LLaMA-2-7B on {first}", ylabel="output tokens/s", yscale="log")
    label_log(speeds.yaxis)
    gains.set(title="gain of graphs", ylabel="tokens/s over those without")
    legend(figure, [speeds])
    return figure
