"""A run under Hydra: `experiments.run` calls `run_job` once, and for each run of a sweep."""

import hashlib
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from difflib import get_close_matches
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any, NamedTuple

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from cbatch import SLO, ConfigError, FinishReason, Request, RunRecord
from cbatch.results.summary import summarize
from experiments.serve import option_name, serve
from experiments.settings.error_lines import one_line
from experiments.settings.identity import identity
from experiments.settings.settings import Settings, read_settings
from experiments.store.claim import ClaimedError, check_free
from experiments.store.run_folder import CONFIG, SUMMARY, new_run_folder, read_finished
from experiments.store.runs import ERRORS
from experiments.store.sources import differences, sources_of
from experiments.store.text import flat, run_line, run_text

_LONGEST_NAME = 150  # characters of a folder's name
_QUOTED_WORD = re.compile(r"'(?!(?:true|false|null|nan|inf)')([a-z_][\w./-]*)'", re.IGNORECASE)
_SECONDS_BETWEEN_LOOKS = 0.2  # at a run that another process has begun


class Refused(BaseException):
    """Carries a user's error to the command line. No Exception: Hydra would print a line of its own before it."""


class ReaderEnded(BaseException):
    """The output is a pipe without a reader; ends a sweep, also from a worker's process."""


class Work(NamedTuple):
    """What a job does in its folder, by default a run.

    read, read_finished, serve: as `experiments.settings.settings.read_settings`, `experiments.store.run_folder.read_finished` and
    `experiments.serve.serve`.
    text, line: of the summary; of its name and the summary, in a sweep. stem: what the name of a new folder ends with.
    figures: beginnings of the names of its own figures, for `objective`.
    """

    read: Callable[..., Any] = read_settings
    read_finished: Callable[[Path, Mapping[str, Any]], dict[str, Any] | None] = read_finished
    serve: Callable[..., dict[str, Any]] = serve
    text: Callable[[Mapping[str, Any]], str] = run_text
    line: Callable[[str, Mapping[str, Any]], str] = run_line
    stem: str = ""
    figures: tuple[str, ...] = ()


RUN = Work()


def run_job(config: DictConfig, work: Work = RUN) -> float | None:
    """Serves the workload, writes the run's folder and prints the figures.

    In a sweep a run that has finished before is not repeated, and one that fails does not end the others: it is noted in
    the sweep's errors.log.

    Returns:
        The figure that `objective` names, for sweepers that search; None without one, or if a run of a sweep failed.

    Raises:
        ConfigError: the sweep's folder is not shared with this machine.
        Refused: a single run failed, the sweeper needs an objective, or no run has such a figure.
    """
    hydra = HydraConfig.get()
    sweeping = hydra.mode is RunMode.MULTIRUN
    if sweeping:
        _leave_interrupts_to_the_launcher()
        _go_to_the_sweep(hydra)
    if sweeping and _searches(hydra) and config.get("objective") is None:
        raise Refused(
            "objective=null: this sweeper needs a figure of summary.json; give one, as objective=ttft_seconds.p99"
        )
    objective = config.get("objective")
    if objective is not None and not may_exist(str(objective)) and not str(objective).startswith(work.figures):
        raise Refused(no_such_figure(f"objective={objective}", known_figures()))
    try:
        keys = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        settings = work.read(keys, overrides=_overrides(hydra), choices=dict(hydra.runtime.choices))
        summary = (_run_of_sweep if sweeping else _single_run)(settings, hydra, work)
        return None if settings.objective is None else objective_of(summary, settings.objective)
    except BrokenPipeError:
        raise ReaderEnded from None
    except Exception as error:
        message = one_line(error, hydra.overrides.task)
        if not sweeping:
            if message is None:
                raise
            raise Refused(message) from error
        if message is None:  # not a user's error: print its traceback, which other processes cannot return
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
        line = f"{folder_name(hydra.job.override_dirname)}: {message}\n"
        sys.stderr.write(f"error: {line}")
        _note_error(_sweep_folder(hydra) / ERRORS, line)
        return None


def _leave_interrupts_to_the_launcher() -> None:
    """In a worker's process Ctrl-C is ignored: the launcher, which receives it too, ends its workers.

    Interrupted while it returns a result, a worker would leave the launcher waiting for the rest of it.
    """
    if current_process().name != "MainProcess" and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def objective_of(summary: Mapping[str, Any], key: str) -> float:
    """Returns a number of a summary by its dotted key, as in "ttft_seconds.p99".

    Raises:
        ConfigError: there is no such number, or it has no value in this run.
    """
    numbers = {
        name: value
        for name, value in flat(summary)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
    if key not in numbers:
        raise ConfigError(no_such_figure(f"objective={key}", list(numbers)))
    value = numbers[key]
    if value is None or not math.isfinite(value):
        raise ConfigError(f"objective={key}: has no value in this run; choose another figure of summary.json")
    return float(value)


def may_exist(key: str) -> bool:
    """Whether some run has a figure of this name: those by tier and client, and facts about the run, are known at its end."""
    return key in known_figures() or key.startswith(("about.", "attainment.tiers.", "service.clients."))


def known_figures() -> list[str]:
    """The dotted keys of every figure that a summary may have, from the summary of a run that served nothing."""
    request, record = Request(0, 1, 1, client="any", slo=SLO(1.0, 1.0, 1.0)), RunRecord()
    request.finish_reason, request.finished_at = FinishReason.REJECTED, 0.0
    record.requests.append(request)
    return [name for name, _ in flat(summarize(record, num_blocks=1, max_batch=1))]


def no_such_figure(given: str, known: Sequence[str]) -> str:
    """The message for a key=NAME that names no number of a summary, or one that other runs have."""
    key = given.partition("=")[2]
    if key not in known and key in known_figures():
        return f"{given}: this run has no {key.partition('.')[0]}; docs/metrics.md says of which requests it is"
    near = get_close_matches(key, known, 3, 0.3) or list(known)[:3]
    return f"{given}: summary.json has no such number; did you mean {' or '.join(near)}?"


def _go_to_the_sweep(hydra: HydraConf) -> None:
    """Changes to the folder in which the sweep was started: the workers of a running cluster begin elsewhere."""
    # Hydra makes the folder on every machine, but its basic sweeper writes this file only where the sweep was started
    if not _searches(hydra) and not (Path(hydra.sweep.dir) / "multirun.yaml").is_file():
        problem = f"{hydra.sweep.dir}: not shared with {socket.gethostname()}"
        raise ConfigError(f"{problem}; give the command in a folder that all machines of the cluster see")
    os.chdir(hydra.runtime.cwd)


def _searches(hydra: HydraConf) -> bool:
    """Whether the sweeper chooses settings by the objectives of earlier runs, as Optuna does."""
    return bool(hydra.runtime.choices.get("hydra/sweeper", "basic") != "basic")


def _sweep_folder(hydra: HydraConf) -> Path:
    return Path(os.path.relpath(hydra.sweep.dir))


def _note_error(path: Path, line: str) -> None:
    """Appends a line to errors.log. If that fails the sweep ends: it must not succeed with a failed run."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        problem = f"{path}: {error.strerror or error}"
        raise Refused(f"{problem}; free some space, and run the same command with its sweep=") from error


def _single_run(settings: Settings, hydra: HydraConf, work: Work) -> Mapping[str, Any]:
    if hydra.sweeper.get("params"):
        raise ConfigError(f"experiment={hydra.runtime.choices['experiment']} is a sweep; add -m")
    if settings.output is None:
        policy = option_name(hydra.runtime.choices, "policy", settings.composed["policy"])
        stem = Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{_for_a_path(policy)}{work.stem}"
        chosen: AbstractContextManager[Path] = new_run_folder(stem)
    else:
        chosen = nullcontext(_output_folder(settings.output))
    with chosen as folder:
        if summary := work.read_finished(folder, identity(settings)):
            if (changed := _other_code(summary, settings)) and settings.other_code == "rerun":
                remedy = "give another output=, remove the folder, or keep it with other_code=keep"
                raise ConfigError(f"{folder} holds this run, made by other code ({changed}); {remedy}")
            print(f"{work.text(summary)}\n\n{folder} holds this run already{_by(changed)}; remove it to run again")
            return summary
        check_free(folder)  # before weights are loaded
        summary = work.serve(settings, folder, say=partial(print, flush=True))
    print(work.text(summary))
    print(f"\nresults: {folder}")
    return summary


def _run_of_sweep(settings: Settings, hydra: HydraConf, work: Work) -> Mapping[str, Any]:
    folder = _sweep_folder(hydra) / folder_name(hydra.job.override_dirname)
    alone = hydra.runtime.choices["hydra/launcher"] == "basic"  # others share the terminal: no bar can be drawn
    waits = False
    while True:
        if summary := work.read_finished(folder, identity(settings)):
            changed = _other_code(summary, settings)
            if not changed or settings.other_code == "keep":
                print(f"{folder.name}: finished before{_by(changed)}", flush=True)
                return summary
            print(f"{folder.name}: runs again, was made by other code ({changed})", flush=True)
        try:
            check_free(folder)
            summary = work.serve(settings, folder, replace=True, say=lambda line: None, bar=alone)
            print(work.line(folder.name, summary), flush=True)
            return summary
        except ClaimedError as error:  # the same run, by another worker, or by one that survived an earlier command
            if not waits:
                print(f"{folder.name}: waits for {error.who}, which runs it", flush=True)
            waits = True
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _output_folder(output: object) -> Path:
    """Returns the folder that `output` names; raises ConfigError if it is a sweep's, or inside a run's."""
    folder = Path(str(output)).expanduser()
    if (folder / "multirun.yaml").is_file():
        raise ConfigError(f"output={output}: is the folder of a sweep; give another folder, or -m and sweep=NAME")
    for parent in folder.parents:
        if (parent / CONFIG).is_file() and (parent / SUMMARY).is_file():
            raise ConfigError(f"output={output}: {parent} is the folder of a run; give another folder")
    return folder


def _other_code(summary: Mapping[str, Any], settings: Settings) -> str:
    """Returns what differs between the code and files that made a run and those of now, in words."""
    return differences(summary["about"].get("code"), sources_of(settings.composed))


def _by(changed: str) -> str:
    return f", by other code ({changed})" if changed else ""


def _overrides(hydra: HydraConf) -> list[str]:
    """Returns the command line of a run, its --config-dir first."""
    sources = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    return [*(f"--config-dir={path}" for path in sources), *hydra.overrides.task]


def folder_name(overrides: str) -> str:
    """Returns a readable, unique name for a run of a sweep, short enough for file systems.

    overrides: as in Hydra's `override_dirname`, such as `chunk=256,policy=sarathi`. Hydra quotes all values of a sweep of which
        one is quoted, as in `orca,'slai(x=1)'`; the name is that of the same value without quotes.
    """
    overrides = _QUOTED_WORD.sub(r"\1", overrides)
    name = ",".join(part if "/" not in part else _without_folders(part) for part in overrides.split(","))
    name = _for_a_path(name) or "run"
    if name == overrides and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]},~{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"


def _for_a_path(name: str) -> str:
    """Replaces what a shell or file system may not take: `'orca(x=1)'` becomes `orca_x=1`."""
    return re.sub(r"[^\w.,=+~-]+", "_", re.sub(r"[)']", "", name))


def _without_folders(override: str) -> str:
    """Shortens a path to its last part: `workload.path=/data/trace.csv` becomes `workload.path=trace.csv`."""
    key, _, value = override.partition("=")
    return f"{key}={value.rstrip('/').rpartition('/')[2]}"
