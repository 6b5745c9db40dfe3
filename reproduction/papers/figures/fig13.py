"""Fig 13 of SARATHI (arXiv 2308.16369): the price of chunks of 64 to 512 tokens, and their gain end to end.

Chunks read the KV cache of their prompt again and again, and small ones use the matrix units badly. The decodes that
run beside them pay for it: the last panel is at each chunk's own best P:D.
"""

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots.style import new_figure
from reproduction.papers.claims import Claim
from reproduction.papers.frames import Row, data_frame, pivot, select
from reproduction.papers.machines import TITLES, Machines
from reproduction.papers.panels import HARDWARE, PANELS, predicted_peak
from reproduction.papers.quantities import attention_slowdown, prefill_slowdown
from reproduction.papers.steady import Load, SteadyState
from reproduction.parts import grouped_bars, legend, mark_printed

CHUNKS = tuple(range(64, 513, 64))
SERVED = {128: 5, 256: 14, 512: 28}
"""P:D by chunk where every point is served with real tokens: of Fig 9's, the nearest to the peak."""
PANELS_OF = {
    "attention": ("attention of a prompt,\ntime over that of the whole", "slowdown"),
    "prefill": ("a whole prompt's iterations,\ntime over that of one", "slowdown"),
    "gain": ("throughput over the baseline's,\nat P:D near C/(B-1) - 1", "gain"),
}


@data_frame("hardware", "series", "chunk", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """A prompt of 1,024 tokens in chunks (attention, prefill), and LLaMA-13B's largest batch of them end to end (gain)."""
    for hardware, at in machines.available(HARDWARE):
        say(hardware)
        for chunk in CHUNKS:
            yield from ((hardware, *row) for row in _measure(at, chunk, real=machines.are_real))


def _measure(at: SteadyState, chunk: int, *, real: bool) -> Iterator[tuple[str, int, float]]:
    yield "attention", chunk, attention_slowdown(at, chunk)
    yield "prefill", chunk, prefill_slowdown(at, chunk)
    if not real or chunk in SERVED:
        ratio = SERVED[chunk] if real else predicted_peak(chunk, PANELS[0].batch)
        yield "gain", chunk, at.gain("sarathi", Load(*PANELS[0], ratio), chunk)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Three panels, a bar for each machine; the paper's values are the A6000's."""
    machines = list(dict.fromkeys(data["hardware"]))
    figure, [panels] = new_figure(1, len(PANELS_OF), 2.6)
    for panel, (series, (title, label)) in zip(panels, PANELS_OF.items(), strict=True):
        table = pivot(select(data, series=series), "chunk", "hardware").reindex(list(CHUNKS))[machines]
        places = grouped_bars(panel, table, labels=[TITLES[hardware] for hardware in machines])
        if "a6000" in machines:
            _mark(panel, series, printed, dict(zip(CHUNKS, places["a6000"], strict=True)))
        panel.set(title=title, xlabel="chunk C [tokens]", ylabel=label)
        panel.tick_params(axis="x", labelsize=7)
        panel.axhline(1, color="black", linewidth=0.6)
    legend(figure, panels, ncols=5, last="paper")
    return figure


def _mark(panel: Axes, series: str, claims: Sequence[Claim], places: dict[int, float]) -> None:
    """Printed values; where the paper prints a bound, a triangle that points to where the value may lie."""
    quantity = {"attention": "attention_slowdown", "prefill": "prefill_slowdown", "gain": "gain"}[series]
    for claim in claims:
        at = places.get(claim.setting.get("chunk", 0), 0.0)
        if claim.quantity == "prefill_loss" and series == "prefill" and claim.at_most is not None:
            mark_printed(panel, [(at, 1 / (1 - claim.at_most))], marker="v", label="paper, at most")
        elif claim.quantity == quantity and claim.printed is not None:
            mark_printed(panel, [(at, claim.printed)])
        elif claim.quantity == quantity and claim.at_least is not None:
            mark_printed(panel, [(at, claim.at_least)], marker="^", label="paper, at least")
