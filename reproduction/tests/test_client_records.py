"""`reproduction.profiles records=...`: a server's speed from what its clients recorded."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from cbatch.sim import Profile, load_profile
from cbatch.sim.profile import Card
from cbatch.sim.profile_file import profile_text
from experiments.api import simulate
from experiments.settings.settings import Settings
from reproduction.profiles import client_records
from reproduction.profiles.__main__ import main
from reproduction.profiles.client_records import END_TO_END, TPOT, TTFT, read_records

DELAY = 0.03
SERVER = ["hardware=h100", "policy=vllm_v1", "batch=16", "chunk=512"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on a card that is slower in prompts and faster in decodes, and bench.json of its clients."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "slow.json").write_text(profile_text(replace(load_profile("h100"), card=Card("slow", 1.12, 0.94))))
    keys = {
        "hardware": str(folder / "slow.json"),
        "batch": 16,
        "chunk": 512,
        "rate": 12.0,
        "requests": 60,
        "min_length": 64,
        "max_length": 4000,
        "pd_ratio": 10,
    }
    run = simulate("vllm_v1", "open_loop", output=folder / "run", seed=3, **keys).requests
    failed = {"start_times": 0.5, "input_lens": 10, "output_lens": 0, "ttfts": 0.0, "itls": [], "errors": "refused"}
    bench = {key: [value] for key, value in failed.items()}
    for row in run.itertuples():  # in the order of ends, not of arrivals
        gaps = [row.tpot_seconds] * (row.output_tokens - 1)
        values = (row.arrival + 1000, row.prompt_tokens, row.output_tokens, row.ttft_seconds + DELAY, gaps, "")
        for key, value in zip(bench, values, strict=True):
            bench[key].append(value)
    (folder / "bench.json").write_text(json.dumps(bench))
    return folder


@pytest.mark.long
def test_factors_and_delay_are_found_from_the_clients_alone(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_records, "MOST_SIMULATIONS", 14)
    assert main([f"records={records / 'bench.json'}", f"output={tmp_path / 'fitted.json'}", *SERVER]) == 0
    fitted = load_profile(str(tmp_path / "fitted.json")).card
    assert (fitted.prompts, fitted.decodes) == pytest.approx((1.12, 0.94), abs=0.03)
    printed = capsys.readouterr().out
    assert float(printed.rpartition("backend.server_seconds=")[2]) == pytest.approx(DELAY, abs=0.002)
    assert "requests 31 to 60, not fitted" in printed
    _, without, fitted = next(line for line in printed.splitlines() if line.startswith("ttft mean")).split()[2:]
    assert abs(float(fitted.rstrip("%"))) < 2 < abs(float(without.rstrip("%")))


BASE = pd.Series([1.0, 3.0, 2.0, 4.0, 2.0, 6.0, 4.0, 8.0, 5.0])
"""Seconds to the first token of 10, on a card whose factors are 1; the others take 0.01 s each."""


def fit_to(ttft: Sequence[float], tpot: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Path]:
    """Fits a server that needs no simulation to recorded seconds; returns the status of the command and the profile's path."""

    def simulated(settings: Settings, profile: Profile, path: Path, number: int) -> pd.DataFrame:
        first, later = profile.card.prompts * BASE, profile.card.decodes * 0.01
        return pd.DataFrame({TTFT: first, TPOT: later, END_TO_END: first + 9 * later})

    monkeypatch.setattr(client_records, "simulate", simulated)
    bench = {"start_times": [*range(9)], "input_lens": [9] * 9, "output_lens": [10] * 9, "itls": [[tpot] * 9] * 9}
    (folder / "bench.json").write_text(json.dumps({**bench, "ttfts": [*ttft]}))
    path = folder / "fitted.json"
    return main([f"records={folder / 'bench.json'}", f"output={path}", *SERVER]), path


def test_the_first_half_is_fitted_and_the_second_half_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts take 1.2 times as long, and 1.1 times in the second half; decodes 0.9 times; each first token comes 0.5 s later."""
    status, path = fit_to([*(1.2 * BASE[:4] + 0.5), *(1.1 * BASE[4:] + 0.5)], 0.009, tmp_path, monkeypatch)
    card = load_profile(str(path)).card
    assert status == 0 and (card.prompts, card.decodes) == pytest.approx((1.2, 0.9), abs=0.01)
    rows = {line[:16].strip(): line.split()[2:] for line in capsys.readouterr().out.splitlines() if " mean " in line}
    first, last = 1.1 * 5 + 0.5, 1.1 * 5 + 0.5 + 9 * 0.009
    shown = [rows[f"{name} mean"] for name in ("ttft", "end_to_end")]
    assert [float(row[0]) for row in shown] == pytest.approx([first, last], rel=1e-3)
    errors = [float(row[2].rstrip("%")) / 100 for row in shown]
    assert errors == pytest.approx([(1.2 * 5 + 0.5) / first - 1, (1.2 * 5 + 0.5 + 9 * 0.009) / last - 1], abs=0.006)


def test_factors_that_fit_the_first_half_alone_are_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, path = fit_to([*(1.2 * BASE[:4]), *BASE[4:]], 0.01, tmp_path, monkeypatch)
    assert status == 2 and not path.exists()
    assert "predicts the half that was not fitted as well" in capsys.readouterr().err


def test_first_tokens_before_the_simulated_ones_have_no_delay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fit_to(BASE - 0.3, 0.01, tmp_path, monkeypatch)[0] == 0
    assert "server_seconds" not in capsys.readouterr().out


def test_a_run_and_its_clients_have_the_same_records(records: Path) -> None:
    run, clients = read_records(records / "run"), read_records(records / "bench.json")
    assert len(run) == len(clients) == 60  # the failed request is none
    assert run["arrival"][0] == 0 and run["arrival"].is_monotonic_increasing
    for name, delay in (("arrival", 0), ("output_tokens", 0), (TPOT, 0), (TTFT, DELAY), (END_TO_END, DELAY)):
        assert clients[name].to_numpy() == pytest.approx(run[name].to_numpy() + delay, abs=1e-9, nan_ok=True)


def spoil(records: Path, spoiled: Path, numbers: slice, **values: object) -> str:
    """Writes bench.json with other values for some of the requests in order of arrival; returns the option."""
    content = json.loads((records / "bench.json").read_text())
    served = sorted(range(1, len(content["ttfts"])), key=content["start_times"].__getitem__)
    for key, value in values.items():
        for index in served[numbers]:
            content[key][index] = value
    spoiled.write_text(json.dumps(content))
    return f"records={spoiled}"


def test_a_time_of_zero_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single one in each half made every error infinite, so that the factors stayed 1."""
    ttft = 1.2 * BASE
    ttft[[1, 6]] = 0.0
    status, path = fit_to(ttft, 0.009, tmp_path, monkeypatch)
    card = load_profile(str(path)).card
    assert status == 0 and (card.prompts, card.decodes) == pytest.approx((1.2, 0.9), abs=0.01)
    assert "inf" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("numbers", "values", "problem"),
    [
        (slice(None), {"output_lens": 1, "itls": []}, "requests 1 to 30 have no TPOT above 0"),
        (slice(30, None), {"ttfts": 0.0}, "requests 31 to 60 have no TTFT above 0"),
    ],
)
def test_records_without_relative_errors_are_refused(
    numbers: slice,
    values: dict[str, object],
    problem: str,
    records: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Outputs of one token made the errors NaN, and a profile that was not fitted was written."""
    spoiled = spoil(records, tmp_path / "x.json", numbers, **values)
    assert main([spoiled, f"output={tmp_path / 'fitted.json'}", *SERVER]) == 2
    assert problem in capsys.readouterr().err and not (tmp_path / "fitted.json").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{}", "cannot be read: KeyError('start_times')"), ("[", "cannot be read"), (None, "cannot be read")],
)
def test_other_files_are_refused(
    content: str | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    assert main([f"records={tmp_path / 'x.json'}", *SERVER]) == 2
    assert problem in capsys.readouterr().err


def test_a_server_that_cannot_serve_the_requests_is_refused(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"records={records / 'bench.json'}", *SERVER, "kv_tokens=1024"]) == 2
    assert "kv_tokens" in capsys.readouterr().err


def test_keys_of_another_server_than_the_recorded_run_are_refused(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"records={records / 'run'}", *SERVER[:-1], "chunk=256", "kv_tokens=40960"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "the run had policy=vllm_v1(budget=512) kv_tokens=" in error
    assert "the keys give policy=vllm_v1(budget=256) kv_tokens=40960;" in error
