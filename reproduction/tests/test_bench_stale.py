"""Results that rest on code which changed since, in a repository made by hand; and the commit of a source tree."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from experiments.store import provenance
from reproduction.bench.__main__ import main
from reproduction.bench.stale import RESTS_ON, Age, find_ages, rests_on

COST = "cbatch/sim/cost.py"
LEAST = ("h200/tiles", "new")


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


def test_modules_whose_code_changed_since_a_result_are_named(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("cbatch/engine.py", "cbatch/sim/cost.py", "policies/orca.py", "policies/gone.py", "policies/words.py"):
        measured_at = repository.commit(path, '"""Old."""\n\n\ndef f():  # old\n    "Old."\n    return 1\n')
    repository.commit("results/cpu/sim.json", result("sim", commit=f"{measured_at} + changes"))
    stored_at = repository.commit("results/cpu/host.json", result("host"))
    repository.git("checkout", "--quiet", "-b", "other")
    on_a_branch = repository.commit("cbatch/limits.py", "1")
    repository.git("checkout", "--quiet", "-")
    repository.commit("results/h200/tiles.json", result("tiles", commit=on_a_branch))  # which a clone may not have
    repository.commit("results/h200/peers.json", json.dumps({"date": "2026-01-01"}))  # by hand: rests on no code
    (repository.folder / "results/new.json").write_text(result("sim"))  # not stored
    repository.commit("cbatch/sim/cost.py", '"""Old."""\n\n\ndef f():\n    return 2\n')
    repository.commit("policies/words.py", '"""New."""\ndef f():\n    """New."""\n    return 1  # new\n')
    repository.commit("policies/added.py", "1")
    repository.commit("policies/orca.py", "1")
    (repository.folder / "policies/orca.py").write_text("not committed, and no Python")
    repository.git("rm", "--quiet", "policies/gone.py")
    repository.git("commit", "--quiet", "-m", "without it")
    ages = {age.path: age for age in find_ages(repository.folder / "results")}
    assert ages == {
        age.path: age
        for age in (
            Age("results/cpu/sim.json", "2026-01-01", measured_at[:7], [COST, "policies/gone.py", "policies/orca.py"]),
            Age("results/cpu/host.json", "2026-01-01", f"({stored_at[:7]})", ["policies/gone.py", "policies/orca.py"]),
            Age("results/h200/tiles.json", "2026-01-01", ages["results/h200/tiles.json"].commit, []),
            Age("results/new.json", "2026-01-01", "", None),
        )
    }
    assert ages["results/h200/tiles.json"].commit.startswith("(")
    monkeypatch.chdir(repository.folder)
    assert main(["stale"]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["result", "date", "commit", "changed"]
    first = ["results/cpu/sim.json", "2026-01-01", measured_at[:7], "3", "sim/cost.py", "policies/gone.py"]
    assert lines[0].split() == [*first, "policies/orca.py"]  # most changes first
    assert [line.split()[0] for line in lines[1:4]] == [f"results/{name}.json" for name in ("cpu/host", *LEAST)]
    assert lines[3].split() == ["results/new.json", "2026-01-01", "?"]
    assert head.index("changed") <= lines[3].index("?") < head.index("modules")
    assert lines[-1].startswith("2 of 4 results rest on code that changed since: git diff COMMIT -- MODULE says how, ")


def test_of_many_modules_three_are_named(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abcd":
        repository.commit(f"policies/{name}.py", "x = 1")
    repository.commit("results/cpu/sim.json", result("sim"))
    for name in "abcd":
        repository.commit(f"policies/{name}.py", "x = 2")
    assert main(["stale", f"results={repository.folder / 'results'}"]) == 0
    assert " 4  policies/a.py policies/b.py policies/c.py and 1 more\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "command", "holds", "lacks"),
    [
        ("h200/peers/vllm-decode-2048", "bench.peers vllm", "reproduction/bench/peers", "policies"),
        ("paper/fig3", "paper fig3", "policies/sarathi.py", "policies"),
        ("paper/fig9", "paper fig9", "cbatch/sim/cost.py", "cbatch/runtime/fast"),
        ("paper/landscape/vtc", "paper landscape", "policies", "cbatch/runtime/fast"),
        ("h200/paper/fig3", "paper hardware=gpu", "cbatch/engine.py", "cbatch/sim/cost.py"),
        ("h200/async-2048", "bench async new=2048", "cbatch/engine.py", "policies"),
        ("h200/attention-llama-13b", "bench attention", "cbatch/runtime/fast", "cbatch/engine.py"),
        ("h200/graph_memory", "bench graph_memory", "cbatch/runtime/graphs.py", "cbatch/engine.py"),
        ("h200/capacity", "bench capacity measured=a.npz", "cbatch/sim/profiles/h200.json", "cbatch/engine.py"),
        ("h200/held_out", "bench fidelity measured=a.npz", "reproduction/validation", "cbatch/runtime/fast"),
        ("h200/vllm-simulated", "bench vllm_simulated", "cbatch/sim/cost.py", "cbatch/runtime/fast"),
        ("h200/vllm-serving-high", "bench vllm_serving capacity=2", "cbatch/runtime/fast", "cbatch/sim/cost.py"),
        ("h200-x2/tensor-simulated", "bench tensor hardware=h200", "cbatch/sim/links.py", "cbatch/runtime/fast"),
        ("h200-x2/tensor", "bench tensor", "cbatch/runtime/fast", "cbatch/sim/links.py"),
        ("cpu/coverage", "bench coverage", "experiments/store/intervals.py", "cbatch/engine.py"),
        ("cpu/fuzz", "pytest tests/commands/test_fuzz.py", "tests/commands/test_fuzz.py", "cbatch/sim/cost.py"),
        ("cpu/host", "bench host", "policies", "cbatch/sim/cost.py"),
        ("cpu/mutants", "mutate.py", "experiments/plots", "cbatch/engine.py"),
        ("cpu/random_schedules", "pytest", "tests/runtime/test_random_schedules.py", "cbatch/sim/cost.py"),
        ("cpu/sim", "bench sim", "cbatch/leap.py", "cbatch/runtime/fast"),
        ("cpu/million", "bench million trace=a/tiles.csv", "cbatch/engine.py", "cbatch/runtime/fast"),
    ],
)
def test_a_result_rests_on_the_code_that_makes_its_figure(path: str, command: str, holds: str, lacks: str) -> None:
    code = rests_on(f"results/{path}.json", f"python -m experiments.{command}")
    assert holds in code and lacks not in code


def test_what_results_rest_on_is_in_the_repository() -> None:
    assert [path for code in RESTS_ON.values() for path in code if not (ROOT / path).exists()] == []


def test_without_history_the_command_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stale", f"results={tmp_path}"]) == 2
    assert "run it in a clone" in capsys.readouterr().err


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
