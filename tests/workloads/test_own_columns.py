"""Attributes of requests, read from columns of a trace, stand in the results."""

import json
from datetime import date
from pathlib import Path

import pytest
from commands import command
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch import ConfigError, WorkloadError
from cbatch.request import spec_of
from experiments.store.csv_tables import extra_text, read_extra
from experiments.store.tables import read_requests
from experiments.workloads import TraceReplay

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens,user,score,code,note
2023-11-16 00:00:00,10,5,ann,0.5,007,
2023-11-16 00:00:01,20,6,,,x1,late
2023-11-16 00:00:02,30,7,bob,2,9,late
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    (tmp_path / "trace.csv").write_text(CSV)
    return str(tmp_path / "trace.csv")


def test_results_have_them_as_columns(trace: str, tmp_path: Path) -> None:
    columns = "workload.columns={difficulty: score, ttft_seconds: code, note: note}"
    arguments = ("workload=azure_conv", f"workload.path={trace}", columns, "policy=orca", "backend=sim", "output=run")
    done = command("run", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_requests(tmp_path / "run").set_index("id").sort_index()
    assert rows["extra.difficulty"].fillna(-1).tolist() == [0.5, -1, 2.0]
    assert rows["extra.ttft_seconds"].tolist() == ["007", "x1", "9"]
    assert rows["extra.note"].fillna("").tolist() == ["", "late", "late"]
    assert rows["ttft_seconds"].between(0, 1).all()
    path = tmp_path / "run" / "requests.csv"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"requests\.csv: is cut off or changed"):
        read_requests(tmp_path / "run")


def test_clients_leave_after_the_seconds_of_a_column(trace: str, tmp_path: Path) -> None:
    """That of the first request before its first iteration has ended; those without a time stay."""
    Path(trace).write_text(CSV.replace("0.5", "1e-6").replace(",2,", ",900,"))
    requests = TraceReplay(path=trace, columns={"timeout": "score"}).requests(None)
    assert [spec_of(request).timeout for request in requests] == [1e-6, None, 900.0]
    with pytest.raises(WorkloadError, match=r"trace.csv, line 3: note='late': must be a number of seconds above 0"):
        TraceReplay(path=trace, columns={"timeout": "note"}).requests(None)
    columns = "workload.columns={timeout: score}"
    arguments = ("workload=azure_conv", f"workload.path={trace}", columns, "policy=orca", "backend=sim", "output=run")
    done = command("run", *arguments, "workload.slo={total: 9}", "decisions=true", cwd=tmp_path)
    assert done.returncode == 0 and "2 served" in done.stdout and "1 cancelled" in done.stdout, done
    rows = read_requests(tmp_path / "run").set_index("id").sort_index()
    assert rows["finish_reason"].tolist() == ["cancelled", "length", "length"]
    assert rows["ttft_seconds"].isna().tolist() == [True, False, False] and rows["output_tokens"].tolist() == [0, 6, 7]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["run"]["cancelled_requests"] == 1 and summary["attainment"]["share"] == pytest.approx(2 / 3)
    assert command("replay", "run", cwd=tmp_path).returncode == 0


def test_a_text_stands_as_it_is_unless_it_would_be_mistaken() -> None:
    values = ("late", "007", "7", "", None, date(2026, 1, 2))
    assert [extra_text(value) for value in values] == ["late", "007", '"7"', '""', "", '"2026-01-02"']


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=3
    )
)
def test_a_value_is_read_back_from_its_text(value: object) -> None:
    found = read_extra(extra_text(value))
    assert (type(found), found) == (type(value), value)
