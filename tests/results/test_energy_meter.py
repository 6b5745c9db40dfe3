"""Measured energy: the readings of counters, what of them lies in the measured part, and runs without a counter."""

import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cbatch.results.metrics import Window
from cbatch.results.utilisation import energy_figures, measured_energy
from cbatch.runtime.gpu import energy
from cbatch.runtime.gpu.energy import EnergyMeter, nvml_counters
from experiments.api import Result, serve
from experiments.plots import composition
from experiments.settings.backends import Cpu


def test_energy_is_read_between_readings_by_hand() -> None:
    """From 0.5 to 2 s: the first GPU goes from 250 to 700 J, the second from 25 to 150 J; of 15 tokens."""
    readings = np.array([(0.0, 100.0, 0.0), (1.0, 400.0, 50.0), (3.0, 1000.0, 250.0)])
    joules = measured_energy(readings, window := Window(0.5, 2.0))
    assert joules == pytest.approx(450 + 125)
    figures = energy_figures(joules, window, generated=15)
    assert figures == pytest.approx({"joules": 575, "watts": 575 / 1.5, "joules_per_token": 575 / 15})


def run_with(counters: Sequence[Callable[[], float]], monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Result:
    def meter(backend: Cpu, executors: Sequence[Any], now: Callable[[], float]) -> EnergyMeter:
        assert len(executors) == len(counters), "one executor for each replica"
        return EnergyMeter(lambda: counters, now, period=0.005)

    monkeypatch.setattr(Cpu, "meter", meter)
    few: dict[str, Any] = {"requests": 12, "length": 48, "pd_ratio": 3, "batch": 4, "chunk": 16, "model": "tiny"}
    return serve("sarathi", backend="cpu", **few, **keys)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_real_run_has_the_energy_of_its_measured_part(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of constant power, 200 and 100 W: joules follow from the seconds. The counters do not begin at 0."""
    power = (200.0, 100.0)[:replicas]
    counters = [lambda watts=watts: 5e6 + watts * perf_counter() for watts in power]
    run = run_with(counters, monkeypatch, replicas=replicas, output=tmp_path / "run", metrics={"warmup_requests": 4})
    seconds, found = run.summary["run"]["counted_seconds"], run.summary["energy"]
    assert seconds < run.steps["received_at"].max(), "the warm-up is left out"
    assert found["watts"] == pytest.approx(sum(power), rel=1e-3)
    assert found["joules"] == pytest.approx(sum(power) * seconds, rel=1e-3)
    rate = run.summary["throughput"]["decode_tokens_per_second"]
    assert found["joules_per_token"] == pytest.approx(sum(power) / rate, rel=1e-3)
    table = pd.read_csv(tmp_path / "run" / "energy.csv")
    assert list(table) == ["time", *(f"joules_{gpu}" for gpu in range(replicas))] and (table.iloc[0, 1:] == 0).all()
    assert table["time"].iloc[0] < 0.01 and table["time"].iloc[-1] > run.steps["done_at"].max() - 0.01
    assert run.summary["about"]["energy"]["readings"] == len(table) and "J per output token" in str(run)
    drawn = composition.draw(tmp_path / "run").axes
    panels = [panel for panel in drawn if panel.get_ylabel() == "power [W]"] or [drawn[3 * replicas]]
    shown = [float(np.median(panel.get_lines()[0].get_ydata())) for panel in drawn[3 * replicas :]]
    assert len(panels) == 1 and shown == pytest.approx(power, rel=0.1), "a column for each replica"


def test_a_counter_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = count()

    def fail() -> float:
        if next(reads) == 2:
            raise RuntimeError("GPU is lost")
        return 1.0

    run = run_with([fail], monkeypatch)
    problem = "an energy counter could not be read: GPU is lost"
    assert "energy" not in run.summary and run.summary["about"]["energy"] == {"unknown": problem}
    assert f"not measured: {problem}" in str(run) and len(run.requests) == 12


def test_counters_of_nvml_are_those_of_the_gpus_in_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts millijoules, and numbers GPUs in its own way: PyTorch's are found by UUID."""
    millijoules = {"GPU-b": 7_000, "GPU-a": 2_500}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=millijoules.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert [read() for read in nvml_counters(["a", "b"])] == [2.5, 7.0]
    meter = EnergyMeter(lambda: nvml_counters(["c"]), perf_counter)
    with meter:
        assert meter.problem.startswith("an energy counter could not be read")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with EnergyMeter(lambda: nvml_counters(["a"]), perf_counter) as meter:
        pass
    assert "install nvidia-ml-py" in meter.problem and not meter.readings


def test_readings_of_a_long_run_get_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "MOST_READINGS", 8)
    with EnergyMeter(lambda: [perf_counter], perf_counter, period=0.001) as meter:
        sleep(0.1)
    times = [time for time, _ in meter.readings]
    assert len(times) <= 9 + 1 and times == sorted(times) and times[-1] - times[0] >= 0.1
