"""Results older than the code that they are evidence of, in a repository made by hand; and the commit of a source tree."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.__main__ import main
from experiments.bench.stale import CODE, Age, code_of, find_ages
from experiments.store import provenance


class Repository:
    """A git repository; every change is a commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *arguments], cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, path: str, text: str) -> str:
        """Writes a file and commits it under its path; returns the commit."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        self.git("add", path)
        self.git("commit", "--quiet", "-m", f"change {path}")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.delenv("GIT_DIR", raising=False)
    monkeypatch.delenv("GIT_INDEX_FILE", raising=False)
    return Repository(tmp_path)


def result(benchmark: str, **others: Any) -> str:
    file = {"benchmark": benchmark, "command": f"python -m experiments.bench {benchmark}", "date": "2026-01-01"}
    return json.dumps({**file, **others})


def test_later_commits_that_touch_a_results_code_are_counted(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_at = repository.commit("cbatch/engine.py", "1")
    repository.commit("cbatch/sim/cost.py", "1")
    repository.commit("results/cpu/sim.json", result("sim", commit=f"{measured_at} + changes"))
    stored_at = repository.commit("results/cpu/host.json", result("host"))
    repository.commit("results/h200/trace-256.json", result("trace-256", commit="0" * 40))  # of another repository
    repository.commit("results/h200/peers.json", json.dumps({"date": "2026-01-01"}))  # by hand: evidence of no code
    repository.commit("results/h200/vidur.json", result("vidur"))
    (repository.folder / "results/new.json").write_text(result("sim"))  # not stored
    repository.commit("cbatch/sim/cost.py", "2")
    repository.commit("docs/x.md", "1")
    ages = {age.path: age for age in find_ages(repository.folder / "results")}
    names = ("cpu/sim", "h200/vidur", "cpu/host", "h200/trace-256", "new")
    sim, vidur, host, trace, new = (ages.pop(f"results/{name}.json") for name in names)
    assert not ages
    assert (sim.commit, sim.newer) == (measured_at[:7], 2) and sim.latest.endswith(" change cbatch/sim/cost.py")
    assert host == Age("results/cpu/host.json", "2026-01-01", f"({stored_at[:7]})", 0)
    assert trace.commit.startswith("(") and trace.newer == 0  # the simulator is none of its code
    assert vidur.newer == 1 and new == Age("results/new.json", "2026-01-01", "", None)
    monkeypatch.chdir(repository.folder)
    assert main(["stale"]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["result", "date", "commit", "newer"]
    assert lines[0].split()[:4] == ["results/cpu/sim.json", "2026-01-01", measured_at[:7], "2"]
    assert [line.split()[0] for line in lines[:5]] == [f"results/{name}.json" for name in names]  # most commits first
    assert lines[4].split() == ["results/new.json", "2026-01-01", "?"]
    assert lines[-1] == "2 of 5 results are older than code that they are evidence of"
    repository.commit("policies/orca.py", "1")
    assert {age.newer for age in find_ages(repository.folder / "results")} == {1, 2, 3, None}


@pytest.mark.parametrize(
    ("path", "file", "holds", "lacks"),
    [
        ("results/h200/peers/vllm-one.json", {"benchmark": "peers/vllm-one"}, "experiments/bench/peers", "policies"),
        ("results/paper/fig3.json", {"command": "python -m experiments.paper fig3"}, "cbatch/sim", "cbatch/runtime"),
        (
            "results/h200/paper/fig3.json",
            {"command": "python -m experiments.paper hardware=gpu"},
            "cbatch/runtime",
            "experiments/fidelity",
        ),
        ("results/h200/async.json", {"benchmark": "async"}, ":(glob)experiments/bench/async*.py", "cbatch/sim"),
        ("results/h200/attention-x.json", {"benchmark": "attention-x"}, "cbatch/runtime", "cbatch/sim"),
        ("results/x.json", {}, "cbatch/runtime", ":(glob)experiments/bench/*.py"),
        ("results/cpu/coverage.json", {"benchmark": "coverage"}, "experiments/store/intervals.py", "cbatch/runtime"),
        ("results/h200/fidelity.json", {"benchmark": "fidelity"}, "experiments/fidelity", "tests/test_fuzz.py"),
        ("results/cpu/fuzz.json", {"benchmark": "fuzz"}, "tests/test_fuzz.py", "cbatch/sim"),
        ("results/cpu/mutants.json", {"benchmark": "mutants"}, "tests", "cbatch/runtime"),
        ("results/cpu/host.json", {"benchmark": "host"}, "policies", "cbatch/runtime"),
        (
            "results/cpu/random_schedules.json",
            {"benchmark": "random_schedules"},
            "tests/test_random_schedules.py",
            "cbatch/sim",
        ),
        ("results/cpu/sim.json", {"benchmark": "sim"}, "cbatch/sim", "cbatch/runtime"),
        ("results/cpu/vidur.json", {"benchmark": "vidur"}, "cbatch/sim", "cbatch/runtime"),
    ],
)
def test_a_result_is_evidence_of_the_code_that_it_runs(path: str, file: dict[str, Any], holds: str, lacks: str) -> None:
    code = code_of(path, {"command": "", **file})
    assert holds in code and lacks not in code


def test_the_code_of_every_benchmark_is_in_the_repository() -> None:
    root = Path(__file__).parents[1]
    paths = {path.removeprefix(":(glob)") for code in CODE.values() for path in code}
    assert [path for path in paths if not any(root.glob(path))] == []


def test_without_history_the_command_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stale", f"results={tmp_path}"]) == 2
    assert "run it in a clone of the repository" in capsys.readouterr().err


def test_a_package_inside_another_repository_does_not_carry_its_commit(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = repository.commit("site/experiments/x.py", "1")
    monkeypatch.delenv("CBATCH_COMMIT", raising=False)
    assert provenance._commit_of(repository.folder / "site") is None
    assert provenance._commit_of(repository.folder) == head
    (repository.folder / "site/experiments/x.py").write_text("2")
    provenance._commit_of.cache_clear()
    assert provenance._commit_of(repository.folder) == f"{head} + changes"
    provenance._commit_of.cache_clear()


def test_results_that_a_command_writes_are_no_changes_of_the_code(repository: Repository) -> None:
    """Else the second figure of a command would be of other code than the first."""
    repository.commit("results/cpu/sim.json", "1")
    head = repository.commit("cbatch/x.py", "1")
    (repository.folder / "results/cpu/sim.json").write_text("2")
    provenance._commit_of.cache_clear()
    assert provenance._commit_of(repository.folder) == head
    provenance._commit_of.cache_clear()
