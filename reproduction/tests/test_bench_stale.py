"""The age of stored results in a repository made by hand, and the commit of a source tree."""

import json
import subprocess
from pathlib import Path

import pytest

from experiments.store import provenance
from reproduction.bench.__main__ import main
from reproduction.bench.stale import Age, find_ages


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


def result(**others: str) -> str:
    return json.dumps({"command": "measure it", "date": "2026-01-01", **others})


def test_commits_that_changed_the_code_since_are_counted(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_at = repository.commit("cbatch/engine.py", "1")
    repository.commit("results/sim.json", result(commit=f"{measured_at} + changes"))
    repository.commit("cbatch/engine.py", "2")
    stored_at = repository.commit("results/host.json", result())
    repository.commit("results/by_hand.json", "{}")
    repository.commit("docs/page.md", "1")
    repository.commit("policies/orca.py", "1")
    (repository.folder / "results/new.json").write_text(result())
    assert list(find_ages(repository.folder / "results", ("cbatch", "policies"))) == [
        Age("results/host.json", "2026-01-01", f"({stored_at[:7]})", 1),
        Age("results/new.json", "2026-01-01", "", None),
        Age("results/sim.json", "2026-01-01", measured_at[:7], 2),
    ]
    monkeypatch.chdir(repository.folder)
    assert main(["stale", "results=results"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "results/sim.json",
        "results/host.json",
        "results/new.json",
    ]


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
    repository.commit("reproduction/results/cpu/sim.json", "1")
    head = repository.commit("cbatch/x.py", "1")
    (repository.folder / "reproduction/results/cpu/sim.json").write_text("2")
    provenance._commit_of.cache_clear()
    assert provenance._commit_of(repository.folder) == head
    provenance._commit_of.cache_clear()
