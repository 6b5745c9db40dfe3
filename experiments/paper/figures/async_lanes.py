"""Activity lanes and totals of the asynchronous-batching post (Hugging Face, May 2026), beside ours, simulated and measured.

The post: an 8B model, batch 32, 8K generated tokens; 300.6 s with the GPU active 76.0% of the time synchronously, 234.5 s and
99.4% asynchronously. Simulated: host and device time of an iteration are those of the post's synchronous run; what the
asynchronous loop makes of them is the prediction. Measured: `python -m experiments.bench async`, on a host that has far less to
do; active is the share of a profiled window in which kernels or copies run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cbatch import BatchShape, Engine, Limits, Request, RunRecord
from cbatch.sim.executor import SimExecutor
from experiments.paper.claims import Claim
from experiments.paper.machines import Machines
from experiments.paper.measured import FOLDER, left_out, stamped
from experiments.plots.style import DECODE, HOST, IDLE, PAGE
from experiments.plots.style import printed as page
from policies.prefill_first import PrefillFirst

SECONDS, ACTIVE, BATCH, PROMPT, NEW = 300.6, 0.760, 32, 256, 8192  # of the post's synchronous run; the prompt is ours
FIRST, SHOWN = 100, 5  # iterations that the simulated lanes show
LOOPS = ("sync", "async")
POST, SIMULATED = "post", "simulated"
COLOURS = {"host": HOST, "wait": IDLE, "device": DECODE}
TIMES = ("planned_at", "launched_at", "waited_at", "received_at", "done_at", "started", "ended")


class Always:
    """Every iteration takes the same time on the device."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def predict(self, shape: BatchShape) -> float:
        return self.seconds


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware ("simulated", or the GPU), series (the loop), what, begin, value.

    what: "host" (plan, launch, absorb), "wait" or "device", from `begin` for `value` milliseconds; or "seconds" of the whole
    run and "active", the device's share of them.
    """
    rows: list[tuple[Any, ...]] = []
    for loop in LOOPS:
        say(f"simulated, {loop}")
        rows += [(SIMULATED, loop, *row) for row in _simulated(loop == "async")]
    file, runs = longest_run(FOLDER)
    if not runs:
        say(f"{left_out('async')}: simulation alone")
    for loop, run in runs.items():
        measured = [
            ("seconds", 0.0, run["seconds"]["median"]),
            ("active", 0.0, run["kernel_share"]),
            *_lanes(run["lanes"]),
        ]
        rows += [(file["hardware"], loop, *row) for row in measured]
    data = pd.DataFrame(rows, columns=["hardware", "series", "what", "begin", "value"])
    return stamped(data, file) if runs else data


def _simulated(asynchronous: bool) -> Iterator[tuple[str, float, float]]:
    device, host = (share * SECONDS / NEW for share in (ACTIVE, 1 - ACTIVE))
    cost = Always(device)
    engine = Engine(
        PrefillFirst(),
        SimExecutor(cost, host),
        Limits(BATCH, BATCH * PROMPT, PROMPT + NEW),
        cost,
        num_blocks=BATCH,
        block_size=PROMPT + NEW,
        asynchronous=asynchronous,
    )
    engine.submit(Request(index, PROMPT, NEW) for index in range(BATCH))
    record: RunRecord = engine.run()
    seconds = record.steps[-1].done_at - record.steps[0].planned_at
    yield "seconds", 0.0, seconds
    yield "active", 0.0, sum(step.ended - step.started for step in record.steps) / seconds
    steps = record.steps[FIRST : FIRST + SHOWN + 4]
    yield from _lanes([{name: 1e3 * getattr(step, name) for name in TIMES} for step in steps])


def _lanes(steps: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, float, float]]:
    """(what, begin, milliseconds), from the start of the first iteration on the device; all times in milliseconds."""
    origin = steps[0]["started"]
    for step in steps:
        for what, begin, end in (
            ("wait", "waited_at", "received_at"),
            ("host", "planned_at", "launched_at"),
            ("host", "received_at", "done_at"),
            ("device", "started", "ended"),
        ):
            yield what, step[begin] - origin, step[end] - step[begin]


def longest_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file that has both loops for the longest outputs, and their figures; nothing if none has."""
    longest, file, runs = 0, dict[str, Any](), dict[str, Any]()
    for path in sorted(folder.glob("async*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, loops in found["figures"].items():
            if set(LOOPS) <= set(loops) and int(name.split()[0]) > longest:
                longest, file, runs = int(name.split()[0]), found, {loop: loops[loop] for loop in LOOPS}
    return file, runs


def of(data: pd.DataFrame, hardware: str, loop: str, what: str) -> float:
    """Seconds, or active share, of one run."""
    shown = data[(data["hardware"] == hardware) & (data["series"] == loop) & (data["what"] == what)]
    return float(shown["value"].iloc[0])


def gain(data: pd.DataFrame, hardware: str) -> float:
    """Throughput of the asynchronous loop over the synchronous one's."""
    return of(data, hardware, "sync", "seconds") / of(data, hardware, "async", "seconds")


def hidden(data: pd.DataFrame, hardware: str) -> float:
    """Share of the synchronous loop's time without a kernel that the asynchronous loop takes away."""
    idle = [of(data, hardware, loop, "seconds") * (1 - of(data, hardware, loop, "active")) for loop in LOOPS]
    return 1 - idle[1] / idle[0]


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Lanes above, simulated and measured; below, how long a whole run takes, the post's as printed."""
    machines = list(dict.fromkeys(data["hardware"]))
    lanes: list[Any] = [[f"{loop}, {hardware}" for hardware in machines] for loop in LOOPS]
    with page():
        figure = plt.figure(figsize=(PAGE, 4.0))
        axes = figure.subplot_mosaic([*lanes, ["totals"] * len(machines)], height_ratios=[1, 1, 1.9])
        for hardware in machines:
            shown = data[data["hardware"] == hardware]
            for loop in LOOPS:
                panel = axes[f"{loop}, {hardware}"]
                _draw_lanes(panel, shown[shown["series"] == loop], _width(shown))
                panel.set_title(f"{loop}, {hardware}", loc="left")
            panel.set_xlabel("time [ms]")
        _draw_totals(axes["totals"], _totals(data, machines, printed))
        figure.legend(
            handles=[
                Patch(color=DECODE, label="device computes"),
                Patch(color=HOST, label="host plans, launches, absorbs"),
                Patch(facecolor=IDLE, edgecolor="#999999", label="host waits; device idle"),
            ],
            loc="outside upper center",
            ncols=3,
        )
    return figure


def _width(shown: pd.DataFrame) -> float:
    """Milliseconds to show: `SHOWN` iterations of the loop that takes longer."""
    device = shown[shown["what"] == "device"].groupby("series")["begin"]
    return float(device.apply(lambda begins: begins.sort_values().iloc[min(SHOWN, len(begins) - 1)]).max())


def _draw_lanes(panel: Axes, shown: pd.DataFrame, width: float) -> None:
    for what, colour in COLOURS.items():
        spans = shown[shown["what"] == what]
        edge = "white" if what == "device" else "#999999" if what == "wait" else "none"
        panel.broken_barh(
            list(zip(spans["begin"], spans["value"], strict=True)),
            (-0.4 if what == "device" else 0.6, 0.8),
            facecolors=colour,
            edgecolors=edge,
            linewidth=0.4,
        )
    panel.set_xlim(0, width)
    panel.set_ylim(-0.6, 1.6)
    panel.set_yticks([1, 0], ["host", "device"])
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)


def _totals(
    data: pd.DataFrame, machines: Sequence[str], printed: Sequence[Claim]
) -> list[tuple[str, str, float, float]]:
    """(who, loop, seconds, active share), the post's first."""
    post = {
        (claim.setting["loop"], claim.setting["what"]): claim.printed
        for claim in printed
        if claim.quantity == "of" and claim.hardware == SIMULATED and claim.printed is not None
    }
    rows = [(POST, loop, post[loop, "seconds"], post[loop, "active"]) for loop in LOOPS if (loop, "seconds") in post]
    return rows + [
        (who, loop, of(data, who, loop, "seconds"), of(data, who, loop, "active")) for who in machines for loop in LOOPS
    ]


def _draw_totals(panel: Axes, rows: Sequence[tuple[str, str, float, float]]) -> None:
    """Bars over the synchronous total of each, split by whether the device is active; the post's with a dashed frame."""
    whole = {who: seconds for who, loop, seconds, _ in rows if loop == "sync"}
    for place, (who, _, seconds, active) in enumerate(reversed(rows)):
        length = 100 * seconds / whole[who]
        panel.barh(place, length * active, color=DECODE)
        panel.barh(
            place, length * (1 - active), left=length * active, facecolor=IDLE, edgecolor="#999999", linewidth=0.4
        )
        if who == POST:
            panel.barh(place, length, facecolor="none", edgecolor="black", linewidth=1.0, linestyle=(0, (3, 2)))
        panel.text(length + 0.7, place, f"{seconds:.1f} s, device active {active:.1%}", va="center", fontsize=7)
    panel.set_yticks(range(len(rows)), [f"{who}, {loop}" for who, loop, *_ in reversed(rows)])
    panel.set_xlim(0, 128)
    panel.set_xticks(range(0, 101, 20))
    panel.set_xlabel("time of the whole run [% of the synchronous one]")
