"""The tile curve of a real GPU: iteration time against tokens on an H200, and the sizes to avoid.

SARATHI's A6000 steps every 128 tokens (arXiv 2308.16369, Fig 7). Here the library chooses among kernels with tiles of
many shapes: there are steps, and there are sizes that take longer than some larger size does. Measured by
`python -m reproduction.bench tiles`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots.style import line_style, new_figure
from reproduction.papers.claims import Claim
from reproduction.papers.frames import load_benchmark
from reproduction.papers.machines import Machines

SLOWER, LOST = 0.02, 0.1
"""Avoid a size if a larger one takes less time, by more than the first share - pad to it - or if a smaller one has a
rate higher by more than the second - take that. Repeats differ by about 0.02."""
CANDIDATES = 64
"""Chunk sizes in the table and in the counts are multiples of this."""


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the model), tokens, low and high (of the repeats), value (median); milliseconds."""
    return load_benchmark("tiles", ["series", "tokens", "low", "high", "value"], _rows, say)


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, int, float, float, float]]:
    for tokens, time in sorted(found["times"].items(), key=lambda item: int(item[0])):
        yield found["model"], int(tokens), time["min"], time["max"], time["median"]


def judge(data: pd.DataFrame) -> pd.DataFrame:
    """`data` with the reasons to avoid each size.

    rate: tokens/ms. lost: share by which it is below the best rate of a smaller size. instead: the fastest of the
    larger sizes that take less time by more than `SLOWER`; 0 if there is none.
    """
    rate = data["tokens"] / data["value"]
    instead = []
    for size, time in zip(data["tokens"], data["value"], strict=True):
        faster = data[(data["tokens"] > size) & (data["value"] < (1 - SLOWER) * time)]
        instead.append(int(faster.loc[faster["value"].idxmin(), "tokens"]) if len(faster) else 0)
    return data.assign(rate=rate, lost=1 - rate / rate.cummax(), instead=instead)


def step_over(data: pd.DataFrame, tokens: int) -> float:
    """Time of `tokens` + 1 over the time of `tokens`."""
    times = data.set_index("tokens")["value"]
    return float(times[tokens + 1] / times[tokens])


def num_to_avoid(data: pd.DataFrame) -> int:
    """Number of candidates to avoid."""
    found = judge(data)
    found = found[found["tokens"] % CANDIDATES == 0]
    return int(((found["instead"] > 0) | (found["lost"] > LOST)).sum())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Time above, tokens/ms below, the sizes to avoid marked. The paper's curve (Fig 7) is of another GPU."""
    found = judge(data)
    hollow = {"marker": "o", "markersize": 7, "markerfacecolor": "none"}
    marks: dict[str, tuple[pd.DataFrame, dict[str, Any]]] = {
        "a larger size takes less time": (found[found["instead"] > 0], {"marker": "x", "markersize": 5}),
        f"{LOST:.0%} below the rate of a smaller size": (found[found["lost"] > LOST], hollow),
    }
    figure, [[times], [rates]] = new_figure(2, 1, 4.2, sharex=True)
    for panel, column, offset in ((times, "value", 8), (rates, "rate", -13)):
        curve = {**line_style(0), "markersize": 2, "label": "measured, median of 5"}
        panel.plot(found["tokens"], found[column], **curve)
        for name, (sizes, style) in marks.items():
            panel.plot(sizes["tokens"], sizes[column], linestyle="none", color="black", label=name, **style)
            for size, value in zip(sizes["tokens"], sizes[column], strict=True):
                if size % CANDIDATES == 0:
                    options: dict[str, Any] = {"ha": "center", "textcoords": "offset points", "fontsize": 6.5}
                    panel.annotate(str(size), (size, value), (0, offset), **options)
        panel.set_xticks(range(0, int(found["tokens"].max()) + 1, 128))
        panel.set_ylim(bottom=0)
    times.fill_between(found["tokens"], found["low"], found["high"], alpha=0.25, linewidth=0)
    times.set_title(f"{found['series'].iloc[0]} on {found['hardware'].iloc[0]}, tokens of one prompt")
    times.set_ylabel("time of the iteration [ms]")
    times.legend(loc="upper left")
    rates.set(xlabel="tokens in the iteration", ylabel="throughput [tokens/ms]")
    return figure
