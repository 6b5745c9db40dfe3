"""Columns of a trace become attributes of its requests, for policies; they survive a replay."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from commands import command
from hypothesis import given
from hypothesis import strategies as st
from schedules import make_engine

from cbatch import ConfigError, Limits
from cbatch.errors import WorkloadError
from experiments.store.csv_tables import extra_text, read_extra
from experiments.store.decisions_file import read_decisions, write_decisions
from experiments.store.tables import load_requests
from experiments.workloads import TraceReplay
from policies.orca import Orca

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens,user,urgency,guess,score,code,note
2023-11-16 00:00:00,10,5,ann,2,4,0.5,007,
2023-11-16 00:00:01,20,6,,-1,9,,x1,late
2023-11-16 00:00:02,30,7,bob,0,3,2,9,late
"""
JSON = """{"timestamp": 0, "input_length": 4, "output_length": 2, "user": "ann", "tags": ["a", 1]}
{"timestamp": 5, "input_length": 5, "output_length": 2, "user": "bob"}
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    (tmp_path / "trace.csv").write_text(CSV)
    return str(tmp_path / "trace.csv")


def test_columns_fill_fields_and_own_attributes(trace: str) -> None:
    columns = {"client": "user", "priority": "urgency", "predicted_new_tokens": "guess"}
    columns |= {"difficulty": "score", "code": "code", "note": "note", "rank": "urgency"}
    requests = TraceReplay(path=trace, columns=columns, start=1.0).requests(None)
    assert [request.client for request in requests] == [None, "bob"]
    assert [request.priority for request in requests] == [-1, 0]
    assert [request.predicted_new_tokens for request in requests] == [9, 3]
    assert [dict(request.extra) for request in requests] == [
        {"difficulty": None, "code": "x1", "note": "late", "rank": -1},
        {"difficulty": 2.0, "code": "9", "note": "late", "rank": 0},  # a column with text in it stays text
    ]


def test_json_values_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(JSON)
    requests = TraceReplay(path=str(path), columns={"client": "user", "tags": "tags"}).requests(None)
    assert [(request.client, request.extra["tags"]) for request in requests] == [("ann", ["a", 1]), ("bob", None)]


def test_without_columns_nothing_is_added(trace: str) -> None:
    assert [dict(request.extra) for request in TraceReplay(path=trace).requests(None)] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"client": "usr"}, "trace.csv, line 1: workload.columns.client: no column 'usr'; did you mean user?"),
        ({"arrival_time": "score"}, "workload.columns.arrival_time: the format fills it; choose another name"),
        ("user", "workload.columns=user: give columns by attribute, as in {client: user_id}"),
        ({"priority": "user"}, "trace.csv, line 2: user='ann': must be a whole number"),
        ({"predicted_new_tokens": "urgency"}, "trace.csv, line 3: urgency='-1': must be a whole number"),
    ],
)
def test_columns_that_cannot_be_used_are_named(trace: str, columns: Any, message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        TraceReplay(path=trace, columns=columns).requests(None)
    assert message in str(caught.value)


def test_a_key_that_no_line_has_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(JSON)
    with pytest.raises(WorkloadError, match=r"workload\.columns\.client: no line has a key 'usr'"):
        TraceReplay(path=str(path), columns={"client": "usr"}).requests(None)


def test_a_replay_has_them_too(trace: str, tmp_path: Path) -> None:
    requests = TraceReplay(path=trace, columns={"client": "user", "difficulty": "score"}).requests(None)
    engine = make_engine(Orca(), Limits(2, 100, 100))
    engine.submit(requests)
    with write_decisions(tmp_path / "decisions", engine, requests, []):
        engine.run()
    again = read_decisions(tmp_path / "decisions").requests
    assert [(request.client, dict(request.extra)) for request in again] == [
        ("ann", {"difficulty": 0.5}),
        (None, {"difficulty": None}),
        ("bob", {"difficulty": 2.0}),
    ]


def test_results_have_them_as_columns(trace: str, tmp_path: Path) -> None:
    columns = "workload.columns={difficulty: score, ttft_seconds: code, note: note}"
    arguments = ("workload=azure_conv", f"workload.path={trace}", columns, "policy=orca", "backend=sim", "output=run")
    done = command("run", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = load_requests(tmp_path / "run").set_index("id").sort_index()
    assert rows["extra.difficulty"].fillna(-1).tolist() == [0.5, -1, 2.0]
    assert rows["extra.ttft_seconds"].tolist() == ["007", "x1", "9"]
    assert rows["extra.note"].fillna("").tolist() == ["", "late", "late"]
    assert rows["ttft_seconds"].between(0, 1).all()
    path = tmp_path / "run" / "requests.csv"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"requests\.csv: is cut off or changed"):
        load_requests(tmp_path / "run")


def test_a_value_that_json_does_not_know_is_kept_as_text() -> None:
    assert extra_text(date(2026, 1, 2)) == '"2026-01-02"'


def test_a_text_stands_as_it_is_unless_it_would_be_mistaken() -> None:
    assert [extra_text(value) for value in ("late", "007", "7", "", None)] == ["late", "007", '"7"', '""', ""]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=3
    )
)
def test_a_value_is_read_back_from_its_text(value: object) -> None:
    found = read_extra(extra_text(value))
    assert (type(found), found) == (type(value), value)
