"""The tile curve of a real GPU: time of an iteration against its tokens on an H200, and the sizes to avoid.

SARATHI's A6000 steps every 128 tokens (arXiv 2308.16369, Fig 7). Here the library chooses among kernels with tiles of many
shapes: there are steps, and there are sizes that take longer than some larger size does. Measured by
`python -m experiments.bench tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.figure import Figure
from tabulate import tabulate

from experiments.paper.claims import Claim
from experiments.paper.machines import Machines
from experiments.paper.measured import left_out, measured, stamped
from experiments.plots.style import line_style, new_figure
from experiments.plots.style import printed as page

SLOWER, LOST = 0.02, 0.1
"""A size is to be avoided if a larger one takes less time, by more than the first share - pad to it - or if a smaller one has
a rate that is higher by the second - take that. Repeats differ by about 0.02."""
CANDIDATES = 64
"""Tokens of which the sizes in the table are multiples: those that one would choose for a chunk."""


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series (the model), tokens, low and high (of the repeats), value (median); milliseconds."""
    found = measured("tiles")
    columns = ["hardware", "series", "tokens", "low", "high", "value"]
    if found is None:
        say(left_out("tiles"))
        return pd.DataFrame(columns=columns)
    times = found["times"]
    data = pd.DataFrame(
        {"tokens": [int(tokens) for tokens in times]}
        | {
            name: [time[key] for time in times.values()]
            for name, key in (("low", "min"), ("high", "max"), ("value", "median"))
        }
    ).sort_values("tokens", ignore_index=True)
    return stamped(data.assign(hardware=found["hardware"], series=found["model"])[columns], found)


def judged(data: pd.DataFrame) -> pd.DataFrame:
    """`data` with what speaks against each size.

    rate: tokens/ms. lost: share by which it is below the best rate of a smaller size. instead: the fastest of the larger
    sizes that take less time by more than `SLOWER`; 0 if there is none.
    """
    rate = data["tokens"] / data["value"]
    instead = []
    for size, time in zip(data["tokens"], data["value"], strict=True):
        faster = data[(data["tokens"] > size) & (data["value"] < (1 - SLOWER) * time)]
        instead.append(int(faster.loc[faster["value"].idxmin(), "tokens"]) if len(faster) else 0)
    return data.assign(rate=rate, lost=1 - rate / rate.cummax(), instead=instead)


def step_over(data: pd.DataFrame, tokens: int) -> float:
    """Time of one token more over the time of `tokens`."""
    times = data.set_index("tokens")["value"]
    return float(times[tokens + 1] / times[tokens])


def num_to_avoid(data: pd.DataFrame) -> int:
    """Candidates against which something speaks."""
    found = judged(data)
    found = found[found["tokens"] % CANDIDATES == 0]
    return int(((found["instead"] > 0) | (found["lost"] > LOST)).sum())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Time above, tokens/ms below, the sizes to avoid marked. The paper's curve is of another GPU: Fig 7."""
    found = judged(data)
    marks = {
        "a larger size takes less time": (found[found["instead"] > 0], {"marker": "x", "markersize": 5}),
        f"{LOST:.0%} below the rate of a smaller size": (
            found[found["lost"] > LOST],
            {"marker": "o", "markersize": 7, "markerfacecolor": "none"},
        ),
    }
    with page():
        figure, axes = new_figure(2, 1, 4.2, sharex=True)
        for [panel], column, label in zip(
            axes, ("value", "rate"), ("time of the iteration [ms]", "throughput [tokens/ms]"), strict=True
        ):
            panel.plot(
                found["tokens"], found[column], **{**line_style(0), "markersize": 2}, label="measured, median of 5"
            )
            for name, (sizes, style) in marks.items():
                panel.plot(sizes["tokens"], sizes[column], linestyle="none", color="black", label=name, **style)  # type: ignore[arg-type]
                for size, value in zip(sizes["tokens"], sizes[column], strict=True):
                    if size % CANDIDATES == 0:
                        panel.annotate(
                            str(size),
                            (size, value),
                            (0, 8 if column == "value" else -13),
                            ha="center",
                            textcoords="offset points",
                            fontsize=6.5,
                        )
            panel.set_ylabel(label)
            panel.set_xticks(range(0, int(found["tokens"].max()) + 1, 128))
            panel.set_ylim(bottom=0)
            panel.grid(visible=True)
        axes[0][0].fill_between(found["tokens"], found["low"], found["high"], alpha=0.25, linewidth=0)
        axes[0][0].set_title(
            f"{found['series'].iloc[0]} on {found['hardware'].iloc[0]}, one prompt's tokens", loc="left"
        )
        axes[0][0].legend(loc="upper left")
        axes[1][0].set_xlabel("tokens in the iteration")
    return figure


def text(data: pd.DataFrame) -> str:
    """Every candidate: what it takes, what share of throughput it loses against smaller sizes, and what is faster."""
    found = judged(data)
    found = found[(found["tokens"] % CANDIDATES == 0) | (found["tokens"] % CANDIDATES == 1) & (found["tokens"] > 64)]
    rows = [
        (row["tokens"], row["value"], row["rate"], f"{row['lost']:.0%}", _advice(row["lost"], row["instead"]))
        for row in found.to_dict("records")
    ]
    return tabulate(rows, ("tokens", "ms", "tokens/ms", "below the best smaller", ""), floatfmt=("d", ".2f", ".1f"))


def _advice(lost: float, instead: int) -> str:
    return (
        f"avoid: {instead} takes less time"
        if instead
        else "avoid: a smaller one has a higher rate"
        if lost > LOST
        else ""
    )
