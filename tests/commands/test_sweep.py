"""Sweeps: runs side by side by Hydra's launchers, a failing one among them, and going on after an interruption."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path

import pytest
from commands import IN_PLAN, QUICK, WAITING, command, environment, errors_at_end, new_process, start, wait_for

from experiments.arena import COMMAND as ARENA
from experiments.capacity.__main__ import COMMAND as CAPACITY
from experiments.job import RUN, Command, SweepProgress, folder_name, run_in_sweep
from experiments.run import main
from experiments.settings.compose import compose, compose_sweep
from experiments.settings.settings import Composed
from experiments.store.claim import ClaimedError, claimed
from experiments.store.run_folder import run_folders
from experiments.store.runs import read_runs
from experiments.sweep import claimed_sweep


def runs_of(folder: Path) -> dict[str, float]:
    """When each finished run of a sweep was written, by the name of its folder."""
    return {path.parent.name: path.stat().st_mtime for path in folder.glob("*/summary.json")}


def test_a_failing_run_does_not_end_the_others(tmp_path: Path) -> None:
    done = command("run", "-m", "sweep=part", "chunk=64,128,100000", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert len(runs_of(tmp_path / "multirun" / "part")) == 1
    *failures, last = done.stderr.splitlines()
    assert len(failures) == 2
    assert all(line.startswith("error: chunk=") for line in failures)
    assert last.startswith("error: 2 runs failed, see multirun/part/errors.log; the same command with sweep=part")
    assert len((tmp_path / "multirun" / "part" / "errors.log").read_text().splitlines()) == 2


def test_an_error_of_many_runs_is_printed_once_and_one_of_all_before_the_first(tmp_path: Path) -> None:
    """Policies and seeds do not matter: the first is of two settings that fit no run, the second of a value that no run can have."""
    sweep = ("run", "-m", "sweep=bad", "policy=orca,sarathi_serve", "seeds=2", *QUICK)
    error, last = command(*sweep, "max_tokens=4", cwd=tmp_path).stderr.splitlines()
    assert error.startswith("error: orca, seed=0: max_tokens=4 is below batch") and last.startswith("error: 4 runs")
    assert len((tmp_path / "multirun" / "bad" / "errors.log").read_text().splitlines()) == 4
    (tmp_path / "mine.py").write_text("class Raises:\n    def plan(self, view):\n        raise ValueError('no')\n")
    failing = command("run", "-m", "sweep=own", "policy=mine.Raises", "batch=4,8", "seeds=2", *QUICK, cwd=tmp_path)
    error, last = failing.stderr.splitlines()  # it names the folder of the first run
    assert re.search(r"error: batch=4, seed=0: .* raised ValueError: no .*batch=4.*seed=0.*unfinished.json$", error)
    [error] = command(*sweep, "hardware=h100,h20", cwd=tmp_path).stderr.splitlines()
    assert error.startswith("error: hardware=h20: no such profile") and not (tmp_path / "multirun" / "bad").exists()


def test_a_policy_that_cannot_be_built_is_an_error_before_the_first_run(tmp_path: Path) -> None:
    """Also in a pool, and with runs in other processes; a policy is built once for the check and once for its run."""
    text = (
        "from policies.orca import Orca\n\n\nclass Mine(Orca):\n    def __init__(self, at: int = 0):\n        1 / at\n"
    )
    (tmp_path / "mine.py").write_text(f"{text}        open('built', 'a').write('x')\n")
    swept = ("run", "-m", "sweep=two", "backend=sim", "seeds=2", *QUICK)
    pools = "backend.pools={a:{},b:{policy:{at:0}}}"
    for words in (
        (*swept, "policy=orca,mine.Mine"),
        (*swept, "policy=orca,mine.Mine", "hydra/launcher=joblib"),
        (*swept, "policy=mine.Mine(at=1)", pools),
        ("compare", "orca", "mine.Mine", "seeds=2", *QUICK),
    ):
        done = command(*words, cwd=tmp_path)
        [error] = done.stderr.splitlines()
        assert "mine.py, line 6: ZeroDivisionError" in error and "TTFT" not in done.stdout
        assert ("backend.pools.b: " in error) == (pools in words) and not [*tmp_path.glob("multirun/*/*")]
    assert command(*swept, "policy=orca,mine.Mine(at=1)", cwd=tmp_path).returncode == 0
    assert (tmp_path / "built").read_text() == "x" * 3  # of two seeds


def test_a_fault_of_several_lines_is_a_line_of_each_run_and_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(composed: Composed) -> None:
        raise ValueError("one\ntwo")

    for named in ("batch=4", "batch=8"):
        run_in_sweep(RUN._replace(read=read), tmp_path, False, SweepProgress(2, 0, 0.0), Composed({}, named=[named]))
    texts = [f"batch={batch}: ValueError: one two" for batch in (4, 8)]
    assert (tmp_path / "errors.log").read_text().splitlines() == texts
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {texts[0]}"]


@pytest.mark.parametrize(
    ("seconds", "done", "text"),
    [(60, 30, "30 of 90, 3 min left"), (7200, 20, "20 of 90, 14 h left"), (5, 10, "10 of 90"), (9, 90, "90 of 90")],
)
def test_a_sweep_says_how_far_it_is_and_what_is_left(seconds: float, done: int, text: str) -> None:
    """Ten of 90 runs had finished before; the speed is that of the others: 20 in 60 s, so 60 in 3 min, or 10 in 2 h, so 70 in 14 h."""
    assert SweepProgress(90, 10, time.time() - seconds).text(done) == text


def test_the_lines_of_a_sweep_name_what_varies(tmp_path: Path) -> None:
    """Four runs, then a run with all kinds of values beside one that shares its batch."""
    overrides = ["policy=orca,sarathi", "chunk=128,256", "batch=8", "backend=sim"]
    with chdir(tmp_path):
        sweep = compose_sweep(*overrides, "sweep=s")
    progress = SweepProgress(4, 0, 0.0, sweep.shared)
    labels = [progress.label(composed.named) for composed in sweep.jobs]
    assert labels == ["orca, chunk=128", "orca, chunk=256", "sarathi, chunk=128", "sarathi, chunk=256"]
    varying = [
        "pools={a:{batch:8,policy:{chunk:64}}}",
        "policy='slai(x=1)'",
        "router={_target_:mine.Aging,free:0.1}",
        "batch=8",
    ]
    assert progress.label(varying) == "slai(x=1), pools=a.batch=8,a.policy.chunk=64, router=mine.Aging(free=0.1)"
    assert progress.label(["batch=8"]) == ""


@pytest.mark.long
def test_a_policy_that_does_not_read_the_common_chunk_is_named_with_its_own(tmp_path: Path) -> None:
    """Before the first run, in its label, and in a note of the table; orca has no numbers. With its budget from the chunk nothing is said."""
    text = "def __init__(self, budget=512, age=0.5, seed=3): self.budget, self.age, self.seed = budget, age, seed"
    lines = [
        "from policies.orca import Orca",
        "class Own:",
        f" {text}",
        " def plan(self, view): return Orca().plan(view)",
    ]
    (tmp_path / "sized.py").write_text("\n".join(lines) + "\n")
    chunk, keys = ["chunk=128", "backend=sim"], ["workload.length=256", "workload.num_requests=8"]
    done = command("run", "-m", "sweep=s", "policy=orca,sarathi,sized.Own", *chunk, *keys, cwd=tmp_path)
    first, *table = done.stdout.splitlines()
    assert first == "chunk: not read by orca, sized.Own; 'policy=sized.Own(NAME=${chunk})' gives it to an argument"
    begins = [line.partition("  ")[0] for line in table]
    assert {"orca", "sarathi(chunk=128)", "Own(budget=512)"} <= {*begins}, "the whole numbers that it has by default"
    assert "chunk: not read by Own(budget=512)" in table, "whichever values were swept"
    fair = ["policy=sarathi,sized.Own(budget=${chunk})", *chunk]
    done = command("run", "-m", "sweep=t", *fair, *keys, cwd=tmp_path)
    assert "not read" not in done.stdout and "Own(budget=128)" in done.stdout
    done = command("run", "-m", "sweep=v", "policy=sarathi,sized.Own(budget=128)", *chunk, *keys, cwd=tmp_path)
    assert "not read" not in done.stdout and "Own(budget=128)" in done.stdout, "equal all the same"
    done = command("run", "-m", "sweep=u", "policy=sarathi,sized.Own", "backend=sim", *keys, cwd=tmp_path)
    assert "not read" not in done.stdout and "Own  " in done.stdout, "equal chunks were not asked for"


@pytest.mark.long
def test_a_sweep_names_the_runs_of_other_settings_in_its_folder(tmp_path: Path) -> None:
    """They are no part of how far it is; one command's run is not among them, since both have it."""
    assert command("run", "-m", "sweep=s", "chunk=128,256", *QUICK, cwd=tmp_path).returncode == 0
    done = command("run", "-m", "sweep=s", "chunk=256,384", *QUICK, cwd=tmp_path)
    assert done.stdout.startswith("multirun/s holds 1 run of other settings, which its table shows too\n")
    assert "; 2 of 2\n" in done.stdout
    again = command("run", "-m", "sweep=s", "chunk=128,256,384", *QUICK, cwd=tmp_path)
    assert "other settings" not in again.stdout


@pytest.mark.long
def test_a_table_has_the_order_of_the_latest_command_line(tmp_path: Path) -> None:
    """Also where it goes on with a sweep, whose finished runs had other places; sorted by name, orca would be first."""
    for policies in (["vtc", "orca"], ["sarathi_serve(chunk=256)", "vtc", "orca"]):
        names = [name.partition("(")[0] for name in policies]
        assert command("run", "-m", "sweep=s", f"policy={','.join(names)}", *QUICK, cwd=tmp_path).returncode == 0
        runs = read_runs(tmp_path / "multirun" / "s")
        assert runs["policy"].to_list() == policies
    assert runs["chunk"].fillna(0).to_list() == [256, 0, 0], "vtc and orca read no chunk"


def test_runs_and_sweeps_do_not_lie_in_each_other(tmp_path: Path) -> None:
    for sweep in ("grid", "outer/inner"):
        assert command("run", "-m", f"sweep={sweep}", "chunk=128", *QUICK, cwd=tmp_path).returncode == 0
    (run,) = (tmp_path / "multirun" / "grid").glob("chunk*")
    before = sorted(tmp_path.rglob("*"))
    within = run.relative_to(tmp_path)
    for *sweeps, named in (
        ["output=multirun/grid"],
        ["output=multirun/grid/more"],
        [f"output='{within}/more'"],
        ["-m", f"sweep='grid/{run.name}'"],
        ["-m", "sweep=grid/more"],
        ["-m", "sweep=outer"],
    ):
        done = command("run", *sweeps, named, *QUICK, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {named.partition('=')[0]}=")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("begun", "refused"), [("s", "s/more"), ("s/more", "s")])
def test_a_sweep_is_not_begun_in_or_around_one_that_has_not_composed_its_runs_yet(
    begun: str, refused: str, at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """at_once: the other one begins after the last look for it, and before this one is known."""
    other = Path("multirun", begun)

    @contextmanager
    def claimed_late(folder: Path, of: str) -> Iterator[None]:
        with claimed(other, of), claimed(folder, of):
            yield

    with chdir(tmp_path), ExitStack() as stack:
        if at_once:
            monkeypatch.setattr("experiments.sweep.claim.claimed", claimed_late)
        else:
            stack.enter_context(claimed_sweep([f"sweep={begun}"]))
        with pytest.raises(ClaimedError, match=f"^{other}: is in use"), claimed_sweep([f"sweep={refused}"]):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["sweep=a/b"]])
def test_a_sweep_that_ends_before_its_first_run_leaves_no_folder(arguments: list[str], tmp_path: Path) -> None:
    with chdir(tmp_path), claimed_sweep(arguments):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="signals are sent to a process group")
@pytest.mark.parametrize(
    ("launcher", "sent", "said", "status"),
    [
        ("basic", signal.SIGINT, IN_PLAN, 130),
        ("basic", signal.SIGTERM, r"terminated; see .*unfinished\.json", 143),
        ("joblib", signal.SIGINT, "interrupted", 130),
    ],
)
def test_a_signal_keeps_finished_runs_and_says_how_to_go_on(
    tmp_path: Path, launcher: str, sent: signal.Signals, said: str, status: int
) -> None:
    """A terminal tells all processes of the sweep."""
    begun, work = tmp_path / "begun", tmp_path / "work"
    work.mkdir()
    overrides = (f"hydra/launcher={launcher}", *WAITING, "+policy.at=-1,5", f"+policy.begun={begun}")
    process = start("-m", "sweep=long", *overrides, cwd=work)
    folder = work / "multirun" / "long"
    wait_for(lambda: begun.exists() and run_folders(folder), process)
    assert len(list(folder.glob("*at=5*/unfinished.json"))) == 1
    os.killpg(process.pid, sent)
    advice = f"{said}; runs finished: 1, in multirun/long; the same command with sweep=long runs the others"
    assert re.search(f"^{advice}$", errors_at_end(process), re.M), "a worker of joblib may warn after it"
    assert process.returncode == status
    (finished,) = runs_of(folder)
    assert "at=-1" in finished
    left = {path.name for path in folder.iterdir()} - {"multirun.yaml", finished}
    assert not left or sent is signal.SIGTERM, "joblib's launcher kills its workers"
    assert all((folder / name / "unfinished.json").is_file() for name in left)


def test_an_interruption_while_the_table_is_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(folder: Path) -> str:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    assert main(["-m", "sweep=s", "policy=orca", *QUICK], RUN._replace(table=interrupt)) == 130
    assert capsys.readouterr().err.startswith("\ninterrupted; runs finished: 1, in multirun/s; ")


LAUNCHERS = {
    "submitit_local": (),
    "ray": ("hydra.launcher.ray.init.address=local", "+hydra.launcher.ray.init.include_dashboard=false"),
    "ray_cluster": (),
}
CLUSTER = """
import sys, ray
print(ray.init(num_cpus=1, include_dashboard=False).address_info["address"], flush=True)
sys.stdin.read()
"""


@contextmanager
def ray_cluster(folder: Path) -> Iterator[str]:
    """Runs a cluster whose workers begin in a folder; yields its address."""
    python, pipe = [sys.executable, "-c", CLUSTER], subprocess.PIPE
    with subprocess.Popen(python, cwd=folder, env=environment(), text=True, stdin=pipe, stdout=pipe) as cluster:
        assert cluster.stdin is not None and cluster.stdout is not None
        yield cluster.stdout.readline().strip()
        cluster.stdin.close()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_other_launchers_run_a_sweep(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--slow"):
        pytest.skip("--slow: takes a minute")
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray keeps a token in the user's home
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    with ExitStack() as stack:
        if launcher == "ray_cluster":
            monkeypatch.setenv("RAY_ADDRESS", stack.enter_context(ray_cluster(elsewhere)))
        overrides = ("sweep=s", f"hydra/launcher={launcher}", *LAUNCHERS[launcher], "policy=orca,sarathi", *QUICK)
        done = new_process("run", "-m", *overrides, cwd=here)
    assert done.returncode == 0, done.stderr
    assert set(read_runs(here / "multirun" / "s")["policy"]) == {"orca", "sarathi(chunk=256)"}
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
    name = compose("+policy.x=1", "workload=open_loop", "workload.arrivals.rate=4", "workload.seed=3").name
    assert name == "x=1,rate=4,workload.seed=3,workload=open_loop", "there is also seed="
    pools = folder_name("pools={large:{batch:8,policy:{chunking:{chunk:64}}},small:{}},chunk=2")
    assert pools.startswith("pools=large.batch=8,large.policy.chunking.chunk=64,small,chunk=2,~")
    assert {folder_name(f"policy={text},y=2") for text in ("'slai(x=1)'", "slai(x=1)")} == {"policy=slai_x=1,y=2"}
    routers = ("_target_:mine.Aging,free:0.1", "_target_: mine.Aging, free: 0.1", "_target_:mine.Other")
    assert [folder_name(f"router={{{text}}},y=2") for text in routers] == [
        *["router=mine.Aging_free=0.1,y=2"] * 2,
        "router=mine.Other,y=2",
    ]
    names = {folder_name(overrides) for overrides in (*long, "p=/a/x", "p=/b/x")}
    assert len(names) == 4
    assert all(len(name) < 200 and "/" not in name for name in names)


@pytest.mark.parametrize("command", [RUN, CAPACITY, ARENA], ids=["run", "capacity", "arena"])
def test_other_processes_can_load_what_a_launcher_sends_them(command: Command) -> None:
    # a class of a module that is run is sent field by field, and is another class where it arrives
    assert b"__main__" not in pickle.dumps(command)
