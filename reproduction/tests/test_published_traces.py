"""The files of conf/workload/traces are made from what is published; the page on workloads has the same names, sources and digests."""

import gzip
import re
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from subprocess import run

import pytest
from places import ROOT

from cbatch import ConfigError
from reproduction.papers import traces
from reproduction.papers.traces import FILES, Clone, File, first, main


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """The newest commit of the repository has other files than the named one."""
    folder = tmp_path / "clones" / "published"
    (folder / "traces").mkdir(parents=True)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    run([*git, "init", "-q"], check=True)
    for name, text in (("long", "x\r\n" * 9), ("short", "y\n"), ("b", "zz\n"), ("a", "zz\n")):
        (folder / "traces" / name).write_bytes(text.encode())
    run([*git, "add", "."], check=True)
    run([*git, "commit", "-q", "-m", "one"], check=True)
    commit = run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    run([*git, "rm", "-q", "-r", "traces"], check=True)
    run([*git, "commit", "-q", "-m", "two"], check=True)
    return Clone(folder, commit)


def test_a_file_is_cut_from_the_named_commit_and_kept_only_with_its_digest(
    clone: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = partial(first, "traces/long", 2)
    right = File("someone/published", clone.commit, cut, sha256(b"x\r\nx\r\n").hexdigest())
    there, other = tmp_path / "made" / "there.csv.gz", File("someone/missing", clone.commit, cut, "")
    monkeypatch.setattr(traces, "FILES", {there.name: right, "missing.csv.gz": other})
    main(str(tmp_path / "clones"), str(there.parent))
    assert gzip.decompress(there.read_bytes()) == b"x\r\nx\r\n"
    assert "missing.csv.gz: left out; git clone https://github.com/someone/missing" in capsys.readouterr().out
    monkeypatch.setattr(traces, "FILES", {"changed.csv.gz": replace(right, sha256="0" * 64)})
    with pytest.raises(ConfigError, match=r"changed\.csv\.gz: .* another content"):
        main(str(tmp_path / "clones"), str(there.parent))
    assert [*there.parent.iterdir()] == [there]


def test_files_are_ordered_by_size_and_a_missing_one_is_named(clone: Clone) -> None:
    assert clone.by_size("traces/") == ["traces/short", "traces/a", "traces/b", "traces/long"]
    with pytest.raises(ConfigError, match=r"published: git show .*:traces/none: "):
        clone.read("traces/none")


def test_the_page_has_the_source_and_the_digest_of_each_file_that_a_workload_reads() -> None:
    page = (ROOT / "docs" / "real-input.md").read_text()
    settings = {path.stem: path.read_text() for path in (ROOT / "conf/workload/traces").glob("*.yaml")}
    named = {name: {*re.findall(r"\$\{traces\}/([\w.-]+)", text)} for name, text in settings.items()}
    assert set.union(*named.values()) == FILES.keys()
    assert all(re.search(rf"^\| .*`traces/{name}`", page, re.M) for name in named)
    for name, file in FILES.items():
        (row,) = re.findall(rf"^\|.*`{re.escape(name)}`.*\|$", page, re.M)
        assert file.sha256 in row and file.repository in row and file.commit[:12] in row
