"""Fig 4 of SARATHI (arXiv 2308.16369): throughput of one layer, and arithmetic intensity, of prompts and of decodes.

4a counts the matrix products of a layer alone: with attention in them, decodes could not come near their peak at a batch of
256. What attention leaves of it is drawn beside. Lines end where the profile does, those of decodes where it has measured
decodes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from cbatch import BatchShape
from cbatch.sim.cost import ProfileCost
from experiments.paper.claims import Claim
from experiments.paper.machines import TITLES, Machines
from experiments.paper.operations import intensity_by_operation
from experiments.plots.style import fill_style, line_style, new_figure, paper_style
from experiments.plots.style import printed as page

LENGTHS = (64, 128, 256, 512, 1024)
BATCHES = tuple(2**power for power in range(10))
INTENSITY_LENGTH = 1024
INTENSITY_OF = {"prefill, B = 1": 0, "decode, B = 1": 1, "decode, B = 16": 16, "decode, B = 256": 256}
"""Decodes of an iteration; 0: one whole prompt."""

PREFILL, DECODE, INTENSITY, PRODUCTS = "prefill", "decode", "intensity", "no attention"


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """The three panels.

    Columns: hardware, panel (prefill, decode, intensity), series, x (batch size, or the operation), value (tokens/ms of a
    layer, or FLOP/byte), balance (FLOP/byte above which the hardware's arithmetic is the bound).
    """
    rows = []
    for hardware, at in machines.single_iterations():
        ceilings = at.cost.profile.ceilings
        balance = ceilings.flops_per_second / ceilings.bandwidth_bytes_per_second
        rows += [(hardware, *row, balance) for row in (*_throughput(at.cost), *_intensity(at.cost))]
    return pd.DataFrame(rows, columns=["hardware", "panel", "series", "x", "value", "balance"])


def _throughput(cost: ProfileCost) -> Iterator[tuple[str, str, object, float]]:
    def tokens_per_ms(num_tokens: int, seconds: float) -> float:
        return num_tokens * cost.spec.num_layers / (1e3 * seconds)

    operations = cost.operations
    of_decodes = (operations.decode_only or operations).linear
    for batch in BATCHES:
        if of_decodes.covers(batch):
            yield DECODE, PRODUCTS, batch, tokens_per_ms(batch, cost.parts(BatchShape((), batch, batch)).linear)
        for length in LENGTHS:
            decodes, prompts = BatchShape((), batch, batch * length), BatchShape(((length, 0),) * batch)
            if of_decodes.covers(batch) and operations.attention.covers(decodes):
                parts = cost.parts(decodes)
                yield DECODE, f"L = {length}", batch, tokens_per_ms(batch, parts.linear + parts.attention)
            if operations.linear.covers(prompts.num_tokens):
                seconds = cost.parts(prompts).linear
                yield PREFILL, f"L = {length}", batch, tokens_per_ms(prompts.num_tokens, seconds)


def _intensity(cost: ProfileCost) -> Iterator[tuple[str, str, object, float]]:
    for series, decodes in INTENSITY_OF.items():
        shape = BatchShape((), decodes, decodes * INTENSITY_LENGTH) if decodes else BatchShape(((INTENSITY_LENGTH, 0),))
        for name, value in intensity_by_operation(cost, shape).items():
            yield INTENSITY, series, name, value


def layer_throughput(data: pd.DataFrame, hardware: str, tokens: int) -> float:
    """Tokens/ms of a layer's products, for so many tokens in the shortest prompts."""
    lines = data[(data["hardware"] == hardware) & (data["panel"] == PREFILL) & (data["series"] == f"L = {LENGTHS[0]}")]
    return float(lines.loc[lines["x"].astype(int) * LENGTHS[0] == tokens, "value"].iloc[0])


def share_of_peak(data: pd.DataFrame, hardware: str, tokens: int) -> float:
    """The same over its peak."""
    prompts = data[(data["hardware"] == hardware) & (data["panel"] == PREFILL)]
    return layer_throughput(data, hardware, tokens) / float(prompts["value"].max())


def saturation_batch(data: pd.DataFrame, hardware: str, share: float) -> float:
    """The smallest batch drawn whose decodes reach this share of the peak of prompts, in the products alone.

    Not a number where no batch that was measured does.
    """
    shown = data[data["hardware"] == hardware]
    decodes = shown[(shown["panel"] == DECODE) & (shown["series"] == PRODUCTS)]
    peak = shown.loc[shown["panel"] == PREFILL, "value"].max()
    return float(decodes.loc[decodes["value"] >= share * peak, "x"].astype(int).min())


def intensity_ratio(data: pd.DataFrame, hardware: str, decodes: int, operation: str) -> float:
    """Arithmetic intensity of a prompt over that of decodes."""
    shown = data[(data["hardware"] == hardware) & (data["panel"] == INTENSITY) & (data["x"] == operation)]
    of = shown.set_index("series")["value"]
    series = {number: name for name, number in INTENSITY_OF.items()}
    return float(of[series[0]] / of[series[decodes]])


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Three panels for each machine: 4a of prompts, 4a of decodes, 4b."""
    machines = list(dict.fromkeys(data["hardware"]))
    with page():
        figure, axes = new_figure(len(machines), 3, 0.3 + 2.5 * len(machines))
        for panels, hardware in zip(axes, machines, strict=True):
            shown = data[data["hardware"] == hardware]
            prefill, decode, intensity = (shown[shown["panel"] == panel] for panel in (PREFILL, DECODE, INTENSITY))
            for panel, lines in ((panels[0], prefill), (panels[1], decode)):
                _lines(panel, lines)
                panel.set_title(f"{TITLES[hardware]}: {lines['panel'].iloc[0]}", loc="left")
                panel.set_ylim(0, 1.1 * prefill["value"].max())
            _peak(panels[0], [claim for claim in printed if claim.hardware == hardware])
            panels[0].legend(loc="lower right")
            panels[1].legend(loc="upper left", title="decodes at context")
            _bars(panels[2], intensity)
    return figure


def _lines(panel: Axes, shown: pd.DataFrame) -> None:
    styles = {f"L = {length}": line_style(index) for index, length in enumerate(LENGTHS)}
    styles[PRODUCTS] = line_style(len(LENGTHS)) | {"color": "black"}
    for series in dict.fromkeys(shown["series"]):
        points = shown[shown["series"] == series]
        panel.plot(points["x"].astype(int), points["value"], label=series, **styles[series])
    panel.set_xscale("log", base=2)
    panel.set_xticks([batch for batch in BATCHES[::2] if batch <= shown["x"].astype(int).max()])
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("batch size B [requests]")
    panel.set_ylabel("throughput of a layer [tokens/ms]")
    panel.grid(visible=True)


def _peak(panel: Axes, claims: Sequence[Claim]) -> None:
    """The throughput that the paper prints for numbers of tokens, on the line of the shortest prompts."""
    values = {
        claim.setting["tokens"] / LENGTHS[0]: claim.printed
        for claim in claims
        if claim.printed is not None and claim.quantity == layer_throughput.__name__
    }
    if values:
        panel.plot(list(values), list(values.values()), **paper_style())


def _bars(panel: Axes, shown: pd.DataFrame) -> None:
    table = shown.pivot_table(index="x", columns="series", values="value", sort=False)
    width = 0.8 / table.shape[1]
    for index, series in enumerate(table):
        places = [place + (index - (table.shape[1] - 1) / 2) * width for place in range(len(table))]
        panel.bar(places, table[series], width, label=series, **fill_style(index))
    balance = float(shown["balance"].iloc[0])
    panel.axhline(
        balance, color="black", linewidth=0.8, linestyle=(0, (4, 2)), label=f"balance of the GPU: {balance:.0f}"
    )
    panel.set_yscale("log")
    panel.set_xticks(range(len(table)), list(table.index), rotation=20)
    panel.set_ylabel("arithmetic intensity [FLOP/byte]")
    panel.set_title(f"L = {INTENSITY_LENGTH}", loc="left")
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.set_ylim(0.5, 200 * shown["value"].max())
    panel.legend(loc="upper left", ncols=1)
