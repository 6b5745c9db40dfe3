"""Whatever fails in mid-run: finished results stay, the folder says what happened, every request and block is accounted for, the status is not 0."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from commands import (
    PATIENCE,
    QUICK,
    WAITING,
    command,
    environment,
    errors_at_end,
    largest_file,
    new_process,
    start,
    wait_for,
)
from contended import BLOCK, LIMITS, NUM_BLOCKS, LinearCost, requests, simulated
from inventory import take_inventory
from schedules import UnitCost
from tiny_models import LLAMA, greedy_references, make_executor

from cbatch import Engine, Executor, Policy, Request
from cbatch.runtime.attention import ReferenceAttention
from experiments.store.decisions_file import read_decisions
from policies.orca import Orca
from policies.prefill_first import PrefillFirst

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and limits of processes")


class Fault(Exception):  # noqa: N818 - it is what it is
    pass


class Failing:
    """Does what a policy or an executor does, and fails at the given call of one of its methods."""

    def __init__(self, inner: Any, method: str, call: int) -> None:
        self.inner, self.method, self.calls_left = inner, method, call

    def __getattr__(self, name: str) -> Any:
        if name != self.method:
            return getattr(self.inner, name)
        return partial(self.fail_or, getattr(self.inner, name, lambda *arguments: None))

    def fail_or(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise Fault
        return method(*arguments)


def check_inventory_after_failure(
    policy: Policy, executor: Executor, asynchronous: bool, chosen: list[Request]
) -> tuple[int, ...]:
    """Returns what adds up: requests by where they are, and blocks."""
    engine = Engine(
        policy, executor, LIMITS, LinearCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK, asynchronous=asynchronous
    )
    engine.submit(chosen)
    with pytest.raises(Exception, match=r"Fault|^$"):
        engine.run()
    inventory = take_inventory([engine], chosen)
    assert inventory.num_requests == len(chosen)
    assert inventory.num_blocks == NUM_BLOCKS
    assert inventory.served + inventory.rejected == sum(request.finished_at is not None for request in chosen)
    assert inventory.iterations == len(engine.record.steps)
    return inventory


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("method", ["plan", "on_arrival", "on_wait", "on_step", "on_finish", "launch", "wait"])
def test_inventory_adds_up_wherever_a_run_fails(method: str, asynchronous: bool) -> None:
    seen = set()
    for call in range(0, 60, 3) if method not in ("on_arrival", "on_wait", "on_finish") else range(12):
        policy: Any = PrefillFirst(watermark=0.0)
        executor: Any = simulated()
        if method in ("launch", "wait"):
            executor = Failing(executor, method, call)
        else:
            policy = Failing(policy, method, call)
        try:
            seen.add(check_inventory_after_failure(policy, executor, asynchronous, requests()))
        except pytest.fail.Exception:
            break  # the run ended before
    assert len(seen) > 9


@pytest.mark.long
@pytest.mark.parametrize("error", [Fault(), MemoryError("no memory left")], ids=["raises", "out of memory"])
def test_inventory_adds_up_when_the_model_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    attend = ReferenceAttention.__call__

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 21:
            raise error
        return attend(*args, **kwargs)

    monkeypatch.setattr(ReferenceAttention, "__call__", fail)
    executor = make_executor(LLAMA, LIMITS, NUM_BLOCKS, BLOCK)
    engine = Engine(Orca(), executor, LIMITS, UnitCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK)
    chosen = [reference.request(id_, 16) for id_, reference in enumerate(greedy_references(LLAMA)[:6])]
    engine.submit(chosen)
    with pytest.raises(Exception, match=f"stream 'compute' failed: {type(error).__name__}"):
        engine.run()
    executor.close()
    inventory = take_inventory([engine], chosen)
    assert (inventory.num_requests, inventory.num_blocks) == (6, NUM_BLOCKS)
    assert inventory.in_flight > 0 and inventory.iterations == 10  # two layers, ten whole iterations


# -- what the folder says ---------------------------------------------------------------------------------------------


def run(folder: Path, *arguments: str, status: int = 2) -> str:
    """Runs the command line in this process; returns its one line of complaint."""
    ended = command("run", *arguments, cwd=folder)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (status, int(bool(status))), ended
    return ended.stderr.strip()


def unfinished(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "unfinished.json").read_text())  # type: ignore[no-any-return]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


MOODY = """
import os
from policies.orca import Orca

class Moody(Orca):
    def __init__(self, at):
        self.at = at

    def plan(self, view):
        self.feel(view)
        return super().plan(view)

    def feel(self, view):
        if view.iteration == self.at:
            raise ValueError("a mood")
"""


def test_a_failed_run_says_why_and_can_be_run_again(tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(MOODY)
    arguments = ("policy=moody.Moody", "output=out", "decisions=true", *QUICK)
    assert (
        run(tmp_path, *arguments, "+policy.at=7")
        == "error: policy Moody, iteration 7: plan() raised ValueError: a mood (moody.py:15); see out/unfinished.json"
    )
    assert names(tmp_path / "out") == {"config.yaml", "unfinished.json", "decisions.jsonl.gz"}
    told = unfinished(tmp_path / "out")
    assert told["status"] == "failed"
    assert told["error"] == "policy Moody, iteration 7: plan() raised ValueError: a mood (moody.py:15)"
    assert 'raise ValueError("a mood")' in "".join(told["traceback"])
    assert len(read_decisions(tmp_path / "out" / "decisions.jsonl.gz")[0].recorded.events) > 10

    run(tmp_path, *arguments, "+policy.at=-1", status=0)
    assert "summary.json" in names(tmp_path / "out") and "unfinished.json" not in names(tmp_path / "out")


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ("run output=new/out", "choose another folder with output="),
        ("run -m sweep=s policy=orca,sarathi", "choose another name with sweep="),
        ("capacity policy=orca workload=open_loop slo.ttft=1 output=new/out", "choose another folder with output="),
        ("arena policy=orca workload=open_loop", "choose another name with sweep="),
        ("compare orca sarathi csv=new/a.csv", "give csv=FILE in another folder"),
        ("plot table . output=new/t.md", "give output=FILE in another folder"),
        ("bench settings=backend=sim folder=new", "give another folder="),
        ("profile model=tiny backend=cpu output=new/p.json", "give output=FILE in another folder"),
    ],
)
def test_a_full_disk_is_found_before_the_work(arguments: str, remedy: str, tmp_path: Path) -> None:
    """No file can be written at all: nothing is printed, such as what a run chooses, and nothing is left."""
    with largest_file(0):
        ended = command(*arguments.split(), cwd=tmp_path)
    assert (ended.returncode, ended.stdout, [*tmp_path.iterdir()]) == (2, "", [])
    assert ended.stderr.endswith(f" cannot be written (File too large); {remedy}\n") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("decisions", ["on", "off"])
def test_a_full_disk_leaves_no_half_results(tmp_path: Path, decisions: str) -> None:
    """Files may not grow beyond 8 kB: with decisions the run is stopped by them, without by its first table."""
    with largest_file(8192):
        error = run(
            tmp_path, "output=out", f"decisions={decisions}", "workload.length=256", "workload.num_requests=200"
        )
    file = "/decisions.jsonl.gz" if decisions == "on" else ""
    assert error.startswith(f"error: out{file}: File too large; make room, or ")
    assert "summary.json" not in names(tmp_path / "out") and "steps.csv" not in names(tmp_path / "out")
    assert unfinished(tmp_path / "out")["status"] == "failed"


def test_a_full_disk_in_a_sweep_names_a_key_of_sweeps(tmp_path: Path) -> None:
    with largest_file(8192):
        ended = command("run", "-m", "sweep=s", "workload.length=256", "workload.num_requests=200", cwd=tmp_path)
    assert "make room, or choose another name with sweep=\n" in ended.stderr and "output=" not in ended.stderr


@pytest.mark.long
def test_names_that_are_no_unicode_are_escaped(tmp_path: Path) -> None:
    """A file named in Latin-1, half a surrogate pair as a client, and a terminal of ASCII."""
    name = os.fsdecode(b"caf\xe9")
    row = {"timestamp": 0, "input_length": 9, "output_length": 5, "client": "\ud800x"}
    (tmp_path / name).write_text(json.dumps(row))
    trace = ("workload=trace", f"workload.path='{name}'", "workload.columns={client: client}")
    with patch.dict(os.environ, PYTHONIOENCODING="ascii"):
        ended = new_process("run", *trace, f"output='{name}_out'", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "") and r"results: caf\udce9_out" in ended.stdout
    assert r",\ud800x," in (tmp_path / f"{name}_out" / "requests.csv").read_text()


@pytest.mark.long
def test_output_that_cannot_be_written_loses_no_run(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "experiments.run", "-m", "policy=orca,request_level", "sweep=full", *QUICK]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            arguments, cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    says = "error: standard output: No space left on device; send it elsewhere; finished results are kept\n"
    assert (ended.returncode, ended.stderr) == (2, says)
    assert len(list(tmp_path.glob("multirun/full/*/summary.json"))) == 1
    assert not (tmp_path / "multirun" / "full" / "errors.log").exists()


@pytest.mark.long
def test_sigterm_ends_a_run_with_its_folder_saying_so(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    process = start(*WAITING, "+policy.at=5", f"+policy.begun={begun}", "output=out", cwd=tmp_path)
    wait_for(begun.exists, process)
    assert unfinished(tmp_path / "out")["status"] == "begun"
    assert unfinished(tmp_path / "out")["process"] == process.pid
    process.terminate()
    errors = errors_at_end(process)
    assert (process.returncode, errors) == (143, "terminated; see out/unfinished.json\n")
    told = unfinished(tmp_path / "out")
    assert told["status"] == "terminated"
    assert names(tmp_path / "out") == {"config.yaml", "unfinished.json"}


def runs_on(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


@pytest.mark.long
def test_workers_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """Both workers wait in a run, and further runs are queued."""
    begun = tmp_path / "begun"
    sweep = ("-m", "sweep=long", *WAITING, "+policy.at=5", f"+policy.begun={begun}", "seed=0,1,2,3,4,5")
    process = start(*sweep, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", cwd=tmp_path)
    wait_for(begun.exists, process)
    folders = tmp_path / "multirun" / "long"
    wait_for(lambda: len(list(folders.glob("*/unfinished.json"))) == 2, process)
    workers = {unfinished(path.parent)["process"] for path in folders.glob("*/unfinished.json")}
    process.kill()
    process.wait()
    end = time.monotonic() + PATIENCE
    while any(map(runs_on, workers)):
        assert time.monotonic() < end, "a worker goes on"
        time.sleep(0.1)
    assert "terminated" in {unfinished(path.parent)["status"] for path in folders.glob("*/unfinished.json")}


@pytest.mark.long
def test_a_killed_worker_leaves_finished_runs_and_its_folder_behind(tmp_path: Path) -> None:
    killer = MOODY.replace('raise ValueError("a mood")', "os.kill(os.getpid(), 9)")
    (tmp_path / "moody.py").write_text(killer)
    sweep = ("-m", "sweep=grid", "policy=moody.Moody", "+policy.at=-1,9", *QUICK)
    process = start(*sweep, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", cwd=tmp_path)
    errors = errors_at_end(process)
    assert process.returncode == 2
    assert any(line.startswith("error: a worker process was killed") for line in errors.splitlines())
    (killed,) = (path for path in (tmp_path / "multirun" / "grid").iterdir() if "at=9" in path.name)
    assert unfinished(killed)["status"] == "begun"
    finished = {path.parent: path.read_text() for path in (tmp_path / "multirun" / "grid").glob("*/summary.json")}

    (tmp_path / "moody.py").write_text(killer.replace("== self.at", "is None"))
    assert command("run", *sweep, "other_code=keep", cwd=tmp_path).returncode == 0
    assert len(list((tmp_path / "multirun" / "grid").glob("*/summary.json"))) == 2
    assert all((folder / "summary.json").read_text() == text for folder, text in finished.items())
