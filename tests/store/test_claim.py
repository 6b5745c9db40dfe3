"""A folder belongs to one process at a time: claims, what ends them, and commands that are started at the same moment."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from commands import PATIENCE, QUICK, ROOT, command, environment, summary

from experiments.store.claim import ClaimedError, claimed, make_new_folder, release, take
from experiments.store.provenance import atomic_write
from experiments.store.run_folder import open_run_folder

HERE = socket.gethostname()


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def written(path: Path, **changes: Any) -> Path:
    """Writes the claim of this process, with changes."""
    claim = take(path)
    release(path, claim)
    path.write_text(json.dumps({**claim, **changes}))
    return path


def test_the_file_to_remove_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    path = written(tmp_path / "my runs" / "claim", host="node7")
    with pytest.raises(ClaimedError, match=rf"if it has ended, remove '{path}'$"):
        take(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "by process {pid} on {host}; wait for its end, or give another name"),
        ({"host": "node7"}, "by process {pid} on node7; if it has ended, remove {path}"),
        ({"container": "pid:[1]"}, "by process {pid} on {host}; if it has ended, remove {path}"),
        ({"host": "node7", "boot": "another"}, "by process {pid} on node7; if it has ended, remove {path}"),
    ],
    ids=["this process", "another host", "another container", "another host's boot"],
)
def test_a_claim_that_may_be_of_a_live_process_is_never_taken_over(
    tmp_path: Path, changes: dict[str, str], says: str
) -> None:
    path = written(tmp_path / "run" / "claim", **changes)
    before = path.read_text()
    with pytest.raises(ClaimedError) as caught:
        take(path)
    assert str(caught.value).startswith(f"{path.parent}: is in use since 2")
    assert str(caught.value).endswith(says.format(pid=os.getpid(), host=HERE, path=path))
    assert path.read_text() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"process": "gone"},
        {"tick": "1"},
        {"boot": "an earlier one"},
        {"boot": "an earlier one", "container": "pid:[1]"},
        {"status": "failed"},
        {"status": "terminated", "host": "node7"},
    ],
    ids=[
        "ended",
        "number used again",
        "before a restart",
        "container before a restart",
        "failed",
        "terminated elsewhere",
    ],
)
def test_a_claim_that_has_ended_is_taken_over(tmp_path: Path, gone: int, changes: dict[str, Any]) -> None:
    path = written(tmp_path / "claim", **{**changes, **({"process": gone} if "process" in changes else {})})
    mine = take(path)
    assert json.loads(path.read_text()) == mine
    assert (mine["status"], mine["process"], mine["host"]) == ("begun", os.getpid(), HERE)
    release(path, mine)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_its_parent_has_not_taken_notice_of_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        path = written(tmp_path / "claim", process=process.pid, tick=_tick(process.pid))
        with pytest.raises(ClaimedError):
            take(path)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        take(path)


def _tick(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"status": "begun"}'])
def test_an_empty_claim_is_being_written_unless_it_is_old(tmp_path: Path, content: str) -> None:
    path = tmp_path / "claim"
    path.write_text(content)
    with pytest.raises(ClaimedError, match="is in use since just now"):
        take(path)
    an_hour_ago = path.stat().st_mtime - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    take(path)


def test_what_a_process_left_that_was_killed_when_it_claimed_is_removed(tmp_path: Path) -> None:
    for name in (".unfinished.json.0123abcd.json", ".summary.json.0123abcd.json"):
        (tmp_path / name).write_text("{")
    with open_run_folder(tmp_path, {}, {}, replace=False):
        assert {path.name for path in tmp_path.iterdir()} == {"unfinished.json", "config.yaml"}


def test_two_writers_of_one_file_do_not_share_their_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert {first.suffix, second.suffix} == {".png"}, "by which libraries choose the format"
    assert path.read_text() == "first", "it was finished last"
    assert list(tmp_path.iterdir()) == [path]


def test_only_its_owner_releases_a_claim(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    mine = take(path)
    path.write_text(json.dumps({**mine, "process": 1}))
    release(path, mine)
    assert path.exists()


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


@pytest.mark.parametrize("left", [None, "failed", "dead", "no links"])
def test_of_several_at_the_same_moment_one_gets_the_claim(
    tmp_path: Path, gone: int, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if left == "no links":  # as on exFAT
        left = None

        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    for attempt in range(20):
        path = tmp_path / str(attempt) / "claim"
        if left is not None:
            written(path, **({"process": gone} if left == "dead" else {"status": left}))
        results = at_once(6, lambda path=path: take(path))  # type: ignore[misc]
        assert len([result for result in results if result is not None]) == 1
        assert {file.name for file in path.parent.iterdir()} == {"claim"}


def test_folders_created_at_the_same_moment_are_different_even_while_their_parent_is_removed(tmp_path: Path) -> None:
    stem, stop = tmp_path / "a" / "b" / "run", threading.Event()

    def remove() -> None:
        while not stop.is_set():
            for folder in (stem.parent, stem.parent.parent):
                try:
                    folder.rmdir()
                except OSError:
                    break

    with ThreadPoolExecutor(1) as other:
        removing = other.submit(remove)
        try:
            folders = at_once(6, lambda: make_new_folder(stem))
        finally:
            stop.set()
        removing.result()
    assert {folder.name for folder in folders} == {"run", *(f"run_{number}" for number in range(2, 7))}


def test_a_parent_removed_between_two_looks_at_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mkdir` finds the folder there, and another run removes it before `mkdir` asks whether it is one."""
    stem, is_dir, looks = tmp_path / "a" / "run", Path.is_dir, []

    def removed_before_first_look(path: Path) -> bool:
        if path == stem.parent and not looks:
            looks.append(path)
            path.rmdir()
        return is_dir(path)

    stem.parent.mkdir()
    monkeypatch.setattr(Path, "is_dir", removed_before_first_look)
    assert make_new_folder(stem) == stem
    assert looks and stem.is_dir()


def test_no_folder_is_made_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(FileExistsError, match="/a'"):
        make_new_folder(tmp_path / "a" / "run")


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Path]:
    """A folder to which this process writes a run."""
    with open_run_folder(tmp_path / "out", {}, {}, replace=False):
        yield tmp_path / "out"


def test_a_run_into_the_folder_of_one_that_has_not_ended_is_refused(tmp_path: Path, busy: Path) -> None:
    before = {path.name: path.read_bytes() for path in busy.iterdir()}
    done = command("run", "output=out", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: out: is in use since 2")
    assert line.endswith(f"by process {os.getpid()} on {HERE}; wait for its end, or give another name")
    assert {path.name: path.read_bytes() for path in busy.iterdir()} == before


def test_a_run_that_ended_meanwhile_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command twice: the second is past its first look at the folder when the first ends."""
    arguments = ("run", "output=out", "progress=off", *QUICK)
    assemble = sys.modules["experiments.serve"].assemble

    def run_the_first(settings: Any, say: Any) -> Any:
        monkeypatch.undo()
        assert command(*arguments, cwd=tmp_path).returncode == 0
        return assemble(settings, say)

    monkeypatch.setattr("experiments.serve.assemble", run_the_first)
    done = command(*arguments, cwd=tmp_path)
    said = "error: out contains this run already; choose another folder with output=\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert summary(tmp_path / "out")["run"]["requests"] == 20
    assert not (tmp_path / "out" / "unfinished.json").exists()


def test_a_sweep_that_runs_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "multirun" / "grid"
    with claimed(folder / "unfinished.json"):
        (folder / "errors.log").write_text("a run of the first command failed\n")
        done = command("run", "-m", "sweep=grid", "chunk=128,256", *QUICK, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("error: multirun/grid: is in use since 2")
        assert {path.name for path in folder.iterdir()} == {"unfinished.json", "errors.log"}


def test_a_run_of_a_sweep_waits_for_a_worker_that_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with equal proposals of a search side by side, or workers that survived the command that started them."""
    folder = tmp_path / "multirun" / "one" / f"chunk=128,{','.join(sorted(QUICK))}"
    mine = take(folder / "unfinished.json")
    monkeypatch.setattr("experiments.job.time.sleep", lambda _: release(folder / "unfinished.json", mine))
    done = command("run", "-m", "sweep=one", "chunk=128", *QUICK, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{folder.name}: waits for process {os.getpid()} on {HERE}, which runs it\n")
    assert summary(folder)["about"]["chunk"] == 128


def test_a_run_of_a_sweep_on_another_host_is_named(tmp_path: Path) -> None:
    name = f"chunk=128,{','.join(sorted(QUICK))}"
    path = written(tmp_path / "multirun" / "one" / name / "unfinished.json", host="node7")
    done = command("run", "-m", "sweep=one", "chunk=128", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith(f"error: {name}: multirun/one/{name}: is in use since 2")
    assert done.stderr.splitlines()[0].endswith(f"if it has ended, remove {path.relative_to(tmp_path)}")


def test_commands_at_the_same_moment_and_killed_ones_leave_whole_folders(tmp_path: Path) -> None:
    """`tests/support/concurrent_runs.py FOLDER 200 20` for 200 pairs and 20 kills."""
    script = ROOT / "tests" / "support" / "concurrent_runs.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "4", "3"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
