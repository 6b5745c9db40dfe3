"""The three panels that Figs 9 and 11 of SARATHI (arXiv 2308.16369) share, and the gains that are measured for each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from reproduction.experiment_files import swept_numbers
from reproduction.papers.frames import Row, data_frame
from reproduction.papers.machines import Machines
from reproduction.papers.steady import Load, Scheme
from reproduction.parts import log_x

HARDWARE = ("a6000", "h200-13b", "gpu")


class Panel(NamedTuple):
    """Requests of `length` tokens, and the largest batch of them that fits LLaMA-13B on the paper's A6000."""

    length: int
    batch: int

    @property
    def title(self) -> str:
        return f"L = {self.length // 1024}K, B = {self.batch}"


PANELS = (Panel(1024, 18), Panel(2048, 10), Panel(3072, 6))

FEW = (2, 5, 14, 28, 50)
"""P:D of the first panel where every point is served with real tokens; the other panels have `FEWER`."""
FEWER = (28, 50)


def predicted_peak(chunk: int, batch: int) -> float:
    """P:D at which a prompt's chunks last as long as the decodes beside them: C'/(B-1) with C' = C - (B-1)."""
    return chunk / (batch - 1) - 1


def ratios(panel: Panel, chunk: int, *, real: bool) -> list[float]:
    """P:D of one line: those of conf/experiment/fig9.yaml and the predicted peak, or a few for real tokens."""
    if real:
        return list(FEW if panel == PANELS[0] else FEWER)
    return sorted({*swept_numbers("fig9", "workload.pd_ratio"), round(predicted_peak(chunk, panel.batch), 2)})


@data_frame("hardware", "series", "length", "batch", "pd_ratio", "value")
def measure_gains(
    machines: Machines, say: Callable[[str], None], lines: Callable[[Panel], Iterable[tuple[object, Scheme, int]]]
) -> Iterator[Row]:
    """Throughput over the baseline's against P:D, in every panel.

    lines: (series, scheme, chunk) of each line of a panel.
    """
    for hardware, at in machines.available(HARDWARE):
        for panel in PANELS:
            say(f"{hardware}, {panel.title}")
            for series, scheme, chunk in lines(panel):
                for ratio in ratios(panel, chunk, real=machines.are_real):
                    yield hardware, series, *panel, ratio, at.gain(scheme, Load(*panel, ratio), chunk)


def pd_axis(axes: Axes, ticks: Sequence[int] = (1, 2, 5, 10, 20, 50, 100, 200)) -> None:
    """P:D on a logarithmic scale. Few ticks are for a narrow panel, whose label is short too."""
    log_x(axes, ticks)
    axes.set_xlabel("P:D, prompt tokens / output tokens" if len(ticks) > 4 else "P:D")
