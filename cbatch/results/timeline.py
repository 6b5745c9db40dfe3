"""A run as a timeline for chrome://tracing or https://ui.perfetto.dev: host and device lanes, requests, and counters.

    host      | plan 1 |wait 0| absorb 0 | plan 2 |wait 1| ...
    copies in      | upload 1 |                         of real tokens
    device     | compute 0     | compute 1          | ...
    copies out                | download 0 |
    requests  | queued | prefill | decode ...
    counters  tokens of an iteration; KV blocks held, requests running and waiting

The file is JSON in Chrome's trace event format, compressed with gzip; its times are microseconds. It contains copies if the
executor timed them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from cbatch.executor import CopyTimes
from cbatch.record import RunRecord, StepRecord
from cbatch.results.metrics import Served, collect_served

_COMPRESSION = 1  # of gzip: the fastest

_LANES = ("host", "copies in", "device", "copies out", "requests", "counters")  # processes 0 to 5 of the trace

# One formatting operation per iteration: a long run has a million events.
_ITERATION = """\
{"ph": "X", "pid": 0, "tid": 0, "name": "plan %(index)d", "ts": %(planned).3f, "dur": %(planning).3f},
{"ph": "X", "pid": 0, "tid": 0, "name": "wait %(index)d", "ts": %(waited).3f, "dur": %(waiting).3f},
{"ph": "X", "pid": 0, "tid": 0, "name": "absorb %(index)d", "ts": %(received).3f, "dur": %(absorbing).3f},
{"ph": "X", "pid": 2, "tid": 0, "name": "compute %(index)d", "ts": %(started).3f, "dur": %(computing).3f, "args": \
{"requests": %(requests)d, %(tokens)s, "preempted": %(preempted)d, "note": %(note)s}},
{"ph": "C", "pid": 5, "name": "tokens", "ts": %(started).3f, "args": {%(tokens)s}},
{"ph": "C", "pid": 5, "name": "held", "ts": %(started).3f, "args": \
{"KV blocks": %(blocks)d, "running": %(running)d, "queued": %(queued)d}}"""

_COPIES = """\
{"ph": "X", "pid": 1, "tid": 0, "name": "upload %(index)d", "ts": %(uploaded).3f, "dur": %(uploading).3f},
{"ph": "X", "pid": 3, "tid": 0, "name": "download %(index)d", "ts": %(downloaded).3f, "dur": %(downloading).3f}"""

_REQUEST_PHASE = """\
{"ph": "b", "cat": "request", "id": %(id)d, "pid": 4, "tid": 0, "name": "%(name)s", "ts": %(begin).3f},
{"ph": "e", "cat": "request", "id": %(id)d, "pid": 4, "tid": 0, "name": "%(name)s", "ts": %(end).3f}"""


def write_timeline(path: Path, record: RunRecord, title: str, requests: Served | None = None) -> None:
    """Write the timeline of a run to `path` (*.json.gz), with `title` as the trace's metadata.

    requests: `collect_served(record)`, if already computed.
    """
    phases = _request_phases(requests or collect_served(record))
    copies = map(_copies, record.steps, record.copies)
    events = chain(_lanes(bool(record.copies)), map(_iteration, record.steps), copies, phases)
    with gzip.open(path, "wb", compresslevel=_COMPRESSION) as file:
        head = f'{{"displayTimeUnit": "ms", "otherData": {{"title": {json.dumps(title)}}}, "traceEvents": [\n'
        file.write((head + ",\n".join(events) + "\n]}\n").encode("ascii"))


def _lanes(copies: bool) -> Iterator[str]:
    for number, name in enumerate(_LANES):
        if copies or not name.startswith("copies"):
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


def _copies(step: StepRecord, copies: CopyTimes) -> str:
    return _COPIES % {
        "index": step.iteration,
        "uploaded": copies.upload_started * 1e6,
        "uploading": (copies.upload_ended - copies.upload_started) * 1e6,
        "downloaded": copies.download_started * 1e6,
        "downloading": (copies.download_ended - copies.download_started) * 1e6,
    }


def _request_phases(requests: Served) -> Iterator[str]:
    columns = (requests.id, requests.arrival, requests.admitted, requests.first_token, requests.last_token)
    for id_, arrival, admitted, first, last in zip(*(column.tolist() for column in columns), strict=True):
        for phase, begin, end in (("queued", arrival, admitted), ("prefill", admitted, first), ("decode", first, last)):
            if end > begin:
                yield _REQUEST_PHASE % {"id": id_, "name": f"{id_} {phase}", "begin": begin * 1e6, "end": end * 1e6}
