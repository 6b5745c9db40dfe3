"""A folder belongs to one process at a time: claims, what ends them, and commands that are started at the same moment."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import pytest
from commands import QUICK, command, environment, summary

from experiments import serve
from experiments.store.claim import ClaimedError, check_free, claimed, make_new_folder

HERE = socket.gethostname()
HOLD = "import sys; from pathlib import Path; from experiments.store.claim import claimed\nwith claimed(Path(sys.argv[1])): print(flush=True); input()"


def test_a_claim_lasts_until_its_process_ends_even_if_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        for look in (lambda: check_free(folder), lambda: claimed(folder).__enter__()):
            with pytest.raises(ClaimedError) as caught:
                look()
            assert str(caught.value).startswith(f"{folder}: is in use since 2")
            assert str(caught.value).endswith(
                f"by process {holder.pid} on {HERE}; wait for its end, or give another name"
            )
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # its parent need not take notice
        check_free(folder)
        assert json.loads((folder / "unfinished.json").read_text())["status"] == "begun"
        with claimed(folder) as claim:
            assert json.loads((folder / "unfinished.json").read_text()) == claim
            assert (claim["process"], claim["host"]) == (os.getpid(), HERE)
    assert list(folder.iterdir()) == []


def at_once(num: int, do: Callable[[], Any]) -> list[Any]:
    """Calls `do` in several threads at the same moment; returns the results, None for those that raised ClaimedError."""
    start = threading.Barrier(num)

    def one(_: int) -> Any:
        start.wait()
        try:
            return do()
        except ClaimedError:
            return None

    with ThreadPoolExecutor(num) as threads:
        return list(threads.map(one, range(num)))


def test_of_several_at_the_same_moment_one_gets_the_claim(tmp_path: Path) -> None:
    for attempt in range(5):
        done = threading.Barrier(6)

        def hold(folder: Path = tmp_path / str(attempt), done: threading.Barrier = done) -> bool:
            try:
                with claimed(folder):
                    done.wait()
                    return True
            except ClaimedError:
                done.wait()
                raise

        assert at_once(6, hold).count(True) == 1
        assert list(tmp_path.iterdir()) == []


def test_folders_created_at_the_same_moment_are_different(tmp_path: Path) -> None:
    folders = at_once(6, lambda: make_new_folder(tmp_path / "a" / "b" / "run"))
    assert {folder.name for folder in folders} == {"run", *(f"run_{number}" for number in range(2, 7))}


def test_a_run_that_ended_meanwhile_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command twice: the second is past its first look at the folder when the first ends."""
    arguments = ("run", "output=out", "progress=off", *QUICK)
    assemble = serve.assemble

    def run_the_first(*given: Any, **options: Any) -> Any:
        monkeypatch.undo()
        assert command(*arguments, cwd=tmp_path).returncode == 0
        return assemble(*given, **options)

    monkeypatch.setattr("experiments.serve.assemble", run_the_first)
    done = command(*arguments, cwd=tmp_path)
    said = "error: out contains this run already; choose another folder with output=\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert summary(tmp_path / "out")["run"]["requests"] == 20
    assert not (tmp_path / "out" / "unfinished.json").exists()


def test_a_run_of_a_sweep_waits_for_a_worker_that_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with equal proposals of a search side by side, or workers that survived the command that started them."""
    folder = tmp_path / "multirun" / "one" / "chunk=128,length=256,num_requests=20"
    worker = claimed(folder)
    worker.__enter__()
    clock = SimpleNamespace(time=time, sleep=lambda _: worker.__exit__(None, None, None))
    monkeypatch.setattr("experiments.job.time", clock)
    done = command("run", "-m", "sweep=one", "chunk=128", *QUICK, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{folder.name}: waits for process {os.getpid()} on {HERE}, which runs it\n")
    assert summary(folder)["about"]["chunk"] == 128
