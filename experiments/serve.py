"""Serves one workload from settings, and writes the results into a folder if it has one. Knows nothing of Hydra."""

import gc
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from itertools import count
from pathlib import Path
from shutil import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch import Engine, FinishReason, Request, RunRecord
from cbatch.cluster import Cluster
from cbatch.results.attainment import num_without, stated_objectives
from cbatch.results.gathered import Gathered
from cbatch.results.metrics import Served
from cbatch.results.regret import BoundsOf, regret
from cbatch.results.replicas import COLUMNS, rows_of
from cbatch.results.sessions import early_turns, last_begin, sessions_open
from cbatch.results.summary import offered_rate, summarize
from cbatch.results.utilisation import machines_of
from cbatch.results.waits import Waits
from experiments.progress import progress
from experiments.report.run_text import run_text
from experiments.report.titles import title_of
from experiments.settings.hardware import CPU, cpu_profile
from experiments.settings.settings import Settings
from experiments.setup.assemble import Run, assemble, with_workload
from experiments.setup.earlier_runs import EarlierRuns
from experiments.setup.lacks import lacks_of
from experiments.store.csv_tables import RunTables, stated_columns, write_csv, write_energy
from experiments.store.provenance import commit, now, versions, write_json
from experiments.store.run_folder import (
    DECISIONS,
    PROFILE,
    REPLICAS,
    SUMMARY,
    check_usable,
    open_run_folder,
    write_results,
)
from experiments.store.sources import sources_of
from experiments.trials.load import bounds_of, resolve_load

if TYPE_CHECKING:
    import pandas as pd

Loop = Callable[[Run, Path | None], RunRecord]

AT_ONCE = 1000  # iterations that a streamed run holds before it keeps them
_EARLIER_RUNS = EarlierRuns()


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The result of a run. Figures and frames are made when they are first read; `print` shows the figures.

    record: the iterations, and the requests in the order of their ends, each with its tokens (`output`); if streamed, the last of them.
    gathered: what the figures need of the record.
    about: where the figures come from. measures: further arguments of `summarize`.
    regret: returns the figures of `bounds=true`; None without.
    streamed: the folder in which a streamed run has its tables.
    """

    record: RunRecord
    gathered: Gathered
    about: Mapping[str, Any]
    measures: Mapping[str, Any]
    regret: Callable[[], Mapping[str, float]] | None = None
    streamed: Path | None = None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures by group and name, as summary.json has them; docs/metrics.md defines them."""
        figures = summarize(self.gathered, **self.measures)
        return {"about": self.about, **figures, **({"regret": self.regret()} if self.regret else {})}

    @cached_property
    def requests(self) -> "pd.DataFrame":
        """A row for each request, in the order of their ends: the columns of requests.csv, seconds and tokens."""
        from experiments.store.tables import frame_of_requests, read_requests  # loads pandas

        cached, served = self.measures.get("num_evicted_blocks") is not None, self.gathered.served
        return read_requests(self.streamed) if self.streamed else frame_of_requests(self.record, served, cached)

    @cached_property
    def steps(self) -> "pd.DataFrame":
        """A row for each iteration: the columns of steps.csv, named as in `cbatch.StepRecord`; times in seconds."""
        from experiments.store.tables import frame_of_steps, read_steps

        return read_steps(self.streamed) if self.streamed else frame_of_steps(self.record)

    def __str__(self) -> str:
        return run_text(self.summary)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __repr__(self) -> str:
        return f"<Result of {title_of(self.about)}>"


def serve(
    settings: Settings,
    folder: Path | None = None,
    *,
    replace: bool = False,
    log: Callable[[str], None] = print,
    bar: bool = True,
    largest: Request | None = None,
    loop: Loop | None = None,
) -> Result:
    """Serves the workload to its end.

    Args:
        folder: for the results; None: nothing is written.
        replace: overwrite a complete run in this folder.
        log: receives lines about automatic choices and about long steps.
        bar: False: no progress bar, whatever the settings say.
        largest, loop: see `assemble`: for a server, which serves its clients' requests in place of the workload's.

    Raises:
        CbatchError: a setting that cannot be used, or a failure of the policy.
    """
    began, origin = time.perf_counter(), origin_of_run(settings)
    if folder:
        check_usable(folder, origin["identity"], replace)
    _EARLIER_RUNS.collect()
    gc.freeze()  # imported modules outlive the run: the collector need not traverse them while requests are made
    resolved, share, rate = (settings, None, None) if largest else resolve_load(settings)
    run = assemble(resolved if folder else with_workload(resolved, resolved.workload), log, largest=largest)
    run.load = None if share is None or rate is None else {"load": share, "rate": rate}
    bounds = bounds_of(run) if settings.bounds else None
    lacks_of(run)  # raises
    if run.chosen:
        log("chosen: " + ", ".join(f"{key}={value}" for key, value in run.chosen.items()))
    with ExitStack() as held:
        held.callback(gc.unfreeze)
        if folder:
            held.enter_context(open_run_folder(folder, settings.composed.keys, origin["identity"], replace=replace))
        stated = stated_columns(settings.prefix_cache, *(name in run.facts.stated for name in ("pauses", "tpot")))
        columns = list(run.facts.extra), stated
        drafts = any(setup.limits.max_drafts for setup in run.setups)
        with RunTables(folder, *columns, drafts) if folder and settings.tables else nullcontext() as tables:
            keep = partial(_keep, run.gathered, tables)
            with run.meter() as run.energy:
                gc.freeze()  # settings and requests outlive the run: the collector need not traverse them
                record = loop(run, folder) if loop else _run(run, folder, bar, keep)
            origin["wall_seconds"] = time.perf_counter() - began
            if len(record.requests) >= 20_000 and folder:  # whose tables take seconds to write
                log(f"writing the tables of {len(record.requests):,} requests")
            served = keep(record)
        result = _result_of(run, record, bounds, origin, folder if settings.stream else None)
        if folder:
            if settings.tables and not settings.stream:
                write_results(folder, record, served, result.summary, timeline=settings.timeline, decode=run.decode)
            if settings.tables and isinstance(run.engine, Cluster):
                write_csv(folder / REPLICAS, COLUMNS, rows_of(run.gathered, run.prices, len(run.engine.engines)))
            if settings.tables and run.energy:
                write_energy(folder, run.energy.readings)
            write_json(folder / SUMMARY, result.summary)  # last: says that the run is complete
    return result


def _keep(gathered: Gathered, tables: RunTables | None, piece: RunRecord) -> Served:
    """Keeps the record of a run, or the next piece of it. Returns the requests served in this record or piece."""
    served = gathered.add(piece)
    if tables is not None:
        tables.write(piece, served)
    return served


def _result_of(
    run: Run, record: RunRecord, bounds: BoundsOf | None, origin: dict[str, Any], tables: Path | None
) -> Result:
    """Returns the result of a run that has ended; it holds no executor, whose weights may fill a GPU. tables: folder of a streamed run."""
    about, gathered = about_run(run), run.gathered
    served, ended, caches = gathered.served, gathered.ended, [engine.state.cache for engine in run.engine.engines]
    measures = {
        **vars(run.settings.metrics),
        "num_warming": run.facts.num_warming,
        "block_size": run.first.kv.block_size,
        **_limits_of(run),
        "overshoot_tokens": sum(engine.state.num_overshoot_tokens for engine in run.engine.engines),
        "num_evicted_blocks": sum(cache.pool.num_evicted for cache in caches if cache) if any(caches) else None,
        "outcomes": sum(engine.state.drafts.counts for engine in run.engine.engines),
        "host": _host_figures(run) if run.first.kv.num_host_blocks else None,
        "num_replicas": len(caches),
        "prices": run.prices,
        "machines": None if "unknown" in (of := about["utilisation"]) else machines_of(of, gathered.steps["replica"]),
        "readings": np.array(run.energy.readings) if "from" in about.get("energy", {}) else None,
    }
    waits, kept = Waits.of(ended, served), getattr(run.settings.workload, "sessions", 0)  # None: begin at their times
    window = gathered.window(*(measures[key] for key in ("warmup_requests", "drain_requests", "num_warming")))
    measured = {
        "load": run.load,
        "requests": len(ended),
        "never_came": max(run.num_requests - len(ended), 0),  # a session ends with a request that is not served
        "left_out": 0 if window.holds(served.last_token).any() else len(served.last_token),  # if none counts
        "queued": len(ended) > 1 and math.isnan(offered_rate(ended)),
        "mean_waiting": waits.mean,
        "queue_grows": waits.grow,
        "iterations": len(gathered.steps["ended"]),
        "outputs_cut": sum(request.is_cut for request in ended),  # at `max_new_tokens`
        "cancelled": sum(request.finish_reason is FinishReason.CANCELLED for request in ended) - run.end.get("cut", 0),
        "objectives": stated_objectives(ended, run.settings.metrics.objectives),
        "without_objective": num_without(ended, run.settings.metrics.objectives),
        "closing": int((served.last_token > last_begin(ended)).sum()) if kept else 0,
        "warming": run.facts.num_warming,
        "early_turns": {} if run.engine.arrivals.follow_ends else early_turns(ended, served),
        "sessions": {} if kept == 0 else sessions_open(ended, kept),
        **run.end,
    }
    lower = None if bounds is None else partial(regret, run.requests, served, bounds)
    return Result(record, gathered, {**about, **origin, **measured}, measures, lower, tables)


def _host_figures(run: Run) -> dict[str, float]:
    """Returns the bytes copied between the KV caches and host memory, and the seconds for which iterations waited for them."""
    engines, settings = run.engine.engines, run.settings
    block_bytes = run.first.kv.block_size * (settings.model.kv_bytes_per_token + settings.draft_kv_bytes)
    tiers = [engine.state.cache.pool.host for engine in engines if engine.state.cache]
    return {
        "bytes_out": block_bytes * sum(tier.num_out for tier in tiers),
        "bytes_back": block_bytes * sum(tier.num_back for tier in tiers),
        "waited_seconds": sum(engine.seconds_copying for engine in engines),
    }


def _limits_of(run: Run) -> dict[str, Any]:
    """Returns the size of the KV cache and the limit of a batch; if replicas differ, those of each iteration."""
    if len(run.setups) == 1:
        return {"num_blocks": run.first.kv.num_blocks, "max_batch": run.first.limits.max_batch}
    sizes = [(engine.state.pool.num_blocks, engine.limits.max_batch) for engine in run.engine.engines]
    return dict(zip(("num_blocks", "max_batch"), np.array(sizes)[run.gathered.steps["replica"]].T, strict=True))


def _run(run: Run, folder: Path | None, bar: bool, keep: Callable[[RunRecord], Served]) -> RunRecord:
    """Serves the requests to their end. Returns the record; of a streamed run, the piece that `keep` has not taken yet."""
    shown = progress(run.settings.progress if bar else "off", run.num_requests)
    with closing(run.server), decisions_of(run, folder), shown as on_step:
        turns, most = count(), AT_ONCE * max(len(run.engine.engines) // 4, 1)

        def show_and_drain(engine: Engine | Cluster) -> None:
            on_step(engine)
            number = len(engine.engines)  # a piece costs the time of all tokens of unfinished requests
            if next(turns) % number or sum(len(each.record.steps) for each in engine.engines) <= most:
                return
            keep(engine.take())

        record = run.engine.run(show_and_drain if run.settings.stream else on_step)
        gc.freeze()  # nor the record while it is written
        return run.engine.take() if run.settings.stream else record


def decisions_of(run: Run, folder: Path | None) -> AbstractContextManager[None]:
    """Writes the run's decisions inside the `with` if `decisions=true`."""
    if not folder or not run.settings.decisions:
        return nullcontext()
    from experiments.store.decisions_file import write_decisions  # loaded only where needed

    if run.settings.hardware == CPU and (measured := cpu_profile(run.settings.model)).is_file():
        copy(measured, folder / PROFILE)  # for a replay on another machine
    return write_decisions(folder / DECISIONS, run.engine.engines, run.settings.composed.overrides)


def origin_of_run(settings: Settings) -> dict[str, Any]:
    """Returns the identity of a run, and its code."""
    return {"identity": settings.identity, "code": sources_of(settings.composed.keys)}


def about_run(run: Run) -> dict[str, Any]:
    """Returns the origin of the figures: the automatic choices, the hardware, the versions."""
    settings, backend, composed = run.settings, run.settings.backend, run.settings.composed
    return {
        "policy": settings.identity["policy"],
        "chunk": None if "chunk" in composed.unused else settings.chunk,
        "whole_numbers": settings.policy.whole_numbers(),
        **{key: composed.choices[key].partition("(")[0] for key in ("workload", "drafter") if key in composed.choices},
        "model": settings.model.name,
        "runtime": settings.runtime.name,
        "backend": backend.name,
        "simulated": backend.simulated,
        **run.about,
        "chosen": run.chosen,
        "output_lengths_known": run.facts.lengths_known,  # to policies, by `max_new_tokens`
        "prefixes": run.facts.prefixes and not settings.prefix_cache,  # they are known, and not reused
        "lacks": lacks_of(run),
        "overrides": list(composed.overrides),
        "number": composed.number,
        "date": now(),
        "commit": commit(),
        "versions": versions(),
    }
