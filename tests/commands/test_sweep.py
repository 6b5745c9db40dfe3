"""Sweeps: runs side by side by Hydra's launchers, a failing one among them, and going on after an interruption."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml
from commands import QUICK, WAITING, command, environment, errors_at_end, new_process, start, summary, wait_for
from joblib import Parallel, delayed

from cbatch import ConfigError
from experiments import job
from experiments.job import folder_name
from experiments.objective import may_exist, objective_of
from experiments.store.runs import read_runs


def runs_of(folder: Path) -> dict[str, float]:
    """When each finished run of a sweep was written, by the name of its folder."""
    return {path.parent.name: path.stat().st_mtime for path in folder.glob("*/summary.json")}


def test_a_failing_run_does_not_end_the_others(tmp_path: Path) -> None:
    done = new_process(
        "run",
        "-m",
        "sweep=part",
        "chunk=64,128,100000",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        *QUICK,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert len(runs_of(tmp_path / "multirun" / "part")) == 1
    *failures, last = done.stderr.splitlines()
    assert len(failures) == 2
    assert all(line.startswith("error: chunk=") for line in failures)
    assert last.startswith("error: 2 runs failed, see multirun/part/errors.log; the same command with sweep=part")
    assert len((tmp_path / "multirun" / "part" / "errors.log").read_text().splitlines()) == 2


def search(cwd: Path, chunks: str, objective: str = "throughput.total_tokens_per_second") -> CompletedProcess[str]:
    """Searches for the chunk with the highest objective, trying each value once or more."""
    pytest.importorskip("optuna", reason="the sweep extra is not installed")
    options = ("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=0", "hydra.sweeper.n_trials=8")
    fixed = ("workload.num_requests=40", "workload.pd_ratio=14", f"objective={objective}", "sweep=search")
    searched = ("hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", f"chunk={chunks}")
    return command("run", "-m", *searched, *options, *fixed, cwd=cwd)


def test_a_search_finds_the_best_chunk(tmp_path: Path) -> None:
    done = search(tmp_path, "128,256,512")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "multirun" / "search"
    rates = {
        summary(run)["about"]["identity"]["policy.chunking.chunk"]: summary(run)["throughput"][
            "total_tokens_per_second"
        ]
        for run in folder.glob("chunk=*")
    }
    assert set(rates) == {128, 256, 512}
    best = max(rates, key=rates.__getitem__)
    found = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert (found["best_params"], found["best_value"]) == ({"chunk": best}, rates[best])
    assert f"best: chunk={best} ({rates[best]:g})" in done.stdout


def test_a_failed_run_of_a_search_is_a_failed_trial(tmp_path: Path) -> None:
    done = search(tmp_path, "0,256")
    assert done.returncode == 2
    assert "best: chunk=256" in done.stdout
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert errors[0].startswith("error: chunk=0,") and errors[-1].startswith(f"error: {len(errors) - 1} run")
    assert "failed, see multirun/search/errors.log" in errors[-1]


@pytest.mark.parametrize(
    "key", ["attainment.tiers.gold.share", "service.clients.ann", "about.wall_seconds", "run.seconds"]
)
def test_an_objective_that_some_run_has_is_not_refused_before_the_run(key: str) -> None:
    assert may_exist(key) and not may_exist(f"x{key}")


def test_an_objective_is_a_number_of_the_summary() -> None:
    figures = {
        "about": {"simulated": True},
        "ttft_seconds": {"p99": 0.5, "p50": float("nan"), "p90": None},
        "goodput": {},
    }
    assert objective_of(figures, "ttft_seconds.p99") == 0.5
    for key in ("ttft_seconds.p50", "ttft_seconds.p90"):
        with pytest.raises(ConfigError, match=f"objective={key}: has no value in this run"):
            objective_of(figures, key)
    with pytest.raises(
        ConfigError, match=r"objective=attainment.share: this run has no attainment; docs/metrics.md says"
    ):
        objective_of(figures, "attainment.share")
    for key in ("ttft_seconds", "about.simulated", "p99"):
        with pytest.raises(ConfigError, match=f"objective={key}: summary.json has no such number; did you mean ttft"):
            objective_of(figures, key)


def test_runs_and_sweeps_do_not_lie_in_each_other(tmp_path: Path) -> None:
    sweep = ("run", "-m", "sweep=grid", "chunk=128", *QUICK)
    assert command(*sweep, cwd=tmp_path).returncode == 0
    (run,) = (tmp_path / "multirun" / "grid").glob("chunk*")
    before = sorted(tmp_path.rglob("*"))
    within = run.relative_to(tmp_path)
    for arguments, message in {
        (
            "output=multirun/grid",
        ): "output=multirun/grid: is the folder of a sweep; give another folder, or -m and sweep=",
        (f"output='{within}/more'",): f"output={within}/more: {within} is the folder of a run; give another folder",
        (
            "-m",
            f"sweep='grid/{run.name}'",
        ): f"sweep='grid/{run.name}': {within} is the folder of a run; give another name",
    }.items():
        done = command("run", *arguments, *QUICK, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {message}")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.name == "nt", reason="signals are sent to a process group")
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
@pytest.mark.parametrize("interrupt", ["killpg", "kill"])
def test_ctrl_c_keeps_finished_runs_and_says_how_to_go_on(tmp_path: Path, launcher: str, interrupt: str) -> None:
    """A terminal tells all processes of the sweep; `kill -INT` only the one that launches the others, and kills them."""
    begun, work = tmp_path / "begun", tmp_path / "work"
    work.mkdir()
    overrides = (f"hydra/launcher={launcher}", *WAITING, "+policy.at=-1,5", f"+policy.begun={begun}")
    process = start("-m", "sweep=long", *overrides, cwd=work)
    folder = work / "multirun" / "long"
    wait_for(lambda: begun.exists() and runs_of(folder), process)
    assert len(list(folder.glob("*at=5*/unfinished.json"))) == 1
    getattr(os, interrupt)(process.pid, signal.SIGINT)
    assert errors_at_end(process).splitlines()[-1] == (
        "interrupted; runs finished: 1, in multirun/long; the same command with sweep=long runs the others"
    )
    assert process.returncode == 130
    (finished,) = runs_of(folder)
    assert "at=-1" in finished
    assert {path.name for path in folder.iterdir()} == {"multirun.yaml", finished}


def test_workers_leave_ctrl_c_to_their_launcher() -> None:
    """One that is interrupted while it returns a result leaves the launcher waiting for the rest of it, for ever."""

    def handler() -> Any:
        job._leave_interrupts_to_the_launcher()
        return signal.getsignal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # ignored, if a shell runs the tests in the background

    assert Parallel(n_jobs=2)([delayed(handler)(), delayed(handler)()]) == [signal.SIG_IGN] * 2
    assert handler() is before


def test_submitit_runs_a_sweep_with_its_local_executor(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the sweep extra is not installed")
    done = new_process(
        "run", "-m", "sweep=jobs", "hydra/launcher=submitit_local", "policy=orca,sarathi", *QUICK, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert len(runs_of(tmp_path / "multirun" / "jobs")) == 2
    assert len(read_runs(tmp_path / "multirun" / "jobs")) == 2


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is installed, and this process's environment names no cluster and no tokens, which Ray keeps in the user's home."""
    pytest.importorskip("ray", reason="the sweep extra is not installed")
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


RAY_IS_SLOW = "The current node timed out during startup"
"""Ray's own deadline of 30 seconds, which nothing can change; on a busy machine another attempt is needed."""


@pytest.mark.usefixtures("ray")
def test_ray_runs_a_sweep_on_a_local_instance(tmp_path: Path) -> None:
    overrides = (
        "hydra/launcher=ray",
        "hydra.launcher.ray.init.address=local",
        "+hydra.launcher.ray.init.num_cpus=1",
        "+hydra.launcher.ray.init.include_dashboard=false",
        "policy=orca,sarathi",
        *QUICK,
    )
    for _ in range(10):
        done = new_process("run", "-m", "sweep=ray", *overrides, cwd=tmp_path)
        if RAY_IS_SLOW not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "multirun" / "ray"
    assert len(runs_of(folder)) == 2
    assert summary(folder / f"policy=orca,{','.join(sorted(QUICK))}")["about"]["policy"] == "orca"


CLUSTER = f"""
import sys, ray
for _ in range(10):
    try:
        address = ray.init(num_cpus=1, include_dashboard=False).address_info["address"]
        break
    except Exception as error:
        if {RAY_IS_SLOW!r} not in str(error):
            raise
        ray.shutdown()
print(address, flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("ray")
def test_ray_runs_a_sweep_on_a_running_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster was started in another folder, where its workers begin."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        cwd=elsewhere,
        env=environment(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as cluster:
        assert cluster.stdin is not None and cluster.stdout is not None
        monkeypatch.setenv("RAY_ADDRESS", cluster.stdout.readline().strip())
        done = new_process(
            "run", "-m", "sweep=ray", "hydra/launcher=ray_cluster", "policy=orca,sarathi", *QUICK, cwd=here
        )
        cluster.stdin.close()
    assert done.returncode == 0, done.stderr
    assert set(read_runs(here / "multirun" / "ray")["policy"]) == {"orca", "sarathi(chunk=256)"}
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("quoted", "same"),
    [
        ("policy='orca',slo=strict", "policy=orca,slo=strict"),
        ("policy='orca',workload='traces/x'", "policy=orca,workload=traces/x"),
    ],
)
def test_a_value_that_hydra_quotes_beside_others_has_the_folder_of_the_value(quoted: str, same: str) -> None:
    assert folder_name(quoted) == folder_name(same)


def test_quotes_that_make_a_text_of_a_value_tell_folders_apart() -> None:
    assert len({folder_name(f"p={value}") for value in ("null", "'null'", "1", "'1'", "True", "'True'")}) == 6


def test_folder_names_are_short_and_stay_apart() -> None:
    long = [f"policy.some_long_argument={'x' * 300}{number}" for number in range(2)]
    names = {folder_name(overrides) for overrides in (*long, "p=/a/x", "p=/b/x")}
    assert len(names) == 4
    assert all(len(name) < 200 and "/" not in name for name in names)
