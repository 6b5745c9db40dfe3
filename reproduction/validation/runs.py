"""The form in which served runs are compared, and real ones kept.

Columns of microseconds and counts, small enough to keep beside the results, so that simulating them again and looking
for the cause of an error needs no GPU.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch import SLO, BatchShape, ConfigError, Executor, Request, RunRecord, Step
from cbatch.request import spec_of
from cbatch.results.attainment import attainment
from cbatch.results.metrics import Window, collect_served, statistics, step_columns
from experiments.store.provenance import atomic_write

Columns = Mapping[str, NDArray[np.int64]]

TIMES = ("planned_at", "launched_at", "received_at", "done_at", "started", "ended")


class Watched:
    """Wraps an executor: records the shape of every iteration."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.shapes: list[BatchShape] = []
        self.num_stages, self.needs_tokens = executor.num_stages, executor.needs_tokens
        self.wait, self.restart = executor.wait, executor.restart
        self.now, self.sleep_until, self.ready_at = executor.now, executor.sleep_until, executor.ready_at

    def launch(self, step: Step) -> Any:
        in_flight = self.executor.launch(step)
        self.shapes.append(step.shape())  # the device is at work meanwhile
        return in_flight

    def close(self) -> None:
        """Does nothing: the executor's owner closes it."""


@dataclass(frozen=True, eq=False)
class ServedRun:
    """
    A served run, as it is kept and compared.

    settings: what was served and how: case, policy, model, batch, max_tokens, longest, num_blocks, block_size; tiers:
        objectives (ttft, tbt, total) by tier.
    figures: see `figures`.
    columns: int64; "request.*" [requests], "step.*" [iterations], "chunk.*" [chunks] - see `run_of`. Times in
        microseconds from the first plan.
    """

    settings: Mapping[str, Any]
    figures: Mapping[str, float]
    columns: Columns

    @property
    def name(self) -> tuple[str, str]:
        return self.settings["case"], self.settings["policy"]

    def requests(self) -> Sequence[Request]:
        """Returns the same requests, new and without token values."""
        tiers = [*self.settings.get("tiers", {}).items(), (None, ())]  # tier -1 is the last one: none
        names = ("prompt", "output", "true_output", "arrival", "tier")
        rows = zip(*(self.columns[f"request.{name}"].tolist() for name in names), strict=True)
        found = []
        for index, (prompt, output, true_output, arrival, place) in enumerate(rows):
            tier, slo = tiers[place]
            asked = {"client": tier, "tier": tier, "slo": SLO(*slo), "true_new_tokens": true_output or None}
            found.append(Request(index, prompt, output, arrival_time=arrival / 1e6, **asked))
        return found

    def shapes(self) -> list[BatchShape]:
        """Returns the shape of every iteration."""
        columns = self.columns
        chunks = list(zip(columns["chunk.tokens"].tolist(), columns["chunk.context"].tolist(), strict=True))
        ends = np.cumsum(columns["step.num_chunks"]).tolist()
        names = ("num_decodes", "decode_context", "padding")
        rows = zip(ends, *(columns[f"step.{name}"].tolist() for name in names), strict=True)
        begins = [0, *ends]
        return [BatchShape(tuple(chunks[begin:end]), *rest) for begin, (end, *rest) in zip(begins, rows, strict=False)]

    def device_seconds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the device's seconds for every iteration, and idle before it, [iterations]; one launched early begins when the last ends."""
        started, ended = self.columns["step.started"], self.columns["step.ended"]
        before = np.concatenate([started[:1], ended[:-1]])
        begun = np.maximum(started, before)
        return (ended - begun) / 1e6, (begun - before) / 1e6


def figures(record: RunRecord) -> dict[str, float]:
    """Returns the figures by which runs are compared: seconds, tokens (prompts and outputs) per second, and a share.

    `attainment` only if requests have objectives.
    """
    requests, steps = collect_served(record), record.steps
    total = steps[-1].received_at - steps[0].planned_at
    throughput = float(requests.prompt_tokens.sum() + requests.output_tokens.sum()) / total
    latencies = {kind: statistics(values) for kind, values in _latencies(record).items()}
    shown = ("mean", "p50", "p90", "p99")
    ranks = {f"{kind} {name.replace('p', 'P')}": found[name] for kind, found in latencies.items() for name in shown}
    attained = attainment(record.requests, requests, Window(-np.inf, np.inf))
    share = {"attainment": attained["share"]} if attained else {}
    return {"total time": total, "throughput": throughput, **ranks, **share}


def percentile_ranks(record: RunRecord, other: Mapping[str, float]) -> dict[str, float]:
    """Returns the percentiles of this run at which another run's percentiles lie: 99 for its P99 if both are alike."""
    kinds = {kind: np.sort(values[~np.isnan(values)]) for kind, values in _latencies(record).items()}
    ranks = [name.rpartition(" ") for name in other]
    ranked = {f"{kind} {rank}": kinds[kind] for kind, _, rank in ranks if rank[0] == "P" and len(kinds.get(kind, ()))}
    return {
        name: 100 * float(np.interp(other[name], values, np.linspace(0, 1, len(values))))
        for name, values in ranked.items()
    }


def _latencies(record: RunRecord) -> dict[str, NDArray[np.float64]]:
    requests = collect_served(record)
    return {
        "TTFT": requests.ttft,
        "TBT": np.repeat(requests.gap_seconds, requests.gap_counts),
        "TPOT": requests.tpot,
        "end to end": requests.end_to_end,
        "longest gap": requests.longest_gap,
    }


def run_of(
    settings: Mapping[str, Any], record: RunRecord, asked: Sequence[Request], shapes: list[BatchShape]
) -> ServedRun:
    """Returns a run as it is kept. asked: requests in order of their ids. shapes: of every iteration."""
    requests, steps = collect_served(record), step_columns(record.steps)
    order, start = np.argsort(requests.id), record.steps[0].planned_at
    columns: dict[str, Any] = {
        "request.first_token": (requests.first_token[order] - start) * 1e6,
        "request.last_token": (requests.last_token[order] - start) * 1e6,
        **{f"step.{name}": (steps[name] - start) * 1e6 for name in TIMES},
        "step.num_chunks": [len(shape.chunks) for shape in shapes],
        "step.num_decodes": [shape.num_decodes for shape in shapes],
        "step.decode_context": [shape.decode_context for shape in shapes],
        "step.padding": [shape.num_padding for shape in shapes],
        "chunk.tokens": [tokens for shape in shapes for tokens, _ in shape.chunks],
        "chunk.context": [context for shape in shapes for _, context in shape.chunks],
    }
    return asked_run(settings, figures(record), asked, columns)


def asked_run(
    settings: Mapping[str, Any], figures: Mapping[str, float], asked: Sequence[Request], columns: Mapping[str, Any] = {}
) -> ServedRun:
    """Returns a run of these requests. columns: those of its iterations; without them it can only be simulated."""
    tiers = {request.tier: astuple(request.slo) for request in asked if request.tier is not None}
    place: dict[str | None, int] = {tier: index for index, tier in enumerate(tiers)}
    of_requests = {
        "request.prompt": [request.num_prompt_tokens for request in asked],
        "request.output": [request.max_new_tokens for request in asked],
        "request.true_output": [spec_of(request).true_new_tokens or 0 for request in asked],
        "request.tier": [place.get(request.tier, -1) for request in asked],
        "request.arrival": [spec_of(request).arrival_time * 1e6 for request in asked],
    }
    rounded = {name: np.rint(column).astype(np.int64) for name, column in {**of_requests, **columns}.items()}
    return ServedRun({**settings, "tiers": tiers}, figures, rounded)


def save(path: Path, about: Mapping[str, Any], runs: list[ServedRun]) -> None:
    """Writes runs to one file, atomically. `about`: hardware, versions, ..."""
    head = {**about, "runs": [{"settings": run.settings, "figures": run.figures} for run in runs]}
    columns = ((f"{index}/{name}", column) for index, run in enumerate(runs) for name, column in run.columns.items())
    arrays = {name: np.diff(column, prepend=0).astype(np.int32) for name, column in columns}  # small: compressed well
    with atomic_write(path) as partial:
        np.savez_compressed(partial, head=np.array(json.dumps(head)), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> tuple[dict[str, Any], list[ServedRun]]:
    """Returns what `save` wrote, `about` and the runs; raises ConfigError if it cannot be read."""
    try:
        with np.load(path) as file:
            about: dict[str, Any] = json.loads(str(file["head"]))
            kept = about.pop("runs")
            columns: list[dict[str, NDArray[np.int64]]] = [{} for _ in kept]
            for key in file.files:
                index, slash, name = key.partition("/")
                if slash:
                    columns[int(index)][name] = np.cumsum(file[key])
            return about, [ServedRun(**head, columns=found) for head, found in zip(kept, columns, strict=True)]
    except (OSError, ValueError, KeyError) as error:
        problem = f"cannot read the measured runs: {error}; measure them with path=TRACE, on a GPU"
        raise ConfigError(f"measured={path}: {problem}") from error
