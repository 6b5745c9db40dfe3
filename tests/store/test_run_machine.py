"""Run folders against their promise: a finished run is exactly what its settings and its code say.

Commands run, resume, are killed or kept waiting; between them the policy's file changes, other settings are asked for, and results
are cut off.
"""

import json
import os
import shutil
import time
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import yaml
from commands import Ended, command
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

POLICY = """
import os, time
from pathlib import Path

class Mine:
    def plan(self, view):
        if view.iteration == 5:
            if Path("kill").exists():
                os.kill(os.getpid(), 9)
            while Path("hold").exists():
                Path("held").touch()
                time.sleep(0.005)
        plan = view.plan()
        plan.add_decodes()
        for request in view.waiting[:{at_most}]:
            plan.add(request, whole=True)
        return plan.build()
"""
WORK = ("policy=mine.Mine", "backend=sim", "workload=queued", "workload.num_requests=8")
BATCHES, VERSIONS = (2, 4), (1, 2)
TABLES = ("requests.csv", "steps.csv")
Result = tuple[Any, ...]
EXPECTED: dict[tuple[int, int], Result] = {}
"""What a run of this batch by this version of the policy leaves, as a first run in an empty folder does."""

batches, folders = st.sampled_from(BATCHES), st.sampled_from(["out", "other"])


def result_of(folder: Path) -> Result:
    """The tables of a finished run, and its figures."""
    figures = json.loads((folder / "summary.json").read_text())
    del figures["about"]
    return (*((folder / name).read_bytes() for name in TABLES), json.dumps(figures))


def write_policy(folder: Path, version: int) -> None:
    (folder / "mine.py").write_text(POLICY.format(at_most=version))


def expected(batch: int, version: int) -> Result:
    if (batch, version) not in EXPECTED:
        with TemporaryDirectory() as name:
            write_policy(Path(name), version)
            ended = command("run", *WORK, f"batch={batch}", "output=out", cwd=Path(name))
            assert ended.returncode == 0, ended.stderr
            EXPECTED[batch, version] = result_of(Path(name) / "out")
    return EXPECTED[batch, version]


class RunMachine(RuleBasedStateMachine):
    @initialize(version=st.sampled_from(VERSIONS))
    def begin(self, version: int) -> None:
        self.folder = Path(mkdtemp())
        self.change_code(version)
        self.damaged: set[Path] = set()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule(version=st.sampled_from(VERSIONS))
    def change_code(self, version: int) -> None:
        self.version = version
        write_policy(self.folder, version)

    @rule(batch=batches, name=folders)
    def run_into_a_folder(self, batch: int, name: str) -> None:
        """A folder that holds a finished run is never written over."""
        folder = self.folder / name
        before = self.contents(folder)
        finished = (folder / "summary.json").exists() and folder not in self.damaged
        same = finished and yaml.safe_load((folder / "config.yaml").read_text())["batch"] == batch
        ended = self.command("run", *WORK, f"batch={batch}", f"output={name}")
        assert ended.returncode == (2 if finished and not same else 0) or folder in self.damaged, ended
        if finished or ended.returncode:
            assert self.contents(folder) == before
        else:
            self.damaged.discard(folder)
            assert result_of(folder) == expected(batch, self.version)

    @rule(chosen=st.sampled_from(["2", "4", "2,4"]), keep=st.booleans())
    def run_a_sweep(self, chosen: str, keep: bool) -> None:
        """It runs what is missing, damaged or, unless told to keep that, of other code."""
        before = {path: result_of(path) for path in self.finished() if path not in self.damaged}
        how = ["other_code=keep"] if keep else []
        ended = self.command("run", "-m", "sweep=grid", *WORK, f"batch={chosen}", *how)
        assert ended.returncode == 0, ended
        after = {self.batch_of(path): path for path in self.finished() if path.parent.name == "grid"}
        for batch in map(int, chosen.split(",")):
            self.damaged.discard(after[batch])
            if not (keep and after[batch] in before):
                assert result_of(after[batch]) == expected(batch, self.version)
        assert all(result_of(path) == before[path] for path in before if keep)

    @rule(batch=batches, name=st.sampled_from(["out", "grid"]))
    def kill(self, batch: int, name: str) -> None:
        """A killed run leaves no result, and nothing that hinders the next one."""
        (self.folder / "kill").touch()
        child = self.start(batch, name)
        os.waitpid(child, 0)
        (self.folder / "kill").unlink()

    @rule(batch=batches, other=batches, name=st.sampled_from(["out", "grid"]))
    def run_while_another_does(self, batch: int, other: int, name: str) -> None:
        """The second command is refused and changes nothing; the first one then ends as if alone."""
        assume(name == "grid" or not (self.folder / "out" / "summary.json").exists())
        (self.folder / "hold").touch()
        child = self.start(batch, name)
        while not (self.folder / "held").exists() and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.005)
        if held := (self.folder / "held").exists():
            place = ["-m", "sweep=grid"] if name == "grid" else ["output=out"]
            before = self.contents(self.folder)
            ended = self.command("run", *place, *WORK, f"batch={other}")
            assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended
            assert self.contents(self.folder) == before
            (self.folder / "held").unlink()
        (self.folder / "hold").unlink()
        if held:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            self.damaged -= {
                path for path in self.finished() if self.batch_of(path) == batch and path.parent.name == name
            }

    @rule(data=st.data(), name=st.sampled_from([*TABLES, "summary.json"]))
    def cut_a_file(self, data: st.DataObject, name: str) -> None:
        """No command takes what is left for a result."""
        finished = self.finished()
        assume(finished)
        folder = data.draw(st.sampled_from(finished))
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: data.draw(st.integers(0, len(content) - 2))])
        self.damaged.add(folder)

    @invariant()
    def finished_runs_are_what_their_settings_say(self) -> None:
        for folder in self.finished() if hasattr(self, "folder") else ():
            if folder not in self.damaged:
                assert result_of(folder) in [expected(self.batch_of(folder), version) for version in VERSIONS]

    def finished(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.rglob("summary.json"))

    def batch_of(self, folder: Path) -> int:
        batch: int = yaml.safe_load((folder / "config.yaml").read_text())["batch"]
        return batch

    def contents(self, folder: Path) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file() and path.suffix != ".pyc"}

    def command(self, *arguments: str) -> Ended:
        return command(*arguments, cwd=self.folder)

    def start(self, batch: int, name: str) -> int:
        """Starts a command in a process of its own; returns its number."""
        if child := os.fork():
            return child
        status = 1
        try:
            with chdir(self.folder):
                place = ["-m", "sweep=grid"] if name == "grid" else ["output=out"]
                status = self.command("run", *place, *WORK, f"batch={batch}").returncode
        finally:
            os._exit(status)


@pytest.mark.long
def test_a_finished_run_is_what_its_settings_and_its_code_say(num_workloads: int) -> None:
    run_state_machine_as_test(
        RunMachine, settings=settings(max_examples=max(num_workloads // 2, 4), stateful_step_count=8)
    )
