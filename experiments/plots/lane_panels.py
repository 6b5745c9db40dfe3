"""Data of a picture of lanes: the iterations of finished runs, or those that the `async` benchmark has kept."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from cbatch import ConfigError
from experiments.store.tables import load_copies, load_steps

BENCHMARK = "async.json"


class Panel(NamedTuple):
    """The lanes of one run.

    steps: rows of `cbatch.record.StepRecord`, in seconds, including some before and after the window if there are any.
        With the columns of `cbatch.executor.CopyTimes` if copies were timed.
    begin, end: start of the first iteration shown and end of the last, on the device.
    host_share, device_share: share of the whole run in which the host works and the device computes.
    """

    name: str
    steps: pd.DataFrame
    begin: float
    end: float
    host_share: float
    device_share: float


def read_runs(frame: pd.DataFrame, first: int, iterations: int) -> list[Panel]:
    """Panels of finished runs, rows of `experiments.store.tables.load` with a label.

    Raises:
        ConfigError: a run ended before `first`.
    """
    panels = []
    for _, run in frame.iterrows():
        label = str(run["label"])
        name = label if "runtime" in label else f"{label}, {run['runtime']}"
        shares = run["iterations.host_active_share"], run["iterations.device_active_share"]
        panels.append(Panel(name, *_window(str(run["folder"]), first, iterations), *shares))
    return panels


def read_benchmark(folder: Path, which: str = "") -> tuple[list[Panel], dict[str, Any]]:
    """Panels of a folder of benchmark results, the synchronous loop above the asynchronous one, and the file's content.

    The last two iterations are left out: while the device computes them, the host works on iterations that were not
        kept.

    Args:
        which: draw the first of the batches whose name contains this, preferring one that has both loops.

    Raises:
        ConfigError: no such batch.
    """
    measured = json.loads((folder / BENCHMARK).read_text(encoding="utf-8"))
    batches = {name: figures for name, figures in measured["figures"].items() if which in name}
    if not batches:
        raise ConfigError(f"runs={which}: {folder / BENCHMARK} has {', '.join(measured['figures'])}; choose one")
    name = max(batches, key=lambda name: len({"sync", "async"} & set(batches[name])))
    panels = [_loop_panel(loop, batches[name][loop]) for loop in ("sync", "async") if loop in batches[name]]
    return panels, {**measured, "batch_name": name}


def _loop_panel(loop: str, figures: dict[str, Any]) -> Panel:
    steps = pd.DataFrame(figures["lanes"]) / 1e3  # to seconds
    steps = steps.assign(iteration=range(len(steps)), num_prefill_tokens=0)  # the window begins after the prompts
    shown = steps.iloc[: max(len(steps) - 2, 1)]
    milliseconds = figures["ms_per_iteration"]["median"]
    host = figures["host_ms_per_iteration"]["median"] / milliseconds
    begin, end = float(shown["started"].iloc[0]), float(shown["ended"].iloc[-1])
    name = f"{loop}: {figures['seconds']['median']:.2f} s, {milliseconds:.2f} ms per iteration"
    return Panel(name, steps, begin, end, host, figures["active_share"]["median"])


def _window(folder: str, first: int, iterations: int) -> tuple[pd.DataFrame, float, float]:
    """All iterations of a run, and the seconds when the shown ones begin and end on the device."""
    copies = load_copies(folder)
    steps = load_steps(folder) if copies.empty else load_steps(folder).join(copies)
    shown = steps[(steps["iteration"] >= first) & (steps["iteration"] < first + iterations)]
    if shown.empty:
        asked = f"first={first} iterations={iterations}"
        raise ConfigError(f"{asked}: {folder} has iterations 0 to {len(steps) - 1}; choose among them")
    return steps, float(shown["started"].iloc[0]), float(shown["ended"].iloc[-1])
