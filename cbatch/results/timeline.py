"""Writes a run as a timeline for chrome://tracing or https://ui.perfetto.dev: host and device lanes, requests, and counters.

    host      | plan 1 |wait 0| absorb 0 | plan 2 |wait 1| ...
    copies in      | upload 1 |                         real tokens, if the executor timed copies
    device     | compute 0     | compute 1          | ...
    copies out                | download 0 |
    requests  | queued | prefill | decode ...
    blocks copied     | 0 |             KV blocks from and to host memory, if the cache has some there
    replicas  | starting | ready       | draining |    with an autoscaler
    counters  tokens of an iteration; KV blocks held, requests running and waiting

The device has one lane per pipeline stage of real tokens; with several replicas, host and device have one per replica. The file is
JSON in Chrome's trace event format, compressed with gzip. Times in the file are microseconds.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path

from cbatch.executor import BlockCopies, CopyTimes, StageSpans
from cbatch.record import RunRecord, StepRecord
from cbatch.results.metrics import Served

_AT_ONCE = 10_000  # events joined at a time: joining all at once takes twice the memory of a run

_LANES = (
    *("host", "copies in", "device", "copies out", "requests"),
    *("counters", "blocks copied", "replicas", "transfers"),
)
"""The processes 0 to 8 of the trace."""


def write_timeline(path: Path, record: RunRecord, title: str, requests: Served) -> None:
    """Writes the timeline of a run to `path` (*.json.gz), with `title` in the trace's metadata. requests: the run's served requests."""
    phases = _request_phases(requests)
    copies = map(_copy_times, record.steps, record.copies)
    blocks = map(_copied_blocks, record.blocks)
    spans = record.stages or [((step.started, step.ended),) for step in record.steps]
    steps = map(_iteration, record.steps, spans, record.replicas or repeat(0))
    stages = [f"stage {stage}" for stage in range(len(record.stages[0]) if record.stages else 0)]
    last = max(chain(record.replicas, (life.replica for life in record.lives)), default=-1)
    replicas = [f"replica {replica}" for replica in range(last + 1)]
    if record.pools:
        replicas = [f"{name} ({pool})" for name, pool in zip(replicas, record.pools, strict=False)]
    parts = {"copies": record.copies, "blocks": record.blocks, "replicas": record.lives, "transfers": record.transfers}
    lanes = _lanes([name for name, rows in parts.items() if not rows], stages or replicas, hosts=replicas)
    events = chain(lanes, steps, copies, blocks, phases, _life_phases(record), _transfers(record))
    with gzip.open(path, "wb", compresslevel=1) as file:  # the fastest
        head = f'{{"displayTimeUnit": "ms", "otherData": {{"title": {json.dumps(title)}}}, "traceEvents": [\n'
        file.write((head + next(events)).encode("ascii"))
        while part := list(islice(events, _AT_ONCE)):
            file.write(",\n".join(["", *part]).encode("ascii"))
        file.write(b"\n]}\n")


def _lanes(absent: Sequence[str], devices: Sequence[str], hosts: Sequence[str]) -> Iterator[str]:
    for number, name in enumerate(_LANES):
        if name.partition(" ")[0] not in absent:
            yield f'{{"ph": "M", "name": "process_name", "pid": {number}, "args": {{"name": "{name}"}}}}'
            yield f'{{"ph": "M", "name": "process_sort_index", "pid": {number}, "args": {{"sort_index": {number}}}}}'
    for lane, names in ((0, hosts), (2, devices), (7, () if "replicas" in absent else hosts)):
        for thread, name in enumerate(names):
            yield f'{{"ph": "M", "name": "thread_name", "pid": {lane}, "tid": {thread}, "args": {{"name": {json.dumps(name)}}}}}'


def _iteration(step: StepRecord, spans: StageSpans, replica: int) -> str:
    number, started = step.iteration, f'"ts": {step.started * 1e6:.3f}'
    prefill, decode, padding = step.num_prefill_tokens, step.num_decode_tokens, step.num_padding_tokens
    tokens = f'"prefill": {prefill}, "decode": {decode}, "padding": {padding}'
    rest = f'"preempted": {step.num_preempted}, "note": {json.dumps(step.note)}'
    drafts = f', "drafts": {step.num_drafts}, "accepted": {step.num_accepted}' if step.num_drafts else ""
    batch = f'"requests": {step.num_requests}, {tokens}{drafts}, {rest}'
    held = f'"KV blocks": {step.kv_blocks_used}, "running": {step.num_running}, "queued": {step.num_waiting}'
    stages = enumerate(spans, replica)
    computed = ",\n".join(_span(2, f"compute {number}", *span, thread, batch) for thread, span in stages)
    return f"""\
{_span(0, f"plan {number}", step.planned_at, step.launched_at, replica)},
{_span(0, f"wait {number}", step.waited_at, step.received_at, replica)},
{_span(0, f"absorb {number}", step.received_at, step.done_at, replica)},
{computed},
{{"ph": "C", "pid": 5, "name": "tokens", {started}, "args": {{{tokens}}}}},
{{"ph": "C", "pid": 5, "name": "held", {started}, "args": {{{held}}}}}"""


def _copy_times(step: StepRecord, times: CopyTimes) -> str:
    upload = _span(1, f"upload {step.iteration}", times.upload_started, times.upload_ended)
    return f"{upload},\n{_span(3, f'download {step.iteration}', times.download_started, times.download_ended)}"


def _copied_blocks(copied: BlockCopies) -> str:
    arguments = f'"iteration": {copied.iteration}, "waited": {copied.waited:.6f}'
    return _span(6, f"{copied.num_out} out, {copied.num_back} back", copied.started, copied.ended, 0, arguments)


def _span(lane: int, name: str, begin: float, end: float, thread: int = 0, arguments: str = "") -> str:
    times = f'"ts": {begin * 1e6:.3f}, "dur": {(end - begin) * 1e6:.3f}'
    about = f', "args": {{{arguments}}}' if arguments else ""
    return f'{{"ph": "X", "pid": {lane}, "tid": {thread}, "name": "{name}", {times}{about}}}'


def _life_phases(record: RunRecord) -> Iterator[str]:
    end = max((step.done_at for step in record.steps), default=0.0)
    for life in record.lives:
        times = [min(time, life.closed, end) for time in (life.asked, life.ready, life.draining, life.closed)]
        for phase, begin, until in zip(("starting", "ready", "draining"), times, times[1:], strict=False):
            if until > begin:
                yield _span(7, phase, begin, until, life.replica)


def _transfers(record: RunRecord) -> Iterator[str]:
    """Yields what was under way on each link: transfers of one link may overlap, so that they are asynchronous events."""
    for sent in record.transfers:
        link = f"{sent.sender} to {sent.receiver}"
        event = f'"cat": "{link}", "id": {sent.request}, "pid": 8, "tid": 0, "name": "{link}: {sent.request}"'
        about = f'"args": {{"tokens": {sent.num_tokens}, "bytes": {sent.num_bytes}, "hidden": {sent.hidden:.3f}}}'
        yield f'{{"ph": "b", {event}, "ts": {sent.started * 1e6:.3f}, {about}}},\n{{"ph": "e", {event}, "ts": {sent.ended * 1e6:.3f}}}'


def _request_phases(requests: Served) -> Iterator[str]:
    columns = (requests.id, requests.arrival, requests.admitted, requests.first_token, requests.last_token)
    for id_, arrival, admitted, first, last in zip(*(column.tolist() for column in columns), strict=True):
        for phase, begin, end in (("queued", arrival, admitted), ("prefill", admitted, first), ("decode", first, last)):
            if end > begin:
                event = f'"cat": "request", "id": {id_}, "pid": 4, "tid": 0, "name": "{id_} {phase}"'
                yield f'{{"ph": "b", {event}, "ts": {begin * 1e6:.3f}}},\n{{"ph": "e", {event}, "ts": {end * 1e6:.3f}}}'
