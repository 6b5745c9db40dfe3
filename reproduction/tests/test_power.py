"""The power of a GPU, fitted to runs whose joules are known."""

import json
from dataclasses import astuple
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from cbatch.runtime.gpu.energy import EnergyMeter
from cbatch.sim import load_profile
from cbatch.sim.profile import Watts
from reproduction.validation import energy, power
from reproduction.validation.energy import (
    PROMPT_MEAN,
    QWEN,
    ROWS,
    Row,
    engine,
    lengths,
    metered,
    per_request,
    sampling,
    simulated,
)
from reproduction.validation.power import COMMON, FITTED, JUDGED, fit, judge, measure, simulate

TRUE = Watts(95.0, 250.0, 5e-11, 1.6e-12, 700.0)


@pytest.mark.long
def test_a_known_power_is_found_in_the_runs_to_be_fitted() -> None:
    """The runs tell idle time, bytes and operations apart, also where some of them are limited; judged runs follow."""
    runs = {name: simulate(case, "h200", f"model=llama-3.1-8b {COMMON}") for name, case in {**FITTED, **JUDGED}.items()}
    runs = {name: run._replace(joules=run.predict(TRUE)) for name, run in runs.items()}
    found = fit([runs[name] for name in FITTED], TRUE.idle)
    for name in ("busy", "joules_per_byte", "joules_per_flop"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    figures, table = judge(runs, found, {name: runs[name] for name in JUDGED}, None)
    assert all(abs(error) < 1e-3 for of_run in figures.values() for error in of_run["errors"].values())
    assert len(table) == len(FITTED) + len(JUDGED)


@pytest.mark.long
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


def test_the_time_per_request_is_found_by_hand() -> None:
    """Gaps of 2 and 5 ms lack 1 ms of 10 requests and 4 ms of 40: 0.1 ms each, whatever their weights."""
    rows = (Row(10, 0.0, 0.0, 3.0, 0.0, 0.0), Row(40, 0.0, 0.0, 9.0, 0.0, 0.0))
    assert per_request(rows, [2.0, 5.0]) == pytest.approx(1e-4)
    assert per_request(rows, [2.0, 1.0]) == pytest.approx(1e-3 * (10 / 9 + 8 * 40 / 81) / (100 / 9 + 1600 / 81))


def test_outputs_are_as_long_as_the_benchmarks() -> None:
    """Llama's rows have 389 to 405 tokens on average, Qwen3-8B's 641 to 660."""
    for model, least, most in (("llama-3.1-8b", 389, 405), ("qwen3-8b", 641, 660)):
        rows = [row.split(",") for row in lengths(model, 50_000).splitlines()[1:]]
        prompts, outputs = np.array(rows, int).T
        assert least < outputs.mean() < most and outputs.max() <= 4096
        assert prompts.mean() == pytest.approx(PROMPT_MEAN, rel=0.03)


def test_an_engine_has_the_graphs_of_its_batch_and_no_launches_of_the_profiles_host() -> None:
    """Beside prompts 192 tokens take 8.9752 ms and 256 take 9.6685: 8 more add 0.0867 ms, to decodes alone, too."""
    tables, ours = (
        profile.models["llama-3.1-8b"].tensor_parallel[1] for profile in (engine(8, 0.0), load_profile("h100"))
    )
    assert tables.captured_graphs and tables.captured_graphs.tokens == (1, 2, 4, 8, 16)
    assert tables.without_prompts and tables.linear and ours.linear and ours.other
    decodes = tables.without_prompts.linear
    assert decodes.at(241) == decodes.at(248) == pytest.approx(decodes.at(240) + 8 * (9.6685e-3 - 8.9752e-3) / 64)
    longer = ours.linear.at(640) + ours.other.at(640) - ours.linear.at(512) - ours.other.at(512)
    assert tables.linear.at(640) == pytest.approx(14.375e-3 + longer)
    assert tables.linear.at(576) == pytest.approx(14.375e-3 + longer / 2)  # vLLM does not pad 576 tokens to 640


def test_sampling_costs_what_was_measured_and_more_where_memory_is_slower(tmp_path: Path) -> None:
    """One request alone is the GPU's latency, 0.3 ms; of what 101 take beyond that, 1.0 ms, each byte takes 4.218 / 2.906 times as long."""
    seconds = [{"top-p": 2e-4, "penalties 1024 1024": 1e-4}, {"top-p": 9e-4, "penalties 1024 1024": 4e-4}]
    rows = [{"vocabulary": 128256, "requests": n, "seconds": each} for n, each in zip((1, 101), seconds, strict=True)]
    rows.append({"vocabulary": 151936, "requests": 51, "seconds": {"top-p": 1.0, "penalties 1024 1024": 1.0}})
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "sampling.json").write_text(json.dumps({"rows": rows}))
    found = sampling("llama-3.1-8b", str(tmp_path))
    assert found.at(1) == pytest.approx(3e-4) and found.at(101) == pytest.approx(3e-4 + 1e-3 * 4.218163 / 2.906341)
    assert found.at(51) == pytest.approx((found.at(1) + found.at(101)) / 2)


def test_another_model_takes_more_by_what_it_takes_more_in_its_own_measurements() -> None:
    """On an H100, 64 decodes of Qwen3-8B take 5.4277 + 0.4823 ms and its small operations, Llama 5.3295 + 0.40047. Its 36 layers read 36/32 of the context."""
    qwen, llama = (engine(64, 0.0, model).models[model].tensor_parallel[1] for model in ("qwen3-8b", "llama-3.1-8b"))
    ours = [load_profile("h100").models[model].tensor_parallel[1].decode_only for model in ("qwen3-8b", "llama-3.1-8b")]
    assert qwen.decode_only and llama.decode_only and qwen.decodes and llama.decodes and ours[0] and ours[1]
    small = ours[0].other.at(64) - ours[1].other.at(64)
    more = qwen.decode_only.linear.at(64) - llama.decode_only.linear.at(64)
    assert more == pytest.approx(1e-3 * (5.4277 + 0.4823 - 5.3295 - 0.40047) + small)
    assert qwen.decodes.at(64, 1000) == pytest.approx(36 / 32 * llama.decodes.at(64, 1000))


@pytest.mark.long
def test_rows_that_nothing_was_fitted_to_are_near() -> None:
    """ML.ENERGY's rows of up to five times the requests of the fitted ones, and Qwen3-8B's. The power of the profiles is that of the fitted rows."""
    seconds = per_request(energy.FITTED, [simulated(row.batch)[0] for row in energy.FITTED])
    assert seconds < 10e-6  # beside what choosing tokens takes, 27 to 75 us
    watts = load_profile("h100").watts
    found = fit([metered(row, seconds) for row in energy.FITTED], 100.0)
    assert (
        watts and watts == load_profile("h100-vllm").watts and astuple(watts) == pytest.approx(astuple(found), rel=1e-3)
    )
    for row in ROWS[5::2]:
        gap, p90, _, joules, power = simulated(row.batch, seconds)
        assert gap == pytest.approx(row.gap, rel=0.05) and joules == pytest.approx(row.figures[-1], rel=0.05)
        assert p90 == pytest.approx(row.p90, rel=0.1 if row.batch != 256 else 0.13)
        assert power == pytest.approx(row.watts, rel=0.03)
    for row in QWEN:
        if row.batch in (16, 512):
            gap, p90, *_ = simulated(row.batch, seconds, "qwen3-8b")
            assert gap == pytest.approx(row.gap, rel=0.05) and p90 == pytest.approx(row.p90, rel=0.1)
