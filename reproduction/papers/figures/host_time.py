"""Where the host's time goes at batch 1, and why it came to matter: eager beside graphs, and the host's share by generation of GPU.

Measured by `python -m reproduction.bench host`. By generation: the device's time by data sheet, under the eager iteration that was measured
here, in which the host launches all the time; a device that needs less waits for the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch import BatchShape
from cbatch.sim import Profile, ProfileCost
from cbatch.sim.roofline import Ceilings
from experiments.plots.parts import draw_spans, lane_axes
from experiments.plots.style import PAGE, line_style
from experiments.setup.presets import load_spec
from reproduction.bench.host_time import DEVICE, KINDS, SHOWN_MS, WAIT
from reproduction.papers.claims import Claim
from reproduction.papers.frames import add_provenance, pivot, read_stored, select
from reproduction.papers.machines import Machines
from reproduction.papers.quantities import value
from reproduction.parts import fill_style, stacked_bars

MODEL, CONTEXT = "llama-2-7b", 256
SHEETS = {
    "P100": (21.2e12, 732e9, 16e9),
    "V100": (112e12, 900e9, 32e9),
    "A100 40GB": (312e12, 1555e9, 40e9),
    "A100 80GB": (312e12, 2039e9, 80e9),
    "H100": (989e12, 3350e9, 80e9),
}
"""By data sheet: 16-bit products per second, bytes per second, and memory. V100: the PCIe card, as in the post."""
LOADS = {
    "1 decode": BatchShape((), 1, CONTEXT),
    "32 decodes": BatchShape((), 32, 32 * CONTEXT),
    "prompt of 512": BatchShape(((512, 0),)),
}
TIMELINES = ("eager", "graphs")


def profile_of(name: str) -> Profile:
    """Returns the roofline profile of a data sheet."""
    flops, moved, memory = SHEETS[name]
    ceilings = Ceilings(moved, flops, tile=128)
    return Profile(name=name, hardware=f"NVIDIA {name}", source="data sheet", memory_bytes=memory, ceilings=ceilings)


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware, series, what, begin, value.

    what: a kind of the host's work or "device", milliseconds per iteration; "span KIND", from `begin`; "iteration", without a profiler; of a
    data sheet by load "idle", the share of an eager iteration in which the device waits, "flops" and "bandwidth".
    """
    if not (file := read_stored("host", say)):
        return pd.DataFrame()
    rows = [(file["hardware"], name, *row) for name, way in file["figures"].items() for row in _measured(way)]
    eager = file["figures"]["eager"]["ms_per_iteration"]
    for name, (flops, moved, _) in SHEETS.items():
        cost = ProfileCost(profile_of(name), load_spec(MODEL))
        rows += [
            (name, load, "idle", 0.0, max(1 - 1e3 * cost.predict(shape) / eager, 0.0)) for load, shape in LOADS.items()
        ]
        rows += [(name, "data sheet", "flops", 0.0, flops), (name, "data sheet", "bandwidth", 0.0, moved)]
    return add_provenance(pd.DataFrame(rows, columns=["hardware", "series", "what", "begin", "value"]), file)


def _measured(way: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    yield "iteration", 0.0, way["ms_per_iteration"]
    yield from ((kind, 0.0, milliseconds) for kind, milliseconds in way["host_ms"].items())
    yield DEVICE, 0.0, way["device_ms"]
    yield from ((f"span {what}", begin, milliseconds) for begin, milliseconds, what in way["lanes"])


def device_share(data: pd.DataFrame, hardware: str, way: str) -> float:
    """Share of an iteration, without a profiler, in which the device runs kernels."""
    return value(data, hardware=hardware, series=way, what=DEVICE) / value(
        data, hardware=hardware, series=way, what="iteration"
    )


def host_work(data: pd.DataFrame, hardware: str, way: str) -> float:
    """Milliseconds per iteration in which the host does not wait, under a profiler."""
    return sum(value(data, hardware=hardware, series=way, what=kind) for kind in KINDS if kind != WAIT)


def least_growth(data: pd.DataFrame, load: str) -> float:
    """The least growth of the device's wait from one data sheet to the next."""
    return float(select(data, series=load, what="idle")["value"].diff().min())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Above, two milliseconds of an iteration, eager and with graphs; below, the host's time by kind, and the device's waits by generation."""
    figure = plt.figure(figsize=(PAGE, 4.6), layout="constrained")
    rows: list[Any] = [*([way, way] for way in TIMELINES), ["kinds", "generations"]]
    axes = figure.subplot_mosaic(rows, height_ratios=[1, 1, 2.6])
    styles = {kind: fill_style(index) for index, kind in enumerate(KINDS)}
    for way in TIMELINES:
        panel = axes[way]
        lane_axes(panel, [DEVICE, "host"], 0, SHOWN_MS)
        for what, style in {**styles, DEVICE: {"facecolor": "#009E73"}}.items():
            spans = select(data, series=way, what=f"span {what}")
            draw_spans(
                panel, what != DEVICE, zip(spans["begin"], spans["value"], strict=True), **style | {"linewidth": 0}
            )
        panel.set_title(f"{way}, {data['hardware'].iloc[0]}, under a profiler")
    panel.set_xlabel("time from the beginning of an iteration [ms]")
    _draw_kinds(axes["kinds"], data)
    shares = 100 * pivot(select(data, what="idle"), "hardware")
    for index, load in enumerate(shares):
        axes["generations"].plot(range(len(shares)), shares[load], label=load, **line_style(index))
    axes["generations"].set_xticks(range(len(shares)), [name.replace(" ", "\n") for name in shares.index])
    axes["generations"].set(
        title="eager: device waits for the host", ylabel="share of the iteration [%]", ylim=(0, 100)
    )
    axes["generations"].legend()
    return figure


def _draw_kinds(panel: Axes, data: pd.DataFrame) -> None:
    table = pivot(data[data["what"].isin(KINDS)], "series", "what").reindex(columns=list(KINDS))
    stacked_bars(panel, range(len(table)), table)
    for place, way in enumerate(table.index):
        panel.plot(
            [place - 0.4, place + 0.4], [value(data, series=way, what="iteration")] * 2, color="black", linewidth=1.2
        )
    panel.set_xticks(range(len(table)), table.index)
    panel.set(title="host's time; line: without a profiler", ylabel="ms per iteration")
    panel.legend()
