"""The three panels that Figs 9 and 11 of SARATHI (arXiv 2308.16369) share, and the values of P:D that are measured in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from experiments.config.composition import swept_numbers


class Panel(NamedTuple):
    """Requests of `length` tokens, and the largest batch of them that fits LLaMA-13B on the paper's A6000."""

    length: int
    batch: int

    @property
    def title(self) -> str:
        return f"L = {self.length // 1024}K, B = {self.batch}"


PANELS = (Panel(1024, 18), Panel(2048, 10), Panel(3072, 6))

FEW = (2, 5, 14, 28, 50)
"""P:D where every point is served with real tokens; those of the first panel, the others have `FEWER`."""
FEWER = (28, 50)


def predicted_peak(chunk: int, batch: int) -> float:
    """P:D at which a prompt's chunks last as long as the decodes beside them: C'/(B-1) with C' = C - (B-1)."""
    return chunk / (batch - 1) - 1


def ratios(panel: Panel, chunk: int, *, real: bool) -> list[float]:
    """P:D for one line: those of conf/experiment/fig9.yaml and the predicted peak, or few for real tokens."""
    if real:
        return list(FEW if panel == PANELS[0] else FEWER)
    return sorted({*swept_numbers("fig9", "workload.pd_ratio"), round(predicted_peak(chunk, panel.batch), 2)})


def pd_axis(axes: Axes, ticks: Sequence[int] = (1, 2, 5, 10, 20, 50, 100, 200)) -> None:
    """P:D from 1 to 200, on a logarithmic scale with plain numbers. Fewer ticks: a narrow panel, without the words."""
    axes.set_xscale("log")
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("P:D, prompt tokens / output tokens" if len(ticks) > 4 else "P:D")
    axes.grid(visible=True)
