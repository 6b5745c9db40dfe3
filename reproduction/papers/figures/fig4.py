"""Fig 4 of SARATHI (arXiv 2308.16369): throughput of one layer, and arithmetic intensity, of prompts and of decodes.

4a counts only the matrix products of a layer: with attention included, decodes could not come near their peak at a
batch of 256. Throughput with attention is drawn beside it. Lines end where the profile does; those of decodes end where
decode-only iterations were last measured.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from cbatch import BatchShape
from cbatch.sim import ProfileCost
from experiments.plots.style import line_style
from reproduction.papers.claims import Claim, printed_points
from reproduction.papers.frames import Row, data_frame, pivot, select
from reproduction.papers.machines import SINGLE_ITERATIONS, TITLES, Machines
from reproduction.papers.operations import intensity_by_operation
from reproduction.parts import facet, grouped_bars, log_x, mark_printed

LENGTHS = (64, 128, 256, 512, 1024)
BATCHES = tuple(2**power for power in range(10))
INTENSITY_LENGTH = 1024
INTENSITY_OF = {"prefill, B = 1": 0, "decode, B = 1": 1, "decode, B = 16": 16, "decode, B = 256": 256}
"""Decodes in an iteration; 0: one whole prompt."""

PREFILL, DECODE, INTENSITY, PRODUCTS = "prefill", "decode", "intensity", "no attention"


@data_frame("hardware", "panel", "series", "x", "value", "balance")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """The three panels: tokens/ms of a layer by batch size for prefill and decode, FLOP/byte by operation for intensity.

    balance: FLOP/byte above which the hardware is compute-bound.
    """
    for hardware, at in machines.available(SINGLE_ITERATIONS):
        ceilings = at.cost.profile.ceilings
        balance = ceilings.flops_per_second / ceilings.bandwidth_bytes_per_second
        yield from ((hardware, *row, balance) for row in (*_throughput(at.cost), *_intensity(at.cost)))


def _throughput(cost: ProfileCost) -> Iterator[tuple[str, str, object, float]]:
    def tokens_per_ms(num_tokens: int, seconds: float) -> float:
        return num_tokens * cost.spec.num_layers / (1e3 * seconds)

    operations = cost.operations
    of_decodes = (operations.measured.decode_only or operations).linear
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
    """Tokens/ms of a layer's products, for this number of tokens in the shortest prompts."""
    line = select(data, hardware=hardware, panel=PREFILL, series=f"L = {LENGTHS[0]}")
    return float(line.loc[line["x"].astype(int) * LENGTHS[0] == tokens, "value"].iloc[0])


def share_of_peak(data: pd.DataFrame, hardware: str, tokens: int) -> float:
    """`layer_throughput` over the highest of any prompts."""
    peak = select(data, hardware=hardware, panel=PREFILL)["value"].max()
    return layer_throughput(data, hardware, tokens) / float(peak)


def saturation_batch(data: pd.DataFrame, hardware: str, share: float) -> float:
    """The smallest drawn batch whose decodes reach this share of the prompts' peak, in the products alone.

    NaN where no measured batch does.
    """
    decodes = select(data, hardware=hardware, panel=DECODE, series=PRODUCTS)
    peak = select(data, hardware=hardware, panel=PREFILL)["value"].max()
    return float(decodes.loc[decodes["value"] >= share * peak, "x"].astype(int).min())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Three panels for each machine: 4a of prompts, 4a of decodes, 4b."""
    figure, facets = facet(data, 3, 2.5, extra=0.3)
    for hardware, shown, (prefill, decode, intensity) in facets:
        top = 1.1 * select(shown, panel=PREFILL)["value"].max()
        for panel, name in ((prefill, PREFILL), (decode, DECODE)):
            _draw_lines(panel, select(shown, panel=name))
            panel.set(title=f"{TITLES[hardware]}: {name}", ylim=(0, top))
        points = printed_points(printed, layer_throughput.__name__, "tokens", hardware=hardware)
        mark_printed(prefill, [(tokens / LENGTHS[0], value) for tokens, value in points])
        prefill.legend(loc="lower right")
        decode.legend(loc="upper left", title="decodes at context")
        _draw_intensity(intensity, select(shown, panel=INTENSITY))
    return figure


def _draw_lines(panel: Axes, shown: pd.DataFrame) -> None:
    styles = {f"L = {length}": line_style(index) for index, length in enumerate(LENGTHS)}
    styles[PRODUCTS] = line_style(len(LENGTHS)) | {"color": "black"}
    for series in dict.fromkeys(shown["series"]):
        points = select(shown, series=series)
        panel.plot(points["x"].astype(int), points["value"], label=series, **styles[series])
    log_x(panel, [batch for batch in BATCHES[::2] if batch <= shown["x"].astype(int).max()], base=2)
    panel.set(xlabel="batch size B [requests]", ylabel="throughput of a layer [tokens/ms]")


def _draw_intensity(panel: Axes, shown: pd.DataFrame) -> None:
    grouped_bars(panel, pivot(shown, "x"))
    balance = float(shown["balance"].iloc[0])
    dashes: dict[str, Any] = {"color": "black", "linewidth": 0.8, "linestyle": (0, (4, 2))}
    panel.axhline(balance, label=f"balance of the GPU: {balance:.0f}", **dashes)
    panel.set(yscale="log", ylabel="arithmetic intensity [FLOP/byte]", title=f"L = {INTENSITY_LENGTH}")
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.set_ylim(0.5, 200 * shown["value"].max())
    panel.tick_params(axis="x", rotation=20)
    panel.grid(visible=False)
    panel.legend(loc="upper left", ncols=1)
