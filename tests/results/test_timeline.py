"""The timeline: a file that trace viewers read, in which everything that the record says is found again."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from hand_made import make_record

from cbatch.record import Life
from cbatch.results.metrics import collect_served
from cbatch.results.timeline import write_timeline


def test_the_timeline_of_a_run_made_by_hand(tmp_path: Path) -> None:
    """See the picture in `hand_made`; times in microseconds."""
    path = tmp_path / "timeline.json.gz"
    record = make_record(copies=True)
    record.steps[3] = record.steps[3]._replace(num_drafts=7, num_accepted=2)
    write_timeline(path, record, 'a "quoted" title', collect_served(record))
    content = json.loads(gzip.decompress(path.read_bytes()))
    assert content["otherData"]["title"] == 'a "quoted" title'
    events: list[dict[str, Any]] = content["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names) == list(range(6))
    order = {event["pid"]: event["args"] for event in events if event["name"] == "process_sort_index"}
    assert order == {number: {"sort_index": number} for number in names}
    slices = [event for event in events if event["ph"] == "X"]
    for lane in names:
        ordered = sorted((event["ts"], event["ts"] + event["dur"]) for event in slices if event["pid"] == lane)
        assert all(first[1] <= second[0] + 1e-3 for first, second in pairwise(ordered)), "they do not overlap"
    spans = {(names[event["pid"]], event["name"]): (event["ts"] / 1e6, event["dur"] / 1e6) for event in slices}
    assert {key: span for key, span in spans.items() if key[1].endswith(" 2")} == {
        ("host", "plan 2"): (5.5, 0.5),
        ("host", "wait 2"): (6.125, 1.875),
        ("host", "absorb 2"): (8.0, 0.25),
        ("copies in", "upload 2"): (5.5, 0.5),
        ("device", "compute 2"): (6.0, 2.0),
        ("copies out", "download 2"): (7.875, 0.125),
    }
    batch, drafted = (event["args"] for event in slices if event["name"] in ("compute 2", "compute 3"))
    assert (drafted["drafts"], drafted["accepted"]) == (7, 2)
    tokens = {"prefill": 3, "decode": 1, "padding": 0}
    assert batch == {"requests": 2, **tokens, "preempted": 1, "note": "NA"}
    counters = [event for event in events if event["ph"] == "C" and event["ts"] == 6e6]
    assert {(names[event["pid"]], event["name"]): event["args"] for event in counters} == {
        ("counters", "tokens"): tokens,
        ("counters", "held"): {"KV blocks": 6, "running": 0, "queued": 1},
    }
    phases = [event for event in events if event["ph"] in "be"]
    assert {(event["pid"], event["cat"]) for event in phases} == {(4, "request")} and names[4] == "requests"
    assert [(event["ph"], event["name"], event["ts"] / 1e6) for event in phases if event["id"] == 1] == [
        *(("b", "1 queued", 1.5), ("e", "1 queued", 3.25), ("b", "1 prefill", 3.25), ("e", "1 prefill", 11.0)),
        *(("b", "1 decode", 11.0), ("e", "1 decode", 12.0)),
    ]
    assert [event["name"] for event in phases if event["id"] == 3] == ["3 prefill"] * 2  # admitted as it arrives
    assert not [event for event in events if event["name"] == "thread_name"], "it has no stages"
    assert content["displayTimeUnit"] == "ms"


def test_each_replica_that_was_there_has_a_name(tmp_path: Path) -> None:
    """Replica 1 runs every iteration; replica 2 is paid for and never used."""
    path, record = tmp_path / "timeline.json.gz", make_record()
    record.replicas, record.lives = [1] * len(record.steps), [Life(replica, 0.0, 0.0) for replica in range(3)]
    write_timeline(path, record, "lives", collect_served(record))
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 7
    }
    ready = [names[event["tid"]] for event in events if event["pid"] == 7 and event["ph"] == "X"]
    assert ready == ["replica 0", "replica 1", "replica 2"]
