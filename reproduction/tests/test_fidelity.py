"""Simulation held against real runs: what is kept of them, what is compared, and what the command does with it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import ROOT

from cbatch import ConfigError, Limits, Server
from cbatch.kv import KVSize
from cbatch.request import spec_of
from cbatch.sim.executor import SimExecutor
from cbatch.sim.profile_file import load_profile
from cbatch.sim.provenance import IN_GRAPHS
from experiments.profile.machine import Machine
from experiments.setup.presets import load_spec
from experiments.store.provenance import today
from reproduction.validation import fidelity, stored
from reproduction.validation import runs as runs_file
from reproduction.validation.__main__ import main
from reproduction.validation.cases import CASES, POLICIES, SERVE, Case, chosen_cases, workload
from reproduction.validation.compare import compare, cost_of, in_graphs, pair, scaled, share_of_bound, within_bars
from reproduction.validation.ranking import job_cases, pairs, ratio_errors
from reproduction.validation.runs import ServedRun
from reproduction.validation.serve import serve

POLICIES_TRIED = ("orca", "prefill_first", "sarathi_serve, 512 tokens")
QUEUED = Case("held out, queued", "llama-3.1-8b", 16, 2048, POLICIES_TRIED, num_requests=40)
OPEN = replace(QUEUED, name="held out, poisson at 45%", load=0.45)
SYNCHRONOUS = replace(QUEUED, policies=("orca",), loop="sync")
TWO_GPUS = replace(QUEUED, tensor_parallel=2)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Forty requests, one a second."""
    random = np.random.default_rng(3)
    rows = [
        f"2023-11-16 18:15:{second:02d}.680590,{random.integers(5, 900)},{random.integers(2, 60)}"
        for second in range(40)
    ]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return str(path)


def simulated_machine(
    host_seconds: float | None = None, factor: float = 1.0, loop: str = "async", gpus: int = 1
) -> Machine:
    """A machine whose iterations take exactly what the profile says, or that times a factor; a host of its own if told."""
    profile, limits = load_profile("h200"), Limits(16, 2048, 2048)
    settings = {"model": QUEUED.model, "batch": 16, "tensor_parallel": gpus}
    cost = cost_of(ServedRun(settings, {}, {}), scaled(profile, factor))
    host = profile.host_time(loop == "async") if host_seconds is None else host_seconds
    return Machine("NVIDIA H200", Server(SimExecutor(cost, host), limits, cost, KVSize(256, 128)), (), (), "none")


def runs_of(case: Case, trace: str, machine: Machine, policies: tuple[str, ...] = POLICIES_TRIED) -> list[ServedRun]:
    requests = workload(case, trace, capacity=50.0)
    return [serve(machine, load_spec(case.model), case, policy, requests) for policy in policies]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(QUEUED, id="queued"),
        pytest.param(OPEN, id="open loop", marks=pytest.mark.long),
        pytest.param(SYNCHRONOUS, id="synchronous loop"),
        pytest.param(TWO_GPUS, id="two GPUs"),
    ],
)
def test_what_behaves_as_the_profile_says_is_simulated_without_error(case: Case, trace: str) -> None:
    profile = load_profile("h200")
    runs = runs_of(case, trace, simulated_machine(loop=case.loop, gpus=case.tensor_parallel), case.policies)
    for working, pauses in (run.device_seconds() for run in runs):
        assert (working > 0).all() and (pauses[1:] > 0).all() == (case is SYNCHRONOUS)
    result = compare([pair(run, profile) for run in runs], profile)
    assert max(result["largest_error"].values()) < 1e-3  # arrivals are kept to the microsecond
    for run, found in zip(runs, result["cases"][case.name].values(), strict=True):
        assert found["eager_iterations"] == sum(bool(of.chunks) and of.num_tokens > 2048 for of in run.shapes())
        assert (found["batch"], found["loop"], found["load"]) == (16, case.loop, case.load)
        for part in found["iterations"].values():
            assert abs(part["total"]) < 1e-3
        assert found["percentile_rank"]["TBT P99"] == pytest.approx(99, abs=1)
        low, high = found["error_range"]["total time"]
        assert low <= found["error"]["total time"] <= high
        if case is QUEUED:  # one iteration after the other: all take that much more or less
            assert (low, high) == (pytest.approx(-0.01, rel=0.1), pytest.approx(0.01, rel=0.1))


def test_the_share_of_the_bound_is_below_that_of_what_a_policy_serves(trace: str) -> None:
    """40 requests, 20 per second: 20 over the rate at which the policy serves them is more than 20 over B3. Half as fast is half the share."""
    profile = load_profile("h200")
    [queued] = runs_of(QUEUED, trace, simulated_machine(), ("orca",))
    fast, slow = (
        replace(queued, columns={**queued.columns, "request.arrival": np.arange(40) * step})
        for step in (50_000, 100_000)
    )
    share = share_of_bound(fast, profile)
    assert share is not None and 0 < share < 20 / (40 / queued.figures["total time"])
    assert share_of_bound(slow, profile) == pytest.approx(share / 2)
    assert share_of_bound(queued, profile) is None


def test_the_order_of_events_and_the_cost_model_are_told_apart(trace: str) -> None:
    """A slow host makes the run longer but not the iterations."""
    profile = load_profile("h200")
    [run] = runs_of(QUEUED, trace, simulated_machine(host_seconds=0.02), ("orca",))
    found = compare([pair(run, profile)], profile)["cases"][QUEUED.name]["orca"]
    assert found["error"]["total time"] < -0.3
    assert all(abs(part["total"]) < 1e-3 for part in found["iterations"].values())


@pytest.mark.long
def test_a_written_comparison_is_simulated_again_from_the_trace_alone(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a machine 2% slower measured is in the file; requests and their arrivals are made again."""
    monkeypatch.setattr(stored, "KNOWN", {case.name: case for case in (QUEUED, OPEN)})
    machine, profile, spec = simulated_machine(factor=1.02), load_profile("h200"), load_spec(QUEUED.model)
    [queued] = runs_of(QUEUED, trace, machine, ("sarathi_serve, 512 tokens",))
    late = workload(OPEN, trace, capacity=40 / queued.figures["total time"])
    before = compare([pair(run, profile) for run in (queued, serve(machine, spec, OPEN, "orca", late))], profile)
    (tmp_path / "a.json").write_text(json.dumps(before))
    longer = tmp_path / "longer.csv"
    longer.write_text(Path(trace).read_text().replace(",1", ",2"))
    with pytest.raises(ConfigError, match="another trace"):
        stored.stored_runs(tmp_path / "a.json", [str(longer)], before["tables"])
    again = stored.stored_runs(tmp_path / "a.json", [str(longer), trace], before["tables"])
    after = compare([pair(run, profile) for run in again], profile)
    assert after["cards"] == before["cards"]
    at_own_speed = fidelity.errors(fidelity.at_own_speed(again, profile), profile)
    assert at_own_speed["end to end mean"]["largest"] < 0.2 * before["largest_error"]["end to end mean"]
    others = stored.stored_runs(tmp_path / "a.json", [trace], "other tables")  # whose errors of iterations do not hold
    assert compare([pair(run, profile) for run in others], profile)["cards"] == {}
    for case, policies in before["cases"].items():
        for policy, run in policies.items():
            again = after["cases"][case][policy]
            assert again["measured"] == run["measured"] != again["simulated"] == run["simulated"]


def test_a_run_is_kept_as_it_was(trace: str, tmp_path: Path) -> None:
    runs = runs_of(OPEN, trace, simulated_machine())
    runs_file.save(tmp_path / "runs.npz", {"hardware": "x"}, runs)
    about, again = runs_file.load(tmp_path / "runs.npz")
    assert about == {"hardware": "x"}
    for before, after in zip(runs, again, strict=True):
        assert (json.loads(json.dumps(before.settings)), before.figures) == (after.settings, after.figures)
        assert before.shapes() == after.shapes()
        assert all((before.columns[name] == after.columns[name]).all() for name in before.columns)
        np.testing.assert_allclose(before.device_seconds(), after.device_seconds())
    total, requests = sum(shape.num_tokens for shape in again[0].shapes()), again[0].requests()
    lengths = [request.num_prompt_tokens + (spec_of(request).true_new_tokens or 0) for request in requests]
    assert total == sum(lengths), "the asynchronous loop computes the last token of each, as the end is hidden"
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    with pytest.raises(ConfigError, match=r"measured=.*broken\.npz: cannot read the measured runs"):
        runs_file.load(tmp_path / "broken.npz")


def test_a_winner_counts_where_cards_differ_by_less_and_a_wrong_one_costs_what_it_is_slower() -> None:
    """Card 2 serves `fast` 5% slower: its noise. `slow` and `slower` are 20% apart, and simulation swaps them, but names neither,
    as their times change by up to 6% with those of iterations; `near` ties with `fast`."""
    times = {"fast": (1.0, 1.0), "near": (1.02, 0.99), "slow": (2.0, 2.5), "slower": (2.4, 2.25)}
    runs = {name: ranked(real, virtual) for name, (real, virtual) in times.items()}
    again = {"fast": {**runs["fast"], "measured": {"TTFT mean": 1.05}}}
    found = pairs([{"cases": {"queued, card 1": runs, "queued, card 2": again}}])
    assert found["noise"].tolist() == [pytest.approx(0.05)] * 6 and {*found["what"]} == {"policy"}
    assert (found["decided"].sum(), found["same"].sum()) == (5, 4) and found["regret"].max() == pytest.approx(0.2)
    assert (found["named"].sum(), found["named right"].sum(), found["regret of named"].max()) == (4, 4, 0)
    alone = pairs([{"cases": {"queued": runs}}])
    assert alone[["noise", "decided", "same"]].isna().all(axis=None), "without repeats the noise is not 0"
    assert alone["named"].sum() == 4 and alone["elsewhere"].isna().all()


def test_errors_of_ratios_are_of_equal_arrivals_served_once() -> None:
    """a over b is 1/2, simulated as 1/2.2, and b over c 2/3, simulated as 2.2/3: 1.1 times too small and too large, whichever is the baseline; a over c has no error."""
    times = {"a": (1.0, 1.0), "b": (2.0, 2.2), "c": (3.0, 3.0), "queued too": (9.0, 1.0)}
    runs = {
        name: {
            "load": None if "queued" in name else 0.7,
            "measured": {"TTFT P50": real},
            "simulated": {"TTFT P50": virtual},
        }
        for name, (real, virtual) in times.items()
    }
    again = {"a": runs["a"], "b": {**runs["b"], "simulated": {"TTFT P50": 9.0}}}
    for order in (runs, dict(reversed(runs.items()))):
        (row,) = ratio_errors([{"cases": {"at 70%": order, "at 70%, again": again}}, {"runs": []}]).itertuples()
        assert row.Index == "TTFT P50" and row.pairs == 3
        assert (row.median, row.largest) == (pytest.approx(0.1), pytest.approx(0.1))


def test_the_ratio_of_throughputs_is_also_of_queued_runs_and_runs_without_a_graph_can_be_left_out() -> None:
    """Throughputs of 2 and 3, simulated as 2.2 and 3: 10%. Of four policies with arrivals `c` had launches without a graph, of `d` it is unknown."""
    queued = {
        name: {"load": None, "measured": {"throughput": real}, "simulated": {"throughput": virtual}}
        for name, real, virtual in (("a", 2.0, 2.2), ("b", 3.0, 3.0))
    }
    [row] = ratio_errors([{"cases": {"queued": queued}}]).itertuples()
    assert (row.Index, row.pairs, row.largest) == ("throughput", 1, pytest.approx(0.1))
    values = {"d": (1.0, 3.0), "c": (1.0, 1.5), "b": (1.0, 1.05), "a": (1.0, 1.0)}
    runs = {
        name: {"load": 0.7, **dict(zip(("measured", "simulated"), ({"TBT P99": value} for value in both), strict=True))}
        for name, both in values.items()
    }
    for name, number in (("a", 0), ("b", 0), ("c", 9)):
        runs[name]["eager_iterations"] = number
    cases = {"at 70%": runs, "at 90%": {"c": runs["c"]}}
    assert in_graphs(cases) == {"at 70%": {"a": runs["a"], "b": runs["b"]}}
    every, inside = (ratio_errors([{"cases": of}]).loc["TBT P99"] for of in (cases, in_graphs(cases)))
    assert (every["pairs"], every["largest"]) == (6, pytest.approx(2.0))
    assert (inside["pairs"], inside["largest"]) == (1, pytest.approx(0.05))


def test_the_ratios_of_profiles_include_sessions_and_settings_of_one_policy() -> None:
    """Times without pauses of 8 and 10 s, simulated as 8 and 12.5 s: 25%; latencies by turn are left out. Two settings of vLLM are a pair."""
    policies = (("a", 8.0, 8.0), ("b", 10.0, 12.5))
    runs = [
        {
            "workload": "w",
            "kv_tokens": tokens,
            "policy": policy,
            "measured": {"busy p50": real, "TTFT of turns 0": 1.0},
            "simulated": {"busy p50": virtual, "TTFT of turns 0": 9.0},
        }
        for tokens in (1, 2)
        for policy, real, virtual in policies
    ]
    [row] = ratio_errors([job_cases({"runs": runs})]).itertuples()
    assert (row.Index, row.pairs, row.largest) == ("busy P50", 2, pytest.approx(0.25))
    recorded = {
        f"batch 256, {load}%, chunk={chunk}": {
            f"chunk={chunk}": {"load": load, "measured": {"TPOT mean": 1.0}, "simulated": {"TPOT mean": chunk / 512}}
        }
        for load, chunk in ((61, 512), (61, 1024), (86, 512))
    }
    [row] = ratio_errors([{"cases": recorded}]).itertuples()
    assert (row.pairs, row.largest) == (1, pytest.approx(1.0))


def test_the_page_states_the_stored_errors_of_ratios() -> None:
    """For H200s it states those in graphs alone: most stored runs with launches are of an earlier runtime."""
    page = (ROOT / "docs/hardware-profiles.md").read_text()
    h100s = [f"h100/{name}" for name in ("ranked", "other-card", "code", "newer-kernels")]
    see = load_profile("h200").compared["async"].see
    h200s = re.findall(r"results/(h200/[\w-]+)\.json", see.partition(" hardware=")[0])
    for names in ([name for name in h200s if "synchronous" not in name and "two" not in name], h100s):
        files = [json.loads((ROOT / f"reproduction/results/{name}.json").read_text()) for name in names]
        inside = ratio_errors({"cases": in_graphs(file["cases"])} for file in files)
        for errors in (inside, ratio_errors(files)) if names == h100s else (inside,):
            assert f"{errors.loc['TTFT mean', 'pairs']:.0f} pairs" in page
            for name in ("TTFT", "TBT", "TPOT", "end to end"):
                cells = [errors.loc[f"{name} {end}"] for end in ("mean", "P50", "P90", "P99")]
                row = " | ".join(f"{cell['median']:.1%}, {cell['largest']:.1%}" for cell in cells)
                assert f"| {row} |" in page, (name, row)


def test_the_page_states_the_largest_errors_and_how_many_runs_exceed_bars() -> None:
    page = (ROOT / "docs/hardware-profiles.md").read_text()
    labels = {"async": "one GPU", "sync": "`runtime=sync`", "async, 2 GPUs": "two GPUs"}
    labels |= {loop + IN_GRAPHS: f"{label}, all in graphs" for loop, label in labels.items()}
    for hardware in ("h200", "h100"):
        compared = load_profile(hardware).compared
        files = compared["async"].see.partition("measured=")[2].split()[0].split(",")
        for loop, result in stored.pool([ROOT / file for file in files], hardware).items():
            met, number = within_bars(result["cases"])
            errors = re.findall(r"(?:mean|P50|P90|P99) (\d+)", compared[loop].text)
            [row] = (
                line for line in page.splitlines() if line.startswith(f"| `{hardware}`, {labels[loop]} | {number} ")
            )
            assert f"| {', '.join(errors)}% | {number - met} of {number} |" in row, row


def test_no_winner_is_named_where_ranges_meet() -> None:
    """a is simulated at 1 to 2, b at 2 to 3 and c at 2.5 to 4: only a and c do not meet."""
    runs = {"a": (1.0, [0.0, 1.0]), "b": (2.0, [0.0, 0.5]), "c": (2.5, [0.0, 0.6])}
    cases = {
        name: {
            "model": "m",
            "measured": {"TTFT mean": real},
            "simulated": {"TTFT mean": real},
            "error_range": {"TTFT mean": ends},
        }
        for name, (real, ends) in runs.items()
    }
    found = pairs([{"cases": {"queued": cases}}])
    assert dict(zip(found["policies"], found["named"], strict=True)) == {"a | b": False, "a | c": True, "b | c": False}


def test_the_baseline_names_who_won_in_other_sessions() -> None:
    """`b` beats `a` on cards 1 and 2 when queued, `a` beats `b` on card 3, and at a load on card 2; `c` was served by card 1 alone."""
    ahead, behind = {"a": ranked(2.0, 2.0), "b": ranked(1.0, 1.0)}, {"a": ranked(1.0, 1.0), "b": ranked(2.0, 2.0)}
    cases = {"queued, card 1": ahead | {"c": ranked(3.0, 3.0)}, "queued, card 2": ahead, "queued, card 3": behind}
    found = pairs([{"cases": cases | {"poisson, card 2": behind}}])
    alone = found[(found["what"] == "policy") & (found["policies"] == "a | b")].fillna(-1)
    columns = (alone[name] for name in ("workload", "session", "elsewhere", "other loads"))
    seen = {(load, session[:3]): tuple(rest) for load, session, *rest in zip(*columns, strict=True)}
    # elsewhere: card 1 sees one win of b and two of a; card 2 a tie; card 3 two wins of b and one of a
    # other loads: cards 1 and 3 see a's win at the load on card 2; card 2 sees none when queued, a tie at the load
    assert seen == {
        ("queued", "0 1"): (0, 0),
        ("queued", "0 2"): (-1, -1),
        ("queued", "0 3"): (0, 1),
        ("poisson", "0 2"): (-1, -1),
    }
    assert found.loc[found["policies"] != "a | b", "elsewhere"].isna().all()


def ranked(real: float, virtual: float) -> dict[str, Any]:
    """Returns a run's measured and simulated TTFT, which changes by up to 6% with the times of iterations."""
    kinds = {
        "measured": real,
        "simulated": virtual,
        "error_range": [0.94 * virtual / real - 1, 1.06 * virtual / real - 1],
    }
    return {"model": "m", **{kind: {"TTFT mean": value} for kind, value in kinds.items()}}


def test_the_load_of_a_case_is_of_the_capacity_of_its_own_server(trace: str) -> None:
    by_name = {case.name: case for case in CASES}
    chosen = chosen_cases("held out, poisson", "prefill;sarathi")
    assert [case.policies for case in chosen][:2] == [("sarathi_serve, 512 tokens", "prefill_first"), (SERVE,)]
    for case in CASES:
        assert POLICIES.keys() >= {*case.policies}
        requests = workload(replace(case, num_requests=5, start=0.0), trace, capacity=2.0).requests(None)
        assert len(requests) == 5 and (requests[-1].arrival_time > 0) == (case.load is not None)
        if case.load is not None:
            full = by_name[case.capacity_of]
            assert full.fits(case) and (full.loop, full.load) == (case.loop, None) and SERVE in full.policies, case.name


@pytest.mark.long
def test_the_command_compares_kept_runs_and_stamps_the_profile(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "fidelity.npz"
    runs = [run for case in (QUEUED, OPEN) for run in runs_of(case, trace, simulated_machine())]
    runs_file.save(kept, {"hardware": "NVIDIA H200", "date": "2026-01-01"}, runs)
    monkeypatch.setattr(fidelity, "PROFILES", tmp_path)
    profile = json.loads((Path(load_profile.__globals__["PROFILES"]) / "h200.json").read_text())
    (tmp_path / "h200.json").write_text(json.dumps(profile))
    assert main(["fidelity", f"measured={kept}", f"folder={tmp_path}", "stamp=on"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 6" in printed
    (own := tmp_path / "own.json").write_text(json.dumps(profile))
    assert main(["fidelity", f"measured={kept}", f"folder={tmp_path}", "stamp=on", f"hardware={own}"]) == 0
    assert own.read_text() == (tmp_path / "h200.json").read_text() != json.dumps(profile), "a profile by its file"
    result = json.loads((tmp_path / "h200" / "fidelity.json").read_text())
    assert set(result["cases"]) == {QUEUED.name, OPEN.name}
    stamped = json.loads((tmp_path / "h200.json").read_text())
    assert stamped["models"] == profile["models"]
    compared = stamped["compared"].pop("async")
    assert not stamped["compared"] and {*compared.pop("largest_error").values()} == {0.0}  # the runs are simulated
    assert {*compared.pop("largest_error_of_ratios").values()} == {0.0}
    low, high = compared.pop("shares_of_bound")
    assert low == high > 0, "three policies with the same arrivals"
    conditions = {"models": ["llama-3.1-8b"], "gpus": 1, "batches": [16, 16], "loads": [0.45, 0.45]}
    assert compared == conditions | {"runs": 6, "cards": 1, "date": today(), "see": compared["see"]}
    assert "largest error: mean 0%, P50 0%, P90 0%, P99 0%; batch 16, load 45% of capacity" in printed
