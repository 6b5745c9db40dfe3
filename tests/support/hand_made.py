"""A run made by hand, in which every figure has another value; the test of each figure does the sum.

seconds     0   1   2   3   4   5   6   7   8   9  10  11  12          one GPU, 4 places, 20 KV blocks
request 0    a  A-------1-------2-----------3                          5 prompt tokens, 3 of output
request 1         a       A-----    (preempted)  ---------1---2        7 prompt tokens, 2 of output
request 2           a             x                                    rejected
request 3                         aA--------1                          3 prompt tokens, 1 of output

a: arrives, A: admitted, 1 2 3: its tokens on the host. Request 3 arrives with iteration 2.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cbatch import SLO, FinishReason, Request, RunRecord, StepRecord
from cbatch.executor import CopyTimes
from cbatch.request import Status
from cbatch.results.metrics import collect_served
from cbatch.results.summary import summarize
from experiments.report.headings import flat
from experiments.store.csv_tables import RunTables, extra_names
from experiments.store.provenance import write_json
from experiments.store.run_folder import SUMMARY, write_results

# (planned, launched, waited, received, done, started, ended), (requests, prefill, decode, padding, sampled, preempted,
# KV blocks, waiting, running), and the requests that receive a token
STEPS = [
    ((1.0, 1.25, 1.375, 3.0, 3.25, 1.25, 3.0), (1, 5, 0, 3, 1, 0, 2, 1, 1), [0]),
    ((3.25, 3.5, 3.625, 5.0, 5.5, 3.5, 5.0), (2, 4, 1, 0, 1, 0, 5, 0, 2), [0]),
    ((5.5, 6.0, 6.125, 8.0, 8.25, 6.0, 8.0), (2, 3, 1, 0, 2, 1, 6, 1, 0), [0, 3]),
    ((8.25, 8.5, 8.625, 11.0, 11.25, 8.5, 11.0), (1, 7, 0, 1, 1, 0, 3, 0, 1), [1]),
    ((11.25, 11.5, 11.625, 12.0, 12.75, 11.5, 12.0), (1, 0, 1, 0, 1, 0, 3, 0, 0), [1]),
]
NUM_BLOCKS, MAX_BATCH, OVERSHOOT = 20, 4, 6

ABOUT: dict[str, Any] = {
    "policy": "prefill_first",
    "chunk": None,
    "workload": "closed",
    "model": "llama-13b",
    "runtime": "async",
    "simulated": False,
    "hardware": "a computer",
    "execution": {},
    "limits": {"batch": MAX_BATCH, "kv_blocks": NUM_BLOCKS},
    "overrides": [],
    "versions": {"numpy": "2"},
}
SETTINGS: dict[str, Any] = {"workload": {"length": 8}}


MISSED = SLO(ttft=4.0)


def make_record(*, copies: bool = False, slo: SLO = MISSED) -> RunRecord:
    """copies: timed, each upload while its iteration is planned, each download in the last eighth of a second. slo: of request 1."""
    record = RunRecord()
    for index, (times, counts, receivers) in enumerate(STEPS):
        note = "NA" if index == 2 else ""
        record.add_step(StepRecord(index, *times, *counts, note=note), np.array(receivers))
    if copies:
        record.copies = [
            CopyTimes(step.planned_at, step.launched_at, step.ended - 0.125, step.ended) for step in record.steps
        ]
    late = Request(3, 3, 4)
    late.arrive(5.5)
    record.requests = [
        end(Request(2, 9, 9, arrival_time=2.0), None, 5.5, FinishReason.REJECTED, reject_reason="too long"),
        end(Request(0, 5, 3, arrival_time=0.25, priority=7), 1.0, 8.0, num_output_tokens=3, token_times=(3.0, 8.0)),
        end(late, 5.5, 8.0, FinishReason.STOP, num_output_tokens=1, token_times=(8.0, 8.0)),
        end(
            Request(1, 7, 2, arrival_time=1.5, client="ann", tier="gold", slo=slo),
            3.25,
            12.0,
            num_output_tokens=2,
            token_times=(11.0, 12.0),
            num_preemptions=1,
            num_lost_tokens=4,
            num_recomputed_tokens=4,
        ),
    ]
    return record


def end(
    request: Request, admitted: float | None, seconds: float, why: FinishReason = FinishReason.LENGTH, **values: object
) -> Request:
    """The request as it is when it has ended. values: other attributes."""
    request.status, request.finish_reason = Status.FINISHED, why
    request.admitted_at, request.finished_at = admitted, seconds
    for name, value in values.items():
        setattr(request, name, value)
    return request


def make_summary(
    record: RunRecord, about: Mapping[str, Any] = ABOUT, settings: Mapping[str, Any] = SETTINGS, **options: Any
) -> dict[str, Any]:
    """Returns the summary of a run. settings: in nested dictionaries, of which its identity is made."""
    sizes = {"num_blocks": NUM_BLOCKS, "max_batch": MAX_BATCH, "overshoot_tokens": OVERSHOOT}
    about = {**ABOUT, **about}
    identity = {"policy": about["policy"], **dict(flat(settings))}
    return {"about": {"identity": identity, **about}, **summarize(record, **sizes, **options)}


def write_run(
    folder: Path,
    about: Mapping[str, Any] = ABOUT,
    settings: Mapping[str, Any] = SETTINGS,
    *,
    speed: float | None = None,
    figures: Mapping[str, Mapping[str, float | None]] = {},
    copies: bool = False,
) -> Path:
    """The folder of the run, as `experiments.run` would leave it. speed, figures: tokens per second, and
    other figures by group and name, instead of its own.
    """
    record = make_record(copies=copies)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    summary = make_summary(record, about, settings, objectives=SLO(ttft=2.75))
    if speed is not None:
        summary["throughput"]["total_tokens_per_second"] = speed
    for group, values in figures.items():
        summary.setdefault(group, {}).update(values)
    served = collect_served(record)
    with RunTables(folder, extra_names(record.requests)) as tables:
        tables.write(record, served)
    write_results(folder, record, served, summary, timeline=True)
    write_json(folder / SUMMARY, summary)
    return folder
