"""Capacity: the rules by hand, and the command on curves that are known."""

import gc
import itertools
import json
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import largest_file
from curve import Curve, one_percent_at_7
from in_process import outcome

from cbatch import SLO, Request
from cbatch.errors import ResultsError
from cbatch.results.metrics import Served
from cbatch.sim import load_profile
from experiments.capacity import __main__ as command
from experiments.capacity import command as searching
from experiments.capacity import control
from experiments.capacity.folder import SIMULATIONS, open_simulations
from experiments.capacity.search import TooFewError
from experiments.capacity.simulation import Outcome, count_attained, simulate
from experiments.compare import main as compare
from experiments.job import run_in_sweep
from experiments.run import main
from experiments.settings.compose import compose, compose_run
from experiments.settings.construct import construct
from experiments.settings.settings import Composed, Settings, read_settings
from experiments.setup.assemble import assemble
from experiments.store.claim import TerminatedError
from experiments.trials.load import bounds_together
from experiments.workloads import GammaArrivals, OpenLoop, UniformLengths

LENGTHS = UniformLengths(min_length=20, max_length=90, pd_ratio=4)
OPEN = OpenLoop(num_requests=7, seed=3, arrivals=GammaArrivals(rate=5.0), lengths=LENGTHS)

# -- rules ------------------------------------------------------------------------------------------------------------


def served_requests(slo: SLO = SLO(ttft=2.0, tbt=1.5, total=9.0)) -> tuple[list[Request], Served]:  # noqa: B008
    """Five requests of one prompt token, of which the last is rejected: first tokens after 1, 2, 3, 4 s, and gaps by hand."""
    requests = [Request(id_, 1, 3, slo=slo) for id_ in range(5)]
    gaps = [(1.0, 1.0), (1.0, 2.5), (2.0, 2.0), (1.0, 1.0)]
    times = np.array([[first, first + a, first + a + b] for first, (a, b) in enumerate(gaps, start=1)])
    zeros, ids = np.zeros(4), np.arange(4)
    first, last, lengths, longest = times[:, 0], times[:, -1], (ids + 1, ids * 0 + 3), np.diff(times).max(axis=1)
    return requests, Served(ids, zeros, ids.astype(float), first, last, *lengths, longest, *np.zeros((3, 0)))


def test_requests_that_meet_all_objectives_count_in_the_window() -> None:
    """Request 1 has a gap of 2.5 s, 2 and 3 a TTFT of 3 and 4 s, 4 was rejected."""
    requests, served = served_requests()
    assert count_attained(requests, served) == (1, 5)
    assert [count_attained(requests[a:b], served) for a, b in ((0, 2), (2, 4), (0, 0))] == [(1, 2), (0, 2), (0, 0)]


def test_a_limit_of_the_mean_gap_allows_longer_ones() -> None:
    """Means of 1, 1.75, 2 and 1 s; the last request was rejected."""
    for limit, good in ((0.9, 0), (1.0, 2), (1.75, 3), (2.0, 4)):
        assert count_attained(*served_requests(SLO(tpot=limit))) == (good, 5)


# -- the command ------------------------------------------------------------------------------------------------------

SMALL = "policy=orca workload=open_loop slo.ttft=1 requests=3000 accuracy=0.05 cores=1 output=found"


def run(*changes: str, without: Sequence[str] = ()) -> str:
    """What the command prints, or its error."""
    changed = {change.partition("=")[0] for change in changes} | set(without)
    kept = [key for key in SMALL.split() if key.partition("=")[0] not in changed]
    ended = outcome(partial(main, command=command.COMMAND), [*kept, *changes])
    return ended.complaint or ended.printed


def simulate_curve(monkeypatch: pytest.MonkeyPatch, curve: Curve) -> None:
    """Has the command simulate this curve."""
    monkeypatch.setattr(searching, "simulate", lambda settings, number, rate, *size: curve([(number, rate)], *size)[0])


def end_after_nine(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Has the tenth simulation raise."""
    curve = one_percent_at_7()

    def simulate(settings: Settings, number: int, rate: float, *size: int) -> Outcome:
        if len(curve.pairs) == 9:
            raise error
        return curve([(number, rate)], *size)[0]

    monkeypatch.setattr(searching, "simulate", simulate)


def result() -> Any:
    return json.loads(Path("found/capacity.json").read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current one. The control variate's queue has as many requests as a search of a few needs."""
    monkeypatch.setattr(control, "_DRAWN", 100_000)
    with chdir(tmp_path):
        yield tmp_path


@pytest.mark.long
def test_a_search_is_written_resumed_and_not_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = one_percent_at_7(scatter=0.5)
    simulate_curve(monkeypatch, curve)
    printed, first = run(), result()
    assert "requests=3000" not in printed, "enough for a batch of 18"
    figures = first["capacity"]
    assert figures["requests_per_second"] == pytest.approx(7.0, rel=0.01)
    assert f"{figures['requests_per_second']:.4g} [{figures['low']:.4g}, {figures['high']:.4g}] requests/s" in printed
    simulated = set(curve.pairs)
    assert figures["simulations"] == len(simulated), "those that found the bracket count, too"
    assert figures["cpu_seconds"] == 2.0 * len(simulated)
    curve.pairs.clear()
    assert "holds this run already" in run()
    lines = Path("found/simulations.jsonl").read_text().splitlines(keepends=True)
    Path("found/simulations.jsonl").write_text("".join(lines) + lines[-1][:20])  # cut off while it was written
    Path("found/capacity.json").unlink()
    assert f"{len(lines) - 1} simulations of an earlier search are kept" in run()
    assert not curve.pairs
    assert all(result()[key] == first[key] for key in ("capacity", "curves", "by_replication"))
    run("accuracy=0.02")
    assert curve.pairs, "a narrower interval goes on from what there is"
    assert simulated.isdisjoint(curve.pairs)


@pytest.mark.long
@pytest.mark.parametrize(("eager", "loop"), [(2, "async"), (0, "async, in graphs")])
def test_a_search_states_the_error_of_runs_that_launch_as_its_simulations(
    eager: int, loop: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = one_percent_at_7(scatter=0.5)

    def simulate(settings: Settings, number: int, rate: float, *size: int) -> Outcome:
        return curve([(number, rate)], *size)[0]._replace(outside=1, eager=eager)

    monkeypatch.setattr(searching, "simulate", simulate)
    run("hardware=h200", "model=llama-3.1-8b")
    execution = result()["about"]["execution"]
    number = execution["iterations_outside_measured_range"]
    assert number >= 3 and execution["eager_iterations"] == eager * number
    assert execution["error"] == load_profile("h200").compared[loop].text


@pytest.mark.long
def test_a_capacity_over_what_no_policy_can_sustain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heaviest 1% may wait for ever: 99% of the requests can be sustained at a slightly higher rate than all."""
    simulate_curve(monkeypatch, one_percent_at_7(scatter=0.5))
    small = ("requests=200", "slo.tbt=1")
    run(*small, without=["slo.ttft"])
    simulated = Path("found/simulations.jsonl").read_text()
    printed = run(*small, "bounds=true", without=["slo.ttft"])
    assert re.match("requests=200: .* 10 .* 360 ", printed), "a twentieth of them in the system; 18 of a batch need 360"
    assert Path("found/simulations.jsonl").read_text() == simulated, "nothing is simulated again"
    regret, figures = result()["regret"], result()["capacity"]
    keys = compose("policy=orca", "workload=open_loop", "backend=sim", "+workload.slo.tbt=1").keys
    bounds = bounds_together(read_settings(Composed(keys)), figures["replications"], 200)
    assert regret["rate_bound"] == pytest.approx(bounds.rate_attained(0.99))
    assert bounds.rate < regret["rate_bound"] < 1.1 * bounds.rate
    assert regret["capacity"] == pytest.approx(figures["requests_per_second"] / regret["rate_bound"])
    assert f", which is {regret['rate_bound']:.4g} requests/s, the most that can be sustained" in printed


def open_loop(policy: str, limit: float) -> Settings:
    """The settings of a run of requests with this objective of the first token."""
    settings = compose_run(f"policy={policy}", "backend=sim")
    return replace(settings, workload=replace(OPEN, slo={"ttft": limit}))


@pytest.mark.parametrize(("limit", "good"), [(1e-6, 0), (10.0, 8)])
def test_a_simulation_counts_the_requests_of_its_window(limit: float, good: int) -> None:
    """One request per 10 s is served alone; with TTFT objectives below and above its prefill none or all attain them."""
    made = simulate(open_loop("orca", limit), 0, 0.1, 12, 2)
    assert (made.good, made.total) == (good, 8) and made[:4] == (0.1, 0, 12, 2)
    assert 0 < made.in_system < 0.1


@pytest.mark.parametrize("policy", ["vllm_v1", "qoserve"])
def test_a_simulation_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """What it held is free at once, not when the collector next looks: a search runs a hundred in each of its processes."""
    states = []

    def assemble_and_watch(settings: Any) -> Any:
        run = assemble(settings)
        states.extend(weakref.ref(engine.state) for engine in run.engine.engines)
        return run

    monkeypatch.setattr("experiments.capacity.simulation.assemble", assemble_and_watch)
    gc.disable()
    try:
        simulate(open_loop(policy, 1.0), 0, 1.0, 20, 2)
        assert [state() for state in states] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("slo.ttft=null", "slo: no objective is set; give slo.ttft=SECONDS"),
        ("attainment=1", "attainment=1: "),
        ("workload=closed", "workload: "),
        ("+workload.load=0.5", "workload.load=0.5: "),
        ("workload=chat bounds=true", "bounds=true: lower bounds hold for known requests"),
        ("backend=cpu", "backend=cpu: this command simulates; give backend=sim"),
        ("slo.tbot=1", "slo.tbot: no such key; slo has ttft, tbt, total, tpot"),
        ("workload.slo=null", "workload.slo: follows slo here; give slo=NAME"),
        ("requests=many", "requests=many: give auto, or a whole number from "),
        ("requests=60", "slo: no rate meets it, as even requests served one at a time reach only attainment 70%"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    change: str, problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_curve(monkeypatch, Curve(lambda rate: 0.3))
    assert problem in run(*change.lstrip("+").split())
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("requests", "recorded", "problem"),
    [
        (
            "auto",
            40,
            "requests=20: a trace of 40 requests makes 2 replications, at least 16 are needed; give a trace of",
        ),
        ("30", 350, "makes 11 replications, at least 16 are needed; give requests=21, or a longer trace"),
    ],
)
def test_a_trace_too_short_for_its_replications_is_refused(
    requests: str, recorded: int, problem: str, folder: Path
) -> None:
    path = Path(f"trace_of_{recorded}.csv").absolute()
    rows = [f"{time},ann,3,1\n" for time in range(recorded)]
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + "".join(rows))
    assert problem in run("workload=vtc_real", f"workload.path={path}", f"requests={requests}")


def test_named_objectives_are_those_of_the_requests() -> None:
    """strict: the first token in 1 s and each next one in 50 ms; relaxed: 5 times as long; tiers: by service class."""
    slos = {}
    for name in ("none", "strict", "relaxed", "tiers"):
        keys = compose("workload=open_loop", f"slo={name}", name="capacity").keys
        slos[name] = {request.slo for request in construct("workload", keys["workload"]).requests(None)}
    tiers = {SLO(ttft=6.0, tbt=0.05), SLO(total=600.0), SLO(total=1800.0)}
    assert slos == {"none": {SLO()}, "strict": {SLO(1.0, 0.05)}, "relaxed": {SLO(5.0, 0.25)}, "tiers": tiers}


@pytest.mark.long
def test_a_sweep_over_objectives_and_models_has_a_row_for_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search has settings of its own, and the order of the latest command line; the next command is named, and runs."""
    seen: set[tuple[str, SLO]] = set()

    def simulate(settings: Settings, number: int, rate: float, *size: int) -> Outcome:
        seen.add((settings.model.name, settings.slo))
        strict = 7.0 if settings.slo.tbt == 0.05 else 9.0
        return Curve(lambda rate: 0.01 * (rate / strict) ** 9)([(number, rate)], *size)[0]

    monkeypatch.setattr(searching, "simulate", simulate)
    swept = ("-m", "sweep=s", "model=tiny,llama-2-7b", "slo=strict,relaxed")
    printed = run(*swept, without=["output", "slo.ttft"])
    assert seen == set(product(("tiny", "llama-2-7b"), (SLO(1.0, 0.05), SLO(5.0, 0.25))))
    rows = [re.split(r"\s{2,}", line)[:2] for line in printed.splitlines() if line.startswith("orca, ")]
    assert [float(figures.split(" ")[0]) for _, figures in rows] == pytest.approx([7.0, 9.0, 7.0, 9.0], rel=0.01)
    order = [(f"model={model}", f"slo={slo}") for model, slo in product(("tiny", "llama-2-7b"), ("strict", "relaxed"))]
    assert [label.split(", ")[1:] for label, _ in rows] == [[*parts] for parts in order]
    [folder_given] = re.findall(r"python -m experiments\.compare (\S+)", printed)
    assert "over orca" in outcome(compare, [folder_given]).printed
    again = run("-m", "sweep=s", "model=llama-2-7b,tiny", "slo=relaxed,strict", without=["output", "slo.ttft"])
    rows = [re.split(r"\s{2,}", line)[:2] for line in again.splitlines() if line.startswith("orca, ")]
    assert [label.split(", ")[1:] for label, _ in rows[:4]] == [[*parts] for parts in reversed(order)]


@pytest.mark.long
def test_searches_beside_each_other_print_their_progress_with_their_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a launcher, here one after the other."""
    simulate_curve(monkeypatch, one_percent_at_7())
    monkeypatch.setattr(
        "experiments.job.run_in_sweep", lambda of, sweep, alone, *to: run_in_sweep(of, sweep, False, *to)
    )
    printed = run("-m", "sweep=s", "slo.ttft=1,2", without=["output"]).split("\n\n")[0].splitlines()
    for name in ("slo.ttft=1", "slo.ttft=2"):
        first, *others = (line for line in printed if line.startswith(name))
        assert first == f"{name} ..." and " of 2" in others[-1]
        assert {line.partition(": ")[2].partition(" ")[0] for line in others[:-1]} >= {"bracket:", "simulating"}
    assert all(line.startswith("slo.ttft=") for line in printed)


def test_an_interrupted_sweep_has_printed_its_progress_and_says_that_simulations_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end_after_nine(monkeypatch, KeyboardInterrupt())
    assert main(["-m", "sweep=s", *SMALL.split()[:-1]], command.COMMAND) == 130
    (search,) = folder.glob("multirun/s/*/")
    assert len((search / "simulations.jsonl").read_text().splitlines()) == 1 + 9
    printed, complaint = capsys.readouterr()
    again = "the same command with sweep=s runs all of them"
    assert complaint == f"\ninterrupted; no run finished, simulations that ended are kept; {again}\n"
    assert printed.startswith(f"{search.name} ...\n  bracket: ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "\ninterrupted; "),
        (TerminatedError("terminated"), 143, "terminated; "),
        (TooFewError("few; give more"), 2, "error: few; give more; "),
    ],
)
def test_a_search_that_ends_early_names_its_folder_and_goes_on_there(
    raised: BaseException,
    status: int,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    end_after_nine(monkeypatch, raised)
    assert main(SMALL.split()[:-1], command.COMMAND) == status
    (search,) = Path("runs").iterdir()
    kept = f"simulations that ended are kept; the same command with output={search} goes on"
    assert capsys.readouterr().err == f"{said}{kept}\n"
    simulate_curve(monkeypatch, one_percent_at_7())
    assert "9 simulations of an earlier search are kept" in run(f"output={search}", without=["output"])


@pytest.mark.long
def test_what_can_be_gone_on_with_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_curve(monkeypatch, one_percent_at_7(scatter=0.9))
    assert "replications=" in run("replications=16")
    assert [path.name for path in Path("found").iterdir() if not path.name.startswith(".")] == ["simulations.jsonl"]
    assert "of an earlier search are kept" in run()


@pytest.mark.parametrize(("shown", "lines"), [("auto", [2, 4]), ("off", [])])
def test_a_search_in_a_pipe_prints_a_line_every_30_seconds(
    shown: Any, lines: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Five replications of 16 s each: the second ends at 32 s, the fourth at 64 s."""
    seconds = itertools.accumulate(itertools.repeat(16.0))
    clock = [0.0]

    def simulate(number: int, rate: float, requests: int, warmup: int) -> Outcome:
        clock[0] = next(seconds)
        return Outcome(rate, number, requests, warmup, 9, 10, 1.0, 0.5)

    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    with open_simulations(tmp_path, {}, {}, simulate, cores=1, other_code=False, progress=shown) as simulations:
        simulations([(number, 1.0) for number in range(5)], 10, 0)
    printed = capfd.readouterr()
    assert [line.partition(" |")[0] for line in printed.err.splitlines()] == [
        f"{done}/5 replications" for done in lines
    ]


def test_simulations_that_fit_a_full_disk_are_kept(tmp_path: Path) -> None:
    """The error names the file; the line that it cut off is simulated again, and no other."""
    new, counted = list[int](), partial(open_simulations, tmp_path, {}, {}, cores=1, other_code=False)

    def simulate(number: int, rate: float, requests: int, warmup: int) -> Outcome:
        new.append(number)
        return Outcome(rate, number, requests, warmup, 9, 10, 1.0, 0.5)

    pairs = [(number, 1.0) for number in range(9)]
    full = pytest.raises(ResultsError, match=rf"{SIMULATIONS}: File too large; make room")
    with largest_file(200), full, counted(simulate) as simulations:
        simulations(pairs, 10, 0)
    kept = new[:-1]
    assert 2 < len(new) < 9
    with counted(simulate) as simulations:
        simulations(pairs, 10, 0)
    assert sorted(new) == sorted([*range(9), new[len(kept)]]) and SIMULATIONS in {
        path.name for path in tmp_path.iterdir()
    }
