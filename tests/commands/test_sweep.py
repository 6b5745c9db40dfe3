"""Sweeps: runs side by side by Hydra's launchers, a failing one among them, and going on after an interruption."""

import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml
from commands import QUICK, WAITING, command, environment, errors_at_end, new_process, start, summary, wait_for
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.conf import HydraConf, SweepDir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from joblib import Parallel, delayed
from omegaconf import DictConfig

from cbatch import ConfigError
from experiments import job
from experiments.job import folder_name, may_exist, objective_of, run_job
from experiments.settings.error_lines import one_line
from experiments.store.claim import claimed
from experiments.store.provenance import write_json
from experiments.store.run_folder import remove_killed
from experiments.store.tables import load
from experiments.sweep import how_to_resume

GRID = ("-m", "sweep=grid", "policy=orca,sarathi", "chunk=128,256", *QUICK)


def runs_of(folder: Path) -> dict[str, float]:
    """When each finished run of a sweep was written, by the name of its folder."""
    return {path.parent.name: path.stat().st_mtime for path in folder.glob("*/summary.json")}


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = new_process("run", *GRID, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "SIMULATED with profile h200" in first.stdout
    folder = tmp_path / "multirun" / "grid"
    before = runs_of(folder)
    assert len(before) == 4
    half_written, untouched = sorted(before)[:2]
    (folder / half_written / "summary.json").rename(folder / half_written / ".summary.json")  # killed while it wrote

    second = command("run", *GRID, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("finished before") == 3
    after = runs_of(folder)
    assert after.keys() == before.keys()
    assert after[half_written] > before[half_written]
    assert after[untouched] == before[untouched]

    third = command("run", *GRID, "batch=4", "workload.batch=4", cwd=tmp_path)  # other settings are other runs
    assert third.stdout.count("finished before") == 0
    assert len(runs_of(folder)) == 8
    frame = load(folder)
    assert len(frame) == 8
    table = third.stdout.partition("\nrun ")[2].splitlines()[2:]
    names = [
        f"{name}, batch={batch}, workload.batch={batch}" for name in sorted(set(frame["name"])) for batch in (4, 18)
    ]
    assert sorted(line.partition("  ")[0] for line in table[:6]) == sorted(names)
    says = "2 runs not shown: each differs from another run only in chunk, which orca does not read"
    assert table[6] == says and len([line for line in table if line.startswith("  ")]) == 2
    assert set(frame["name"]) == {"orca", "sarathi 128", "sarathi 256"}


def test_a_failing_run_does_not_end_the_others(tmp_path: Path) -> None:
    done = new_process(
        "run",
        "-m",
        "sweep=part",
        "chunk=0,128,100000",
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


def test_a_run_is_composed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was checked before the first run is what runs: composing takes longer than a small simulation."""
    composed, compose = [], ConfigLoaderImpl.load_sweep_config

    def counted(loader: ConfigLoaderImpl, config: DictConfig, overrides: list[str]) -> DictConfig:
        composed.append(overrides)
        return compose(loader, config, overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", counted)
    assert command("run", "-m", "sweep=once", "chunk=128,256", *QUICK, cwd=tmp_path).returncode == 0
    assert [overrides[1] for overrides in composed] == ["chunk=128", "chunk=256"]
    runs = {path.name: summary(path)["about"]["chunk"] for path in (tmp_path / "multirun" / "once").glob("chunk=*")}
    assert sorted(runs.values()) == [128, 256] and all(f"chunk={chunk}" in name for name, chunk in runs.items())


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
        summary(run)["about"]["chunk"]: summary(run)["throughput"]["total_tokens_per_second"]
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


def test_an_unknown_objective_is_named_with_the_nearest_ones(tmp_path: Path) -> None:
    done = search(tmp_path, "256", "throughput.total_tokens")
    assert done.returncode == 2
    assert "has no such number; did you mean throughput.total_tokens_per_second or" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("summary.json"))  # found before the first run
    assert search(tmp_path, "256", "null").stderr.endswith(
        "error: objective=null: this sweeper needs a figure of summary.json; give one, as objective=ttft_seconds.p99\n"
    )


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


def test_a_sweep_without_runs_is_an_error_and_leaves_no_folder(tmp_path: Path) -> None:
    done = command("run", "-m", "sweep=none", "batch=glob(*)", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the sweep holds no run; glob(...) chooses")
    assert not (tmp_path / "multirun").exists()
    shown = command("run", "-m", "sweep=none", "--help", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")


@pytest.mark.parametrize("option", ["-m", "--multirun", "--multi"])
def test_a_sweep_ends_with_its_errors_however_it_is_asked_for(tmp_path: Path, option: str) -> None:
    done = command("run", option, "sweep='two words'", "chunk=0", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: 1 run failed, see multirun/two words/errors.log")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hydra.run.dir=elsewhere", "hydra.run.dir: has no effect here; give output=FOLDER"),
        ("hydra.sweep.dir=elsewhere", "hydra.sweep.dir: has no effect here; give -m and sweep=NAME"),
        ("hydra.mode=MULTIRUN", "hydra.mode: has no effect here; give -m for a sweep"),
        ("sweep=", "sweep=: is not a name; give one, without commas or ${...}"),
        (
            "sweep=../../first",
            "sweep=../../first: is not below multirun/, where sweeps are; give a name without .. or ",
        ),
        ("sweep=/tmp/first", "sweep=/tmp/first: is not below multirun/, where sweeps are; give a name without .. or "),
        ("sweep=.", "sweep=.: is not below multirun/, where sweeps are; give a name without .. or "),
        ("sweep=first,second", "sweep=first,second: is not a name; give one, without commas or ${...}"),
    ],
)
def test_a_sweep_has_one_name_and_one_folder(tmp_path: Path, override: str, message: str) -> None:
    done = command("run", "-m", override, *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


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


def test_a_sweep_that_cannot_be_composed_leaves_nothing(tmp_path: Path) -> None:
    done = command("run", "-m", "sweep=a/b", "policy=orca,sarathy", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: policy=sarathy: no such policy; did you mean sarathi?")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("swept", "message"),
    [
        ("policy=orca,sarathi,twoqueue.TwoQueues", "policy._target_=twoqueue.TwoQueues: twoqueue cannot be imported ("),
        ("policy=orca,'policies.orca.Orca(budget=3)'", "policy.budget: policies.orca.Orca takes no such argument; "),
        (
            "policy=orca,sarathi workload=trace workload.path=no",
            "workload.path=no: no such file; a relative path begins",
        ),
        ("workload=closed,sharegpt(lengths.path=no)", "workload.lengths.path=no: no such file; "),
        (
            "policy=orca,sarathi workload=trace workload.path={bad}",
            "{bad}, line 3: num_decode_tokens='x': must be a whole",
        ),
        (
            "workload=closed,sharegpt(lengths.path={bad})",
            "{bad}, line 3: num_decode_tokens='x': must be a whole number",
        ),
        ("workload=closed,prompts(path={bad})", "{bad}, line 1: 'num_prefill_tokens,num_decode_tokens' is not JSON"),
        ("workload=closed,sharegpt", "workload.lengths.path: has no value; give workload.lengths.path=..."),
        (
            "backend=sim backend.router._target_=cbatch.cluster.RoundRobin,mine.Router",
            "backend.router._target_=mine.Router: mine cannot be imported (",
        ),
    ],
)
def test_what_the_last_run_of_a_sweep_lacks_is_said_before_the_first(tmp_path: Path, swept: str, message: str) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("num_prefill_tokens,num_decode_tokens\n5,5\n5,x\n")
    done = command("run", "-m", "sweep=s", *swept.format(bad=bad).split(), "workload.num_requests=4", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message.format(bad=bad)}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [bad]


def test_an_interrupted_sweep_without_a_run_names_no_folder() -> None:
    """It removes its folder."""
    assert how_to_resume("early", 0) == "no run had finished; the same command with sweep=early runs them"


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


def test_only_what_killed_runs_of_this_sweep_left_is_removed(tmp_path: Path) -> None:
    now = datetime.now().astimezone()
    state = {"status": "begun", "process": 1, "host": "vm", "begun": f"{now:%Y-%m-%dT%H:%M:%S%z}"}
    for name, difference in {
        "killed": {},
        "earlier": {"begun": f"{now - timedelta(minutes=1):%Y-%m-%dT%H:%M:%S%z}"},
        "failed": {"status": "failed"},
        "complete": {},
    }.items():
        write_json(tmp_path / name / "unfinished.json", state | difference)
        (tmp_path / name / "config.yaml").touch()
    write_json(tmp_path / "complete" / "summary.json", {"about": {}})
    (tmp_path / "empty").mkdir()
    (tmp_path / "errors.log").touch()
    with claimed(tmp_path / "alive"):
        remove_killed(tmp_path, since=now)
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {"alive", "earlier", "failed", "complete", "errors.log"}


def test_submitit_runs_a_sweep_with_its_local_executor(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the sweep extra is not installed")
    done = new_process(
        "run", "-m", "sweep=jobs", "hydra/launcher=submitit_local", "policy=orca,sarathi", *QUICK, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert len(runs_of(tmp_path / "multirun" / "jobs")) == 2
    assert len(load(tmp_path / "multirun" / "jobs")) == 2


@pytest.mark.skipif(shutil.which("srun") is not None, reason="Slurm is installed")
def test_a_sweep_on_slurm_where_there_is_none(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the sweep extra is not installed")
    done = new_process("run", "-m", "hydra/launcher=submitit_slurm", "policy=orca,sarathi", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and line.endswith('Could not detect "srun", are you indeed on a slurm cluster?')
    assert list(tmp_path.iterdir()) == []


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
    assert set(load(here / "multirun" / "ray")["policy"]) == {"orca", "sarathi"}
    assert not list(elsewhere.iterdir())


def test_a_cluster_that_does_not_answer_is_named() -> None:
    message = one_line(ConnectionError("Failed to connect to Ray cluster at host:1"))
    assert message is not None
    assert message.startswith(
        "hydra/launcher=ray_cluster: Failed to connect to Ray cluster at host:1; start one with ray"
    )


def test_a_worker_that_does_not_see_the_folder_of_the_sweep_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = SweepDir(dir=str(tmp_path / "multirun" / "long"))
    hydra = HydraConf(mode=RunMode.MULTIRUN, sweep=sweep)
    monkeypatch.setattr(HydraConfig, "get", lambda: hydra)
    with pytest.raises(ConfigError, match=r"multirun/long: not shared with .*; give the command in a folder that all"):
        run_job(DictConfig({}))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("chunk=256,policy=sarathi", "chunk=256,policy=sarathi"),
        ("", "run"),
        ("workload.path=/data/traces/azure.csv", "workload.path=azure.csv,~"),
        ("a=b c", "a=b_c,~"),
    ],
)
def test_folder_names_are_readable(overrides: str, expected: str) -> None:
    assert folder_name(overrides).startswith(expected)


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
