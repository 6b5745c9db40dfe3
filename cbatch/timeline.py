"""A run as a timeline for chrome://tracing or https://ui.perfetto.dev: host and device lanes, requests, and counters.

    host      | plan 1 |wait 0| absorb 0 | plan 2 |wait 1| ...
    device     | compute 0     | compute 1          | ...
    requests  | queued | prefill | decode ...
    counters  tokens of an iteration; KV blocks held, requests running and waiting

The file is JSON in Chrome's trace event format, compressed with gzip; times in it are microseconds. Knows what the record
knows: copies to and from the device are not in it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from cbatch.metrics import Served, served
from cbatch.record import RunRecord, StepRecord

_COMPRESSION = 1  # of gzip: the fastest

_LANES = ("host", "device", "requests", "counters")  # processes 0 to 3 of the trace

# One formatting operation an iteration: a long run has a million events.
_ITERATION = """\
{"ph": "X", "pid": 0, "tid": 0, "name": "plan %(index)d", "ts": %(planned).3f, "dur": %(planning).3f},
{"ph": "X", "pid": 0, "tid": 0, "name": "wait %(index)d", "ts": %(waited).3f, "dur": %(waiting).3f},
{"ph": "X", "pid": 0, "tid": 0, "name": "absorb %(index)d", "ts": %(received).3f, "dur": %(absorbing).3f},
{"ph": "X", "pid": 1, "tid": 0, "name": "compute %(index)d", "ts": %(started).3f, "dur": %(computing).3f, "args": \
{"requests": %(requests)d, %(tokens)s, "preempted": %(preempted)d, "note": %(note)s}},
{"ph": "C", "pid": 3, "name": "tokens", "ts": %(started).3f, "args": {%(tokens)s}},
{"ph": "C", "pid": 3, "name": "held", "ts": %(started).3f, "args": \
{"KV blocks": %(blocks)d, "running": %(running)d, "queued": %(queued)d}}"""

_PART_OF_REQUEST = """\
{"ph": "b", "cat": "request", "id": %(id)d, "pid": 2, "tid": 0, "name": "%(name)s", "ts": %(begin).3f},
{"ph": "e", "cat": "request", "id": %(id)d, "pid": 2, "tid": 0, "name": "%(name)s", "ts": %(end).3f}"""


def write_timeline(path: Path, record: RunRecord, title: str, requests: Served | None = None) -> None:
    """Write the timeline of a run to `path` (*.json.gz). `title` is kept as the trace's metadata.

    requests: `served(record)`, if it is at hand.
    """
    events = chain(_lanes(), map(_iteration, record.steps), _parts_of_requests(requests or served(record)))
    with gzip.open(path, "wb", compresslevel=_COMPRESSION) as file:
        head = f'{{"displayTimeUnit": "ms", "otherData": {{"title": {json.dumps(title)}}}, "traceEvents": [\n'
        file.write((head + ",\n".join(events) + "\n]}\n").encode("ascii"))


def _lanes() -> Iterator[str]:
    for number, name in enumerate(_LANES):
        yield f'{{"ph": "M", "name": "process_name", "pid": {number}, "args": {{"name": "{name}"}}}}'
        yield f'{{"ph": "M", "name": "process_sort_index", "pid": {number}, "args": {{"sort_index": {number}}}}}'


def _iteration(step: StepRecord) -> str:
    return _ITERATION % {
        "index": step.iteration,
        "planned": step.planned_at * 1e6,
        "planning": (step.launched_at - step.planned_at) * 1e6,
        "waited": step.waited_at * 1e6,
        "waiting": (step.received_at - step.waited_at) * 1e6,
        "received": step.received_at * 1e6,
        "absorbing": (step.done_at - step.received_at) * 1e6,
        "started": step.started * 1e6,
        "computing": (step.ended - step.started) * 1e6,
        "requests": step.num_requests,
        "tokens": f'"prefill": {step.num_prefill_tokens}, "decode": {step.num_decode_tokens}, '
        f'"padding": {step.num_padding_tokens}',
        "preempted": step.num_preempted,
        "note": json.dumps(step.note) if step.note else '""',
        "blocks": step.kv_blocks_used,
        "running": step.num_running,
        "queued": step.num_waiting,
    }


def _parts_of_requests(requests: Served) -> Iterator[str]:
    columns = (requests.id, requests.arrival, requests.admitted, requests.first_token, requests.last_token)
    for id_, arrival, admitted, first, last in zip(*(column.tolist() for column in columns), strict=True):
        for part, begin, end in (("queued", arrival, admitted), ("prefill", admitted, first), ("decode", first, last)):
            if end > begin:
                yield _PART_OF_REQUEST % {"id": id_, "name": f"{id_} {part}", "begin": begin * 1e6, "end": end * 1e6}
