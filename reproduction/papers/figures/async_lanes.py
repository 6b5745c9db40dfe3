"""Lanes and totals of the asynchronous-batching post (Hugging Face, May 2026), beside ours, simulated and measured.

The post: an 8B model, batch 32, 8K generated tokens; 300.6 s with the GPU active 76.0% of the time synchronously, 234.5
s and 99.4% asynchronously. Simulated: host and device time of an iteration are those of the post's synchronous run; the
gain of the asynchronous loop is the prediction. Measured: `python -m reproduction.bench async`, on a host that has far
less to do; active is the share of a profiled window in which kernels or copies run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cbatch import CostFunction, KVSize, Limits, Request, Server
from cbatch.sim import SimExecutor
from experiments.plots.parts import draw_spans, lane_axes
from experiments.plots.style import DECODE, HOST, IDLE, PAGE
from policies.prefill_first import PrefillFirst
from reproduction.papers.claims import Claim
from reproduction.papers.frames import add_provenance, read_stored, select
from reproduction.papers.machines import Machines
from reproduction.papers.quantities import value

SECONDS, ACTIVE, BATCH, PROMPT, NEW = 300.6, 0.760, 32, 256, 8192  # of the post's synchronous run; the prompt is ours
FIRST, SHOWN = 100, 5  # iterations in the simulated lanes
LOOPS = ("sync", "async")
POST, SIMULATED = "post", "simulated"
FILLS: dict[str, dict[str, Any]] = {
    "device": {"label": "device computes", "facecolor": DECODE, "edgecolor": "white"},
    "host": {"label": "host plans, launches, absorbs", "facecolor": HOST, "edgecolor": "none"},
    "wait": {"label": "host waits; device idle", "facecolor": IDLE, "edgecolor": "#999999"},
}
TIMES = ("planned_at", "launched_at", "waited_at", "received_at", "done_at", "started", "ended")


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: hardware ("simulated", or the GPU), series (the loop), what, begin, value.

    what: "host" (plan, launch, absorb), "wait" or "device", from `begin` for `value` milliseconds; or "seconds" of the
    whole run and "active", the device's share of them.
    """
    rows: list[tuple[Any, ...]] = []
    for loop in LOOPS:
        say(f"simulated, {loop}")
        rows += [(SIMULATED, loop, *row) for row in _simulate(loop == "async")]
    file = read_stored("async", say)
    for loop in LOOPS if file else ():
        run = file["figures"][f"{NEW} new"][loop]
        totals = [("seconds", 0.0, run["seconds"]["median"]), ("active", 0.0, run["kernel_share"])]
        rows += [(file["hardware"], loop, *row) for row in (*totals, *_lanes(run["lanes"]))]
    data = pd.DataFrame(rows, columns=["hardware", "series", "what", "begin", "value"])
    return add_provenance(data, file) if file else data


def _simulate(asynchronous: bool) -> Iterator[tuple[str, float, float]]:
    device, host = (share * SECONDS / NEW for share in (ACTIVE, 1 - ACTIVE))
    cost = CostFunction(lambda shape: device)
    limits, kv = Limits(BATCH, BATCH * (PROMPT + NEW), PROMPT + NEW), KVSize(BATCH, PROMPT + NEW)
    server = Server(SimExecutor(cost, host), limits, cost, kv, asynchronous)
    record = server.serve(PrefillFirst(), (Request(index, PROMPT, NEW) for index in range(BATCH)))
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


def hidden(data: pd.DataFrame, hardware: str) -> float:
    """Share of the synchronous loop's time without a kernel that the asynchronous loop removes."""
    (seconds, active), (seconds_async, active_async) = (_run(data, hardware, loop) for loop in LOOPS)
    return 1 - seconds_async * (1 - active_async) / (seconds * (1 - active))


def _run(data: pd.DataFrame, hardware: str, loop: str) -> tuple[float, float]:
    """Seconds and active share of one run."""
    seconds, active = (value(data, hardware=hardware, series=loop, what=what) for what in ("seconds", "active"))
    return seconds, active


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """Lanes above, simulated and measured; below, the time of a whole run, the post's as printed."""
    machines = list(dict.fromkeys(data["hardware"]))
    lanes: list[Any] = [[f"{loop}, {hardware}" for hardware in machines] for loop in LOOPS]
    figure = plt.figure(figsize=(PAGE, 4.0), layout="constrained")
    axes = figure.subplot_mosaic([*lanes, ["totals"] * len(machines)], height_ratios=[1, 1, 1.9])
    for hardware in machines:
        shown = select(data, hardware=hardware)
        begins = select(shown, what="device").groupby("series")["begin"]
        width = begins.apply(lambda times: times.sort_values().iloc[min(SHOWN, len(times) - 1)]).max()
        for loop in LOOPS:
            panel = axes[f"{loop}, {hardware}"]
            lane_axes(panel, ["device", "host"], 0, float(width))  # of `SHOWN` iterations of the longer loop
            for what in reversed(FILLS):
                spans = select(shown, series=loop, what=what)
                draw_spans(panel, what != "device", zip(spans["begin"], spans["value"], strict=True), **FILLS[what])
            panel.set_title(f"{loop}, {hardware}")
        panel.set_xlabel("time [ms]")
    _draw_totals(axes["totals"], _totals(data, machines, printed))
    figure.legend(handles=[Patch(**fill) for fill in FILLS.values()], loc="outside upper center", ncols=3)
    return figure


def _totals(
    data: pd.DataFrame, machines: Sequence[str], printed: Sequence[Claim]
) -> list[tuple[str, str, float, float]]:
    """(run, loop, seconds, active share), the post's first."""
    post = {
        (claim.setting["series"], claim.setting["what"]): claim.printed
        for claim in printed
        if claim.quantity == value.__name__ and claim.hardware == SIMULATED and claim.printed is not None
    }
    rows = [(POST, loop, post[loop, "seconds"], post[loop, "active"]) for loop in LOOPS if (loop, "seconds") in post]
    return rows + [(name, loop, *_run(data, name, loop)) for name in machines for loop in LOOPS]


def _draw_totals(panel: Axes, rows: Sequence[tuple[str, str, float, float]]) -> None:
    """Bars relative to each synchronous run, split by whether the device is active; the post's with a dashed frame."""
    whole = {name: seconds for name, loop, seconds, _ in rows if loop == "sync"}
    idle: dict[str, Any] = {"facecolor": IDLE, "edgecolor": "#999999", "linewidth": 0.4}
    for place, (name, _, seconds, active) in enumerate(reversed(rows)):
        length = 100 * seconds / whole[name]
        panel.barh(place, length * active, color=DECODE)
        panel.barh(place, length * (1 - active), left=length * active, **idle)
        if name == POST:
            panel.barh(place, length, facecolor="none", edgecolor="black", linewidth=1.0, linestyle=(0, (3, 2)))
        panel.text(length + 0.7, place, f"{seconds:.1f} s, device active {active:.1%}", va="center", fontsize=7)
    panel.set_yticks(range(len(rows)), [f"{name}, {loop}" for name, loop, *_ in reversed(rows)])
    panel.set(xlim=(0, 128), xticks=range(0, 101, 20), xlabel="time of the whole run [% of the synchronous one]")
    panel.grid(visible=False)
