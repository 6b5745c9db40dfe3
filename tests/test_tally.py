"""What long tests with drawn cases have counted, written by one process or by several of one run."""

import json
import sys
from pathlib import Path

import pytest
from tally import Tally


def record(folder: Path, cases: list[str]) -> dict[str, object]:
    tally = Tally("cases", len(cases), shown=False)
    for case in cases:
        tally.count({"tokens": 10}, {"policy": case})
    with pytest.raises(ZeroDivisionError), tally.found("one"), tally.failing(cases[0]):
        raise ZeroDivisionError
    tally.write("drawn", str(folder))
    (path,) = folder.rglob("*.*")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_processes_of_one_run_add_up_and_a_new_run_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_TESTRUNUID", raising=False)
    assert record(tmp_path, ["orca"])["cases"] == record(tmp_path, ["orca"])["cases"] == 1
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "first")
    assert record(tmp_path, ["orca", "orca"])["cases"] == 2
    whole = record(tmp_path, ["orca", "lars", "lars"])
    assert (whole["cases"], whole["tokens"], whole["by"]) == (5, 50, {"policy": {"lars": 2, "orca": 3}})
    assert [failure["case"] for failure in whole["failures"]] == ["orca", "orca"]  # type: ignore[attr-defined]
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "second")
    assert record(tmp_path, ["lars"])["by"] == {"policy": {"lars": 1}}


def test_a_process_of_several_knows_the_whole_command(request: pytest.FixtureRequest) -> None:
    given = getattr(request.config, "workerinput", {"mainargv": sys.argv})["mainargv"]
    assert sys.argv == given and sys.argv[1:]
