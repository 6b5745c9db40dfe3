"""Fig 13 of SARATHI (arXiv 2308.16369): the price of chunks of 64 to 512 tokens, and what they bring end to end.

Chunks read the KV cache of their prompt again and again, and small ones use the matrix units badly. What decodes gain beside
them pays for it: the last panel is at each chunk's own best P:D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.claims import Claim
from experiments.paper.machines import TITLES, Machines
from experiments.paper.panels import PANELS, predicted_peak
from experiments.paper.quantities import attention_slowdown, prefill_slowdown
from experiments.paper.steady import Load, SteadyState
from experiments.plots.style import fill_style, new_figure, paper_style
from experiments.plots.style import printed as page

CHUNKS = tuple(range(64, 513, 64))
SERVED = {128: 5, 256: 14, 512: 28}
"""P:D by chunk where every point is served with real tokens: of Fig 9's, the nearest to the peak."""
HARDWARE = ("a6000", "h200-13b", "gpu")
PANELS_OF = {
    "attention": "attention of a prompt,\ntime over that of the whole",
    "prefill": "a whole prompt's iterations,\ntime over that of one",
    "gain": "throughput over the baseline's,\nat P:D near C/(B-1) - 1",
}


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """A prompt of 1,024 tokens in chunks, and LLaMA-13B's largest batch of them end to end.

    Columns: hardware, series (attention, prefill, gain), chunk, value.
    """
    rows = []
    for hardware in HARDWARE:
        if at := machines.get(hardware):
            say(hardware)
            rows += [(hardware, *row) for chunk in CHUNKS for row in _of(at, chunk, real=machines.are_real)]
    return pd.DataFrame(rows, columns=["hardware", "series", "chunk", "value"])


def _of(at: SteadyState, chunk: int, *, real: bool) -> Iterator[tuple[str, int, float]]:
    yield "attention", chunk, attention_slowdown(at, chunk)
    yield "prefill", chunk, prefill_slowdown(at, chunk)
    if not real or chunk in SERVED:
        ratio = SERVED[chunk] if real else predicted_peak(chunk, PANELS[0].batch)
        yield "gain", chunk, at.gain("sarathi", Load(*PANELS[0], ratio), chunk)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Three panels, a bar for each machine; the paper's values are the A6000's."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, [panels] = new_figure(1, len(PANELS_OF), 2.6)
        for panel, (series, label) in zip(panels, PANELS_OF.items(), strict=True):
            _bars(panel, data[data["series"] == series], machines)
            if "a6000" in machines:
                _mark(panel, series, printed, (machines.index("a6000") - (len(machines) - 1) / 2) * 0.8 / len(machines))
            panel.set_title(label, loc="left")
            panel.set_xlabel("chunk C [tokens]")
            panel.set_ylabel("slowdown" if series != "gain" else "gain")
            panel.axhline(1, color="black", linewidth=0.6)
            panel.grid(visible=True, axis="y")
        entries = {
            label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        entries = {label: entries[label] for label in sorted(entries, key=lambda label: label.startswith("paper"))}
        figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=len(entries))
    return figure


def _bars(panel: Axes, shown: pd.DataFrame, machines: Sequence[str]) -> None:
    width = 0.8 / len(machines)
    for index, hardware in enumerate(machines):
        mine = shown[shown["hardware"] == hardware]
        places = [CHUNKS.index(chunk) + (index - (len(machines) - 1) / 2) * width for chunk in mine["chunk"]]
        panel.bar(places, mine["value"], width, label=TITLES[hardware], **fill_style(index))
    panel.set_xticks(range(len(CHUNKS)), list(map(str, CHUNKS)), fontsize=7)
    panel.set_xlim(-0.7, len(CHUNKS) - 0.3)


def _mark(panel: Axes, series: str, claims: Sequence[Claim], offset: float) -> None:
    """Printed values; where the paper prints a bound, a triangle that points to where the value may lie."""
    quantity = {"attention": "attention_slowdown", "prefill": "prefill_slowdown", "gain": "gain"}[series]
    for claim in claims:
        style, value = paper_style(), claim.printed
        if claim.quantity == "prefill_loss" and series == "prefill" and claim.at_most is not None:
            value, style["marker"], style["label"] = 1 / (1 - claim.at_most), "v", "paper, at most"
        elif claim.quantity != quantity:
            continue
        elif value is None and claim.at_least is not None:
            value, style["marker"], style["label"] = claim.at_least, "^", "paper, at least"
        if value is not None:
            panel.plot(CHUNKS.index(claim.setting["chunk"]) + offset, value, **style)
