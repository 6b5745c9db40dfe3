"""One run from its configuration to its folder: what `experiments.run` does once, and a sweep for each of its runs."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from cbatch import ConfigError, Engine
from cbatch.results.conservation import accounts_of
from cbatch.results.metrics import served
from cbatch.results.summary import summarize
from cbatch.sim.cluster import Cluster
from experiments.config.assemble import Run, assemble, closed_on_error
from experiments.config.error_lines import one_line
from experiments.progress import progress
from experiments.store.provenance import versions
from experiments.store.run_folder import DECISIONS, is_finished, opened, write_results
from experiments.store.text import DIGEST, name_of, origin_of, run_line, run_text

ERRORS = "errors.log"
"""In a sweep's folder: a line for each run that failed."""

_LONGEST_NAME = 150  # characters of a folder's name


class Refused(BaseException):
    """A user's error on its way to the command line, past Hydra, which puts a line of its own before an exception's."""


def run_job(config: DictConfig) -> None:
    """Serve the workload, write the run's folder, and print the figures.

    In a sweep a run that has finished before is left alone. One that fails does not end the others: it is noted in the
    sweep's errors.log.

    Raises:
        ConfigError: this is a sweep, and a worker on a machine that does not share the folder in which it was started.
    """
    hydra = HydraConfig.get()
    sweeping = hydra.mode is RunMode.MULTIRUN
    if sweeping:
        _go_to_the_sweep(hydra)
    try:
        settings: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
        (_run_of_sweep if sweeping else _single_run)(settings, hydra)
    except Exception as error:
        message = one_line(error, hydra.overrides.task)
        if not sweeping:
            if message is None:
                raise
            raise Refused(message) from error
        if message is None:  # no user's error: its traceback would not come back from another process
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
        line = f"{folder_name(hydra.job.override_dirname)}: {message}\n"
        sys.stderr.write(f"error: {line}")
        _note_error(_sweep_folder(hydra) / ERRORS, line)


def _go_to_the_sweep(hydra: HydraConf) -> None:
    """Relative paths are meant from where the command was given; the workers of a running cluster begin elsewhere."""
    if not (Path(hydra.sweep.dir) / "multirun.yaml").is_file():  # Hydra makes the folder on every machine
        raise ConfigError(
            f"{hydra.sweep.dir}: not shared with {socket.gethostname()}; give the command in a folder that all "
            "machines of the cluster see"
        )
    os.chdir(hydra.runtime.cwd)


def _sweep_folder(hydra: HydraConf) -> Path:
    return Path(os.path.relpath(hydra.sweep.dir))


def _note_error(path: Path, line: str) -> None:
    """A sweep must not end well if one of its runs has not, so where this cannot be written it ends here."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise Refused(
            f"{path}: {error.strerror or error}; make room, and run the same command with its sweep="
        ) from error


def _single_run(settings: Mapping[str, Any], hydra: HydraConf) -> None:
    if hydra.sweeper.get("params"):
        raise ConfigError(f"experiment={hydra.runtime.choices['experiment']} is a sweep; add -m")
    folder = _single_folder(settings, hydra)
    if settings["output"] is not None and is_finished(folder, settings):
        print(f"{folder} holds this run already; remove it to run again")
        return
    print(run_text(_execute(settings, hydra, folder, sweeping=False)))
    print(f"\nresults: {folder}")


def _run_of_sweep(settings: Mapping[str, Any], hydra: HydraConf) -> None:
    if settings["output"] is not None:
        raise ConfigError(f"output={settings['output']} names the folder of a single run; name a sweep with sweep=")
    folder = _sweep_folder(hydra) / folder_name(hydra.job.override_dirname)
    if is_finished(folder, settings):
        print(f"{folder.name}: finished before", flush=True)
    else:
        print(run_line(folder.name, _execute(settings, hydra, folder, sweeping=True)), flush=True)


def folder_name(overrides: str) -> str:
    """A readable, unique name for a run of a sweep, no longer than file systems allow.

    overrides: as in Hydra's `override_dirname`, such as `chunk=256,policy=sarathi`.
    """
    name = ",".join(part if "/" not in part else _without_folders(part) for part in overrides.split(","))
    name = re.sub(r"[^\w.,=+~-]+", "_", name) or "run"
    if name == overrides and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]},{DIGEST}{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"


def _without_folders(override: str) -> str:
    """Of a path, the last part: `workload.path=/data/trace.csv` becomes `workload.path=trace.csv`."""
    key, _, value = override.partition("=")
    return f"{key}={value.rstrip('/').rpartition('/')[2]}"


def _single_folder(settings: Mapping[str, Any], hydra: HydraConf) -> Path:
    """The folder of a single run: as asked for, else a new one."""
    if settings["output"] is not None:
        return Path(str(settings["output"]))
    stem = Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{hydra.runtime.choices['policy']}"
    number, folder = 1, stem
    while folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}_{number}")
    return folder


def _execute(settings: Mapping[str, Any], hydra: HydraConf, folder: Path, sweeping: bool) -> dict[str, Any]:
    """Run and write; returns the summary."""
    began = time.perf_counter()
    run = assemble(settings)
    _say_chosen(run, hydra, sweeping)
    with opened(folder, settings, partial(_facts, run), replace=sweeping), closed_on_error(run):
        bar = progress("off" if _in_parallel(hydra) else run.settings.progress, len(run.requests))
        with _decisions_of(run, hydra, folder), bar as on_step:
            gc.freeze()  # what is there by now stays: the collector need not look at it while requests are served
            record = run.engine.run(on_step)
            gc.freeze()  # nor at what they left, while it is written
        run.engine.executor.close()
        metrics, requests = run.settings.metrics, served(record)
        figures = summarize(
            record,
            num_blocks=run.engine.state.pool.num_blocks,
            max_batch=run.limits.max_batch,
            overshoot_tokens=run.engine.state.num_overshoot_tokens,
            warmup_requests=metrics.warmup_requests,
            drain_requests=metrics.drain_requests,
            objectives=metrics.objectives,
            requests=requests,
        )
        about = {**_about(run, settings, hydra), "wall_seconds": time.perf_counter() - began}
        title = f"{name_of(about)}, {origin_of(about)}" if run.settings.timeline else None
        summary = {"about": about, **figures}
        write_results(folder, record, requests, summary, timeline_title=title, decode=_decoder(run))
        gc.unfreeze()
    return summary


def _facts(run: Run) -> dict[str, Any]:
    """What is to be told of a run that does not get to its end: where its requests and KV blocks are."""
    engines = run.engine.engines if isinstance(run.engine, Cluster) else [run.engine]
    accounts = accounts_of(engines, run.requests)
    whole = accounts.num_requests == len(run.requests)
    blocks = sum(engine.state.pool.num_blocks for engine in engines)
    return {"accounts": accounts._asdict(), "accounts_add_up": whole and accounts.num_blocks == blocks}


def _decisions_of(run: Run, hydra: HydraConf, folder: Path) -> AbstractContextManager[None]:
    """Within, the run's decisions are written down, if that was asked for."""
    if not run.settings.decisions:
        return nullcontext()
    if not isinstance(run.engine, Engine):
        raise ConfigError("decisions=true writes down what one replica decides; set backend.replicas=1")
    from experiments.store.decisions_file import written_decisions  # loaded only where it is asked for

    return written_decisions(folder / DECISIONS, run.engine, run.requests, hydra.overrides.task)


def _decoder(run: Run) -> Callable[[Sequence[int]], str] | None:
    """Turns token ids into text, where the checkpoint came with a tokenizer."""
    folder = Path(run.spec.path) if run.spec.path is not None else None
    if run.backend.simulated or folder is None or not (folder / "tokenizer_config.json").is_file():
        return None
    executor: Any = run.engine.executor
    decode: Callable[[Sequence[int]], str] = executor.vocabulary.decode
    return decode


def _say_chosen(run: Run, hydra: HydraConf, sweeping: bool) -> None:
    """One line for what was chosen automatically; a sweep keeps it in its results only."""
    stated = {override.partition("=")[0] for override in hydra.overrides.task}
    if run.backend.name == "cpu" and "model" not in stated:
        run.chosen.setdefault("model", f"{run.spec.name} (the default of backend=cpu)")
    if run.chosen and not sweeping:
        print("chosen: " + ", ".join(f"{key}={value}" for key, value in run.chosen.items()), flush=True)


def _in_parallel(hydra: HydraConf) -> bool:
    """Whether runs share the terminal, so that no bar can be drawn."""
    return hydra.mode is RunMode.MULTIRUN and hydra.runtime.choices["hydra/launcher"] != "basic"


def _about(run: Run, settings: Mapping[str, Any], hydra: HydraConf) -> dict[str, Any]:
    """Where the figures come from: what was chosen by name, on what they were obtained, and with which versions."""
    choices = hydra.runtime.choices
    chunks = settings["policy"].get("chunking") is not None
    aware = run.chosen.get("chunking") is not None or choices["chunking"] == "pd_aware"
    target = settings["policy"]["_target_"]
    return {
        "policy": choices["policy"] if choices["policy"] != "external" else target.rpartition(".")[2],
        "policy_target": target,
        "chunking": (("pd_aware" if aware else choices["chunking"]) if chunks else None),
        "chunk": settings["chunk"] if chunks and not aware else None,
        "workload": choices["workload"],
        "model": run.spec.name,
        "runtime": choices["runtime"],
        "backend": run.backend.name,
        "simulated": run.backend.simulated,
        "hardware": run.backend.hardware(run.cost.profile),
        "execution": run.backend.facts(run.engine.executor, run.cost),
        "limits": {
            "batch": run.limits.max_batch,
            "tokens": run.limits.max_tokens,
            "kv_blocks": run.engine.state.pool.num_blocks,
            "block_size": run.engine.state.pool.block_size,
        },
        "chosen": run.chosen,
        "requests": len(run.requests),
        "overrides": list(hydra.overrides.task),
        "date": f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z}",
        "versions": versions(),
    }
