"""Serves one workload from plain settings: builds the run, writes its folder, returns its summary. Knows nothing of Hydra."""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from shutil import copy
from typing import Any

from cbatch import ConfigError, Engine, RunRecord
from cbatch.arrivals import Stream
from cbatch.described import name_of_class
from cbatch.request import Status
from cbatch.results.conservation import take_inventory
from cbatch.results.metrics import Asked, Served, collect_served
from cbatch.results.regret import regret
from cbatch.results.stages import account_stages
from cbatch.results.summary import summarize
from experiments.progress import progress
from experiments.settings.assemble import Run, assemble, bounds_of
from experiments.settings.error_lines import one_line
from experiments.settings.hardware import CPU, UnmeasuredError, cpu_profile
from experiments.settings.identity import identity
from experiments.settings.settings import Settings
from experiments.store.csv_tables import StreamedTables
from experiments.store.provenance import commit, now, versions
from experiments.store.run_folder import DECISIONS, PROFILE, open_run_folder, write_results, write_summary
from experiments.store.sources import sources_of
from experiments.workloads.drawn import Drawn


def serve(
    settings: Settings, folder: Path, *, replace: bool = False, say: Callable[[str], None] = print, bar: bool = True
) -> dict[str, Any]:
    """Serves the workload and writes the run's folder; returns the summary, as in summary.json.

    Where a policy asks for predictions of a CPU that was not measured, measures it and begins again.

    Args:
        replace: overwrite a complete run in this folder.
        say: receives lines about what was chosen automatically, and about what takes long.
        bar: False: no progress bar, whatever the settings say.

    Raises:
        CbatchError: a setting that cannot be used, or a failure of the policy.
    """
    began, origin = time.perf_counter(), origin_of_run(settings)
    run = assemble(settings, say)
    bounds = bounds_of(run) if settings.bounds else None
    decode = _decoder(run)
    if run.chosen:
        say("chosen: " + ", ".join(f"{key}={value}" for key, value in run.chosen.items()))
    with open_run_folder(folder, settings.composed.keys, origin["identity"], lambda: _facts(run), replace=replace):
        try:
            record = _run(run, folder, say, bar)
        except UnmeasuredError as error:
            from experiments.profile.command import measure_cpu  # loads torch

            say(f"view.cost: measuring this CPU with model={error.spec.name}, once, into {cpu_profile(error.spec)}")
            measure_cpu(error.spec)
            began, run = time.perf_counter(), assemble(settings)
            record = _run(run, folder, say, bar)
        requests = run.streamed.run.served() if run.streamed else collect_served(record)
        figures = figures_of(run, record, requests)
        if bounds is not None:
            figures["regret"] = regret(run.requests, requests, bounds)
        load = None if run.rate is None else {"load": settings.workload.load, "rate": run.rate}
        ended = run.streamed.run.ended if run.streamed else record.requests
        measured = {
            "load": load,
            "mean_waiting": requests.mean_waiting,
            "outputs_cut": sum(request.is_cut for request in ended),  # at `max_new_tokens`
            "wall_seconds": time.perf_counter() - began,
        }
        summary = {"about": about_run(run) | origin | measured, **figures}
        if settings.tables and not run.streamed:
            write_results(folder, record, requests, summary, timeline=settings.timeline, decode=decode)
        write_summary(folder, summary)
        gc.unfreeze()
    return summary


def figures_of(run: Run, record: RunRecord, requests: Served | None = None) -> dict[str, Any]:
    """The metrics of a run that has ended. requests: as in `summarize`."""
    metrics, streamed = run.settings.metrics, run.streamed and run.streamed.run
    return summarize(
        record,
        num_blocks=run.kv.num_blocks,
        max_batch=run.limits.max_batch,
        overshoot_tokens=sum(engine.state.num_overshoot_tokens for engine in run.engine.engines),
        warmup_requests=metrics.warmup_requests,
        drain_requests=metrics.drain_requests,
        objectives=metrics.objectives,
        client_weights=metrics.client_weights,
        requests=requests,
        steps=streamed.steps() if streamed else None,
        ended=streamed.ended if streamed else None,
        submitted=None if streamed else run.requests,
    )


def _run(run: Run, folder: Path, say: Callable[[str], None], bar: bool) -> RunRecord:
    """Serves the requests to their end. The record of a streamed run is empty."""
    shown = progress(run.settings.progress if bar else "off", len(run.requests), run.backend.simulated, say)
    with closing(run.server), _decisions_of(run, folder), shown as on_step:
        gc.freeze()  # settings and requests outlive the run: the collector need not traverse them
        if run.streams:
            return _stream(run, folder, on_step)
        record = run.engine.run(on_step)
        gc.freeze()  # nor the record while it is written
        return record


def _stream(run: Run, folder: Path, on_step: Callable[[Engine, int], None]) -> RunRecord:
    """Makes and submits requests as they arrive, and writes their results as they end."""
    [engine] = run.engine.engines
    with StreamedTables(folder, list(run.totals.extra)) as tables:
        run.streamed = tables

        def show_and_drain(engine: Engine) -> None:
            on_step(engine, len(run.requests) - tables.num_made)
            engine.record.drain(tables.take)

        drawn, by_arrival = run.requests, attrgetter("arrival_time", "id")
        requests = drawn.stream() if isinstance(drawn, Drawn) else sorted(drawn, key=by_arrival)
        engine.arrivals = Stream(tables.watch(requests), engine.check_fits)
        engine.run(show_and_drain)
        tables.take(engine.record.take())
    return RunRecord()


def _facts(run: Run) -> dict[str, Any]:
    """Returns where the requests and KV blocks of a run are, for the report of one that failed."""
    engines, requests, to_come = run.engine.engines, list[Asked](run.requests), 0
    if tables := run.streamed:
        unfinished = (request for request in tables.alive if request.status is not Status.FINISHED)
        requests = [*unfinished, *engines[0].record.requests, *tables.run.ended]
        to_come = len(run.requests) - tables.num_made
    inventory = take_inventory(engines, requests)
    inventory = inventory._replace(pending=inventory.pending + to_come)
    blocks = sum(engine.state.pool.num_blocks for engine in engines)
    whole = inventory.num_requests == len(run.requests) and inventory.num_blocks == blocks
    return {"accounts": inventory._asdict(), "accounts_add_up": whole}


def _decisions_of(run: Run, folder: Path) -> AbstractContextManager[None]:
    """Writes the run's decisions inside the `with` if `decisions=true`."""
    if not run.settings.decisions:
        return nullcontext()
    if len(run.engine.engines) > 1:
        raise ConfigError("decisions=true records the decisions of one replica; set backend.replicas=1")
    from experiments.store.decisions_file import write_decisions  # loaded only where needed

    if run.settings.hardware == CPU and (measured := cpu_profile(run.spec)).is_file():
        copy(measured, folder / PROFILE)  # for a replay on another machine
    return write_decisions(folder / DECISIONS, run.engine.engines[0], run.requests, run.settings.composed.overrides)


def _decoder(run: Run) -> Callable[[Sequence[int]], str] | None:
    """Returns a function from token ids to text, if the checkpoint has a tokenizer; notes it where that cannot be used."""
    folder = Path(run.spec.path) if run.spec.path is not None else None
    if run.backend.simulated or folder is None or not (folder / "tokenizer_config.json").is_file():
        return None
    executor: Any = run.engine.executor
    decode: Callable[[Sequence[int]], str] = executor.vocabulary.decode
    try:
        decode([run.spec.vocab_size - 1])  # loads the tokenizer
    except Exception as error:
        run.chosen["text"] = f"none, outputs are token ids ({one_line(error) or repr(error)})"
        return None
    return decode


def origin_of_run(settings: Settings) -> dict[str, Any]:
    """Returns what a run depends on, and the code that makes it."""
    return {"identity": identity(settings), "code": sources_of(settings.composed.keys)}


def about_run(run: Run) -> dict[str, Any]:
    """Returns the origin of the figures: what was chosen, the hardware, the versions."""
    settings, composed, record = run.settings, run.settings.composed, run.engine.record
    workload = composed.choices.get("workload", "external").partition("(")[0]
    execution = run.backend.facts(run.engine.executor, run.cost, settings.runtime.asynchronous)
    if record.stages:  # of a real pipeline; a simulated one keeps its own account
        execution["stages"] = [asdict(account) for account in account_stages(record)]
    limits = {"batch": run.limits.max_batch, "tokens": run.limits.max_tokens}
    return {
        "policy": repr(settings.policy),
        "chunk": settings.chunk,
        "workload": workload if workload != "external" else name_of_class(type(settings.workload)),
        "model": run.spec.name,
        "runtime": settings.runtime.name,
        "backend": run.backend.name,
        "simulated": run.backend.simulated,
        "hardware": run.backend.hardware(run.cost.profile),
        "execution": execution,
        "limits": {**limits, "kv_blocks": run.kv.num_blocks, "block_size": run.kv.block_size},
        "chosen": run.chosen,
        "requests": len(run.requests),
        "output_lengths_known": run.totals.lengths_known,  # to policies, by `max_new_tokens`
        "overrides": list(composed.overrides),
        "number": composed.number,
        "date": now(),
        "commit": commit(),
        "versions": versions(),
    }
