"""The power of a GPU, fitted to runs whose joules are known."""

from time import perf_counter

import pytest

from cbatch.runtime.gpu.energy import EnergyMeter
from cbatch.sim.profile import Watts
from reproduction.validation import power
from reproduction.validation.power import FITTED, JUDGED, fit, judge, measure, simulate

TRUE = Watts(95.0, 250.0, 5e-11, 1.6e-12, 700.0)


def test_a_known_power_is_found_in_the_runs_to_be_fitted() -> None:
    """The runs tell idle time, bytes and operations apart, also where some of them are limited; judged runs follow."""
    runs = {name: simulate(case, "h200") for name, case in {**FITTED, **JUDGED}.items()}
    runs = {name: run._replace(joules=run.predict(TRUE)) for name, run in runs.items()}
    found = fit([runs[name] for name in FITTED], TRUE.idle)
    for name in ("busy", "joules_per_byte", "joules_per_flop"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    figures, table = judge(runs, found, {name: runs[name] for name in JUDGED}, None)
    assert all(abs(error) < 1e-3 for of_run in figures.values() for error in of_run["errors"].values())
    assert len(table) == len(FITTED) + len(JUDGED)


def test_each_run_is_metered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with a counter of 300 W: joules follow from each run's own seconds, and a pause takes 300 W, too."""
    monkeypatch.setattr(power, "PAUSE", 1.2)
    cases = {name: f"policy={name} workload.num_requests=4 workload.length=48" for name in ("orca", "sarathi_serve")}
    done, idle = measure(
        "backend=cpu",
        lambda run: EnergyMeter(lambda: [lambda: 300 * perf_counter()], run.engine.now, period=0.01),
        cases,
        "model=tiny batch=4 workload.pd_ratio=3",
    )
    assert idle == pytest.approx(300, rel=1e-3)
    for run in done.values():
        assert run.joules == pytest.approx(300 * run.seconds, rel=0.01) and run.tokens == 4 * 12
