"""Runs of vLLM that its scheduler or its client has measured, beside simulations of them and predictions of rivals.

    python -m reproduction.validation recorded measured=judged capacity=24.1 hardware=h100-vllm,h100 rivals=FILE.csv
    python -m reproduction.validation recorded measured=vllm-serving.json hardware=h200-vllm     # what `vllm bench serve` reports

A recording (docs/vllm.md) says what vLLM computed in each iteration, when that ended, and when each request arrived: the time at which the scheduler received
it, minus `extra.waited`. Latencies exclude the client. A recording holds one run or several, with pauses between them.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cbatch import SLO, BatchShape, ConfigError, Request, RunRecord
from cbatch.kv import blocks_for
from cbatch.replay.decisions import Decision, StepEnd
from cbatch.request import FinishReason
from cbatch.sim import ProfileCost, load_profile
from experiments.setup.presets import load_spec
from experiments.store.decisions_file import read_decisions
from experiments.store.provenance import write_benchmark
from experiments.store.run_folder import DECISIONS
from reproduction import RESULTS, VALIDATION
from reproduction.profiles import convert
from reproduction.profiles.vllm_recordings import shape_of, stretches
from reproduction.validation.compare import TARGETS, compare, errors_of_times, pair
from reproduction.validation.rivals import KNOWN, summarize
from reproduction.validation.runs import ServedRun, asked_run, run_of

PAUSE, QUEUED = 1.0, 3.0
"""Seconds without an arrival between two runs of a recording; loads above which all requests came at once."""

CLIENT = {
    "TTFT mean": "mean_ttft_ms",
    "TTFT P99": "p99_ttft_ms",
    "TPOT mean": "mean_tpot_ms",
    "TPOT P99": "p99_tpot_ms",
    "throughput": "total_token_throughput",
}
"""What `vllm bench serve` calls our figures."""


def main(
    measured: tuple[str, ...],
    capacity: float = 1.0,
    hardware: tuple[str, ...] = ("h100-vllm", "h100"),
    tables: str = "",
    rivals: str = "",
    model: str = "llama-3.1-8b",
    name: str = "vllm-recorded",
    folder: str = RESULTS,
) -> None:
    """Simulates the measured runs with each profile, prints errors, and writes NAME.json, which `fidelity` takes for the first profile.

    Args:
        measured: recordings, or files of benchmark vllm_serving.
        capacity: requests per second, whose share names a recorded run.
        tables: a folder of published tables, to which the engine's time in rivals.yaml is added.
        rivals: a CSV file of predictions: columns simulator, run, and figures, in seconds.
        model: of recordings.
    """
    runs = read_runs([*map(Path, measured)], model, capacity)
    profiles = {profile: load_profile(profile) for profile in hardware}
    if tables:
        host = {key: value for key, value in KNOWN["engine"].items() if key != "server_ms"}
        profiles[f"published {Path(tables).name}"] = convert(Path(tables), [load_spec(model)], **host)
    found = {which: compare([pair(run, profile) for run in runs], profile) for which, profile in profiles.items()}
    files, spec = [file for path in measured for file in recordings(Path(path))], load_spec(model)
    iterations = {which: iteration_errors(files, ProfileCost(each, spec)) for which, each in profiles.items() if files}
    errors = {which: errors_of(result) for which, result in found.items()}
    if rivals:
        errors |= rival_errors(Path(rivals), pd.DataFrame({run.name[0]: run.figures for run in runs}).T)
    summary = summarize(errors)
    for run in runs:
        each = pd.DataFrame({which: of.loc[run.name[0]] for which, of in errors.items() if run.name[0] in of.index})
        each.insert(0, "measured", pd.Series(run.figures))
        print(f"\n{run.name[0]}, {len(run.columns['request.prompt'])} requests; seconds, and errors")
        print(each.dropna(how="all").to_string(float_format="{:+.3f}".format))
    for which, kinds in iterations.items():
        texts = (
            f"{kind} {of['total']:+.1%} (median size {of['median']:.1%} of {of['number']})"
            for kind, of in kinds.items()
        )
        print(f"{which}: all iterations, predicted from their shapes: {', '.join(texts)}")
    for run_of_case in (run for policies in found[hardware[0]]["cases"].values() for run in policies.values()):
        run_of_case["iterations"] = iterations.get(hardware[0], {})  # of the recording: launches blur single ones
    device = load_profile(hardware[0]).hardware.removesuffix(", vLLM")
    beside = {which: {run: row.dropna().to_dict() for run, row in of.iterrows()} for which, of in errors.items()}
    of_all = {which: of.to_dict("index") for which, of in summary.items()}
    result = {
        "measured": [{"hardware": device}],
        **found[hardware[0]],
        "iterations": iterations,
        "summary": of_all,
        "beside": beside,
    }
    print(f"written: {write_benchmark(name, device, result, folder, VALIDATION)}")


def errors_of(result: Mapping[str, Any]) -> pd.DataFrame:
    """Returns the relative errors of a comparison, a row for each run and a column for each figure."""
    rows = {case: run["error"] for case, policies in result["cases"].items() for run in policies.values()}
    return pd.DataFrame(rows).T.filter(items=[*TARGETS])


def iteration_errors(files: Sequence[Path], cost: ProfileCost) -> dict[str, dict[str, float]]:
    """Predicts all iterations of recordings from their shapes, as `stretches` divides them; returns errors of those with and without prompts."""
    every = [stretch for file in files for stretch in stretches(file)]
    errors = {}
    for name, prompts in (("with prompts", True), ("decodes alone", False)):
        kind = [each for each in every if any(shape.chunks for shape in each.shapes) == prompts]
        errors[name] = errors_of_times(
            *np.array([(each.seconds, sum(map(cost.predict, each.shapes))) for each in kind]).T
        )
    return errors


def rival_errors(file: Path, measured: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns the relative errors of predictions, by simulator; as `errors_of`. measured: a row for each run."""
    predictions = pd.read_csv(file, index_col="run")
    if unknown := {*predictions.index} - {*measured.index}:
        raise ConfigError(f"rivals={file}: no run is called {min(unknown)!r}; runs: {'; '.join(measured.index)}")
    return {
        str(simulator): (rows.drop(columns="simulator") / measured.loc[rows.index] - 1).dropna(axis=1, how="all")
        for simulator, rows in predictions.groupby("simulator")
    }


def read_runs(paths: Sequence[Path], model: str, capacity: float) -> list[ServedRun]:
    """Returns the runs in recordings and in files of benchmark vllm_serving, each with a name of its own.

    Raises:
        ConfigError: there is no run. ReplayError: a recording cannot be read.
    """
    recorded = (run for path in paths for file in recordings(path) for run in recorded_runs(file, model, capacity))
    runs = [*named(recorded), *(run for path in paths if path.is_file() for run in client_runs(path))]
    if not runs:
        problem = f"measured={','.join(map(str, paths))}: no runs"
        raise ConfigError(f"{problem}; give a folder of vllm.record, or a file of vllm_serving")
    return runs


def recordings(path: Path) -> list[Path]:
    """Returns the recordings in a folder; none for a file."""
    return sorted(path.rglob(DECISIONS)) if path.is_dir() else []


def recorded_runs(file: Path, model: str, capacity: float) -> Iterator[ServedRun]:
    """Yields the runs of a recording of which every request has its whole output."""
    [recording] = read_decisions(file)
    lengths = {request.id: request.num_prompt_tokens for request in recording.requests}
    events = recording.recorded.events
    shapes = {event.iteration: shape_of(event, lengths) for event in events if isinstance(event, Decision)}
    ends = [event for event in events if isinstance(event, StepEnd)]
    received = Counter(id_ for end in ends for id_ in end.received)
    requests = [_copy(each, each.id, each.arrival_time - each.extra.get("waited", 0.0)) for each in recording.requests]
    recorded, limits = recording.recorded, recording.recorded.limits
    kept = {"policy": f"policy=vllm_v1 chunk={limits.max_tokens}", "batch": limits.max_batch, "tile": limits.tile}
    kept |= {"max_tokens": limits.max_tokens, "longest": limits.max_request_tokens}
    kept |= {"num_blocks": recorded.num_blocks, "block_size": recorded.block_size}
    times = [request.arrival_time for request in requests]
    pauses = [place for place, (before, time) in enumerate(pairwise(times), 1) if time - before > PAUSE]
    for begin, end in pairwise([0, *pauses, len(requests)]):
        run = requests[begin:end]
        if all(received[request.id] == request.max_new_tokens for request in run):
            rate = (end - begin) / (times[end - 1] - times[begin])
            load = round(rate / capacity, 2)
            until = times[end] if end < len(times) else np.inf
            steps = [step for step in ends if times[begin] <= step.record.planned_at < until]
            about = {"case": "", "model": model, "load": None if load > QUEUED else load, **kept}
            yield run_of_steps(about, run, steps, shapes)


def named(runs: Iterable[ServedRun]) -> Iterator[ServedRun]:
    """Yields recorded runs, each case named by its batch, load and policy; other requests at the same load are numbered from 2.

    A repeat of an earlier run, of the same batch, requests and policy, is named `again`.
    """
    lists = defaultdict[str, list[Any]](list)
    names = set[str]()
    for run in runs:
        load, policy = run.settings["load"], run.settings["policy"]
        name = f"batch {run.settings['batch']}, {'queued' if load is None else format(load, '.0%')}"
        lengths = run.columns["request.prompt"].tolist(), run.columns["request.output"].tolist()
        if lengths not in lists[name]:
            lists[name].append(lengths)
        which = lists[name].index(lengths) + 1
        name = f"{name}{f' ({which})' if which > 1 else ''}, {policy}"
        while name in names:
            name += ", again"
        names.add(name)
        yield replace(run, settings={**run.settings, "case": name})


def run_of_steps(
    settings: Mapping[str, Any], requests: Sequence[Request], steps: Sequence[StepEnd], shapes: Mapping[int, BatchShape]
) -> ServedRun:
    """Returns a run of these requests. shapes: of iterations, by their numbers."""
    record = RunRecord()
    for step in steps:
        record.add_step(step.record, np.array(step.received, np.int64))
    for request in requests:
        request.finish_reason = FinishReason.LENGTH
    record.requests = [*requests]
    begin = requests[0].arrival_time
    asked = [_copy(each, index, each.arrival_time - begin) for index, each in enumerate(requests)]
    return run_of(settings, record, asked, [shapes[step.record.iteration] for step in steps])


def _copy(request: Request, id_: int, arrival: float) -> Request:
    """Returns a new request of the same lengths."""
    return Request(id_, request.num_prompt_tokens, request.max_new_tokens, arrival_time=arrival)


def client_runs(file: Path) -> Iterator[ServedRun]:
    """Yields the runs of a file of benchmark vllm_serving, with what the client reports of each."""
    kept = json.loads(file.read_text(encoding="utf-8"))
    slo = SLO(**{name.removeprefix("slo_"): seconds for name, seconds in kept["slo"].items()})
    for load, rows in kept.get("requests", {}).items():
        lengths = [row.split() for row in rows]
        asked = [
            Request(index, int(prompt), int(output), arrival_time=float(time), tier="all", slo=slo)
            for index, (time, prompt, output) in enumerate(lengths)
        ]
        longest = max(request.max_tokens for request in asked)
        limits = {"model": kept["model"], "batch": kept["batch"], "max_tokens": kept["budget"], "longest": longest}
        limits |= {"tile": 128, "block_size": 16, "num_blocks": kept["batch"] * blocks_for(longest, 16)}
        for side, loads in kept["figures"].items():
            if load in loads:
                policy = f"policy=vllm_v1 chunk={kept['budget']}" if side == "vllm" else side
                about = {"case": f"{file.stem} {load}: {side}", "policy": policy, "load": float(load.split()[-1])}
                units = {name: 1e-3 if key.endswith("_ms") else 1.0 for name, key in CLIENT.items()}
                figures = {name: loads[load][key] * units[name] for name, key in CLIENT.items()}
                yield asked_run({**about, **limits}, figures, asked)
