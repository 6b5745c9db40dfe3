"""One run of a command: its folder, whether it finished before, and its printed text. Knows nothing of Hydra."""

import hashlib
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any, NamedTuple

from cbatch import ConfigError
from cbatch.errors import type_and_message
from experiments.report.run_text import run_text
from experiments.report.text import run_line
from experiments.serve import serve
from experiments.settings.command_line import end_with_the_parent, print_any_text
from experiments.settings.compose import MULTIRUN
from experiments.settings.error_lines import is_of_output, one_line, output_text
from experiments.settings.identity import columns_of
from experiments.settings.overrides import log_unused
from experiments.settings.settings import Composed, Settings, read_settings
from experiments.setup.pools import check_profiles
from experiments.store.claim import ClaimedError, check_free, new_run_folder
from experiments.store.provenance import write_json
from experiments.store.run_folder import CONFIG, ERRORS, SUMMARY, file_lacking, read_finished
from experiments.store.sources import differences, sources_of
from experiments.sweep import table_of_sweep
from experiments.workloads.readers.table import read_text

_LONGEST_NAME = 150  # characters of a folder's name
_QUOTED_WORD = re.compile(r"'(?!(?:true|false|null|nan|inf)')([a-z_][\w./-]*)'", re.IGNORECASE)
_CALL = re.compile(r"'?\b([a-z_][\w.]*)\(([\w.,=-]+)\)'?", re.IGNORECASE)
_OBJECT = re.compile(r"\{_target_: ?([\w.]+)(?:, ?([^{}]*))?\}")
_INNER_MAPPING, _MAPPING = re.compile(r"([\w.]+): ?\{([^{}]*)\}"), re.compile(r"\{([^{}]*)\}")
_SECONDS_BETWEEN_LOOKS = 0.2  # at a run that another process has begun


class SweepEnded(BaseException):
    """Ends a sweep, also from a worker's process. Without a message: the reader of the output has ended."""


def serve_into(settings: Settings, folder: Path, **options: Any) -> dict[str, Any]:
    """Serves a run, as `experiments.serve.serve`, and writes its folder; returns its figures."""
    return serve(settings, folder, **options).summary


class Command(NamedTuple):
    """The parts of a command that differ between commands; the defaults describe a run.

    config: file of its settings in conf/. read: makes settings from Hydra's composition, as `read_settings`.
    serve: as `serve_into`. result: name of the file with the figures, which is written last; empty if a finished run cannot be kept.
    table: returns the table of the finished runs in and below a folder.
    text: describes a summary. line: describes a name and its summary, in a sweep.
    resume_hint: printed after Ctrl-C: what an interrupted run keeps; with it, a run of a sweep prints progress lines, with its name if others run beside it.
    hidden_groups: groups of conf/ that the command does not take, as --help lists them.
    """

    config: str = "config"
    read: Callable[[Composed], Any] = read_settings
    serve: Callable[..., dict[str, Any]] = serve_into
    result: str = SUMMARY
    table: Callable[[Path], str] = table_of_sweep
    text: Callable[[Mapping[str, Any]], str] = run_text
    line: Callable[[str, Mapping[str, Any]], str] = run_line
    resume_hint: str = ""
    hidden_groups: tuple[str, ...] = ()


RUN = Command(hidden_groups=("slo:",))


def read_checked(command: Command, composed: Composed) -> Settings:
    """Reads the settings of a run, and checks early that its files and profiles exist.

    Raises CbatchError: as `Command.read`; a file of the workload or a profile does not exist, or is not of the model.
    """
    if composed.number is None and composed.swept:
        raise ConfigError(f"{' '.join(composed.overrides)}: is a sweep of {', '.join(composed.swept)}; add -m")
    settings: Settings = command.read(composed)
    for key, value in columns_of("workload", settings.workload):
        if key.endswith(("path", "dataset")) and value and not Path(value).exists():
            if settings.traces in map(str, Path(value).parents) and key not in composed.given():
                remedy = f"give traces=FOLDER, the folder with the published traces, or {key}=FILE"
                raise ConfigError(f"{key}={value}: no such file; {remedy}")
            read_text(value, key)  # raises
    check_profiles(settings)
    return settings


def run_alone(command: Command, settings: Settings) -> None:
    """Serves a single run, writes its folder and prints its figures.

    Raises CbatchError as `Command.serve`. What is kept of a run that does not finish is a note of the exception.
    """
    log_unused(settings.composed.overrides, settings.composed.unused)
    if settings.output is None:
        cache = f"_{settings.composed.choices['eviction']}" if settings.prefix_cache else ""
        name = _for_a_path(repr(settings.policy) + cache)[:_LONGEST_NAME] + f"_{command.config}" * (command != RUN)
        stem = Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}"
        chosen: AbstractContextManager[Path] = new_run_folder(stem)
    else:
        chosen = nullcontext(_output_folder(settings.output))
    with chosen as folder:
        if summary := read_finished(folder, settings.identity, command.result):
            if (changed := _other_code(summary, settings)) and settings.other_code == "rerun":
                remedy = "give another output=, remove the folder, or keep it with other_code=keep"
                raise ConfigError(f"{folder} holds this run, made by other code ({changed}); {remedy}")
            if lacking := file_lacking(folder, settings, command.result):
                remedy = "give another output=, or remove the folder"
                raise ConfigError(f"{folder} holds this run without {lacking}; {remedy}")
            print(f"{command.text(summary)}\n\n{folder} holds this run already{_by(changed)}; remove it to run again")
            return
        check_free(folder)  # before weights are loaded
        try:
            summary = command.serve(settings, folder, log=partial(print, flush=True))
        except BaseException as error:
            if command.resume_hint and not isinstance(error, ConfigError) and any(folder.glob("*")):
                error.add_note(f"{command.resume_hint}; the same command with output={folder} goes on")
            raise
    print(f"{command.text(summary)}\n\nresults: {folder}")


class SweepProgress(NamedTuple):
    """A sweep of `total` runs, of which `finished` had finished when it began, at the time `began`.

    shared: the overrides that all of its runs have, which its lines leave out. others: finished runs in its folder that are not its own.
    """

    total: int
    finished: int
    began: float
    shared: frozenset[str] = frozenset()
    others: int = 0

    def text(self, done: int) -> str:
        """Returns how many runs have finished, and how long the others take at the speed so far."""
        new, left = done - self.finished, self.total - done
        seconds = (time.time() - self.began) / max(new, 1) * left
        units = {"h": 3600, "min": 60, "s": 1}
        unit, factor = next(item for item in units.items() if seconds >= 2 * item[1] or item[1] == 1)
        return f"{done} of {self.total}" + (f", {seconds / factor:.0f} {unit} left" if new > 0 and left > 0 else "")

    def label(self, overrides: Sequence[str]) -> str:
        """Returns what tells a run of the sweep from the others, as in `sarathi(x=1), chunk=128`; empty for a single run."""
        varying = [text for text in overrides if text not in self.shared]
        varying.sort(key=lambda text: not text.startswith("policy="))
        return _flatten(_with_objects(", ".join(varying))).removeprefix("policy=").replace("'", "")


def num_finished(sweep: Path, result: str) -> int:
    """Returns the number of finished runs in the folder of a sweep."""
    return sum(1 for _ in sweep.glob(f"*/{result}"))


def run_in_sweep(command: Command, sweep: Path, alone: bool, progress: SweepProgress, composed: Composed) -> None:
    """Serves a run of a sweep unless it has finished before; notes an error in the sweep's errors.log, so that others go on.

    An error is printed where it comes first. alone: no other runs share the terminal.

    Raises SweepEnded: errors.log or the output cannot be written, or the reader of the output has ended.
    """
    _follow_the_launcher()
    print_any_text()
    name = folder_name(composed.name)
    label = progress.label(composed.named) or name
    try:
        settings: Settings = command.read(composed)
        _finish(command, settings, sweep / name, label, alone, progress)
    except Exception as error:
        if is_of_output(error):
            raise SweepEnded("" if isinstance(error, BrokenPipeError) else output_text(error)) from None
        message = one_line(error)
        if message is None:  # a fault: print its traceback, which other processes cannot return
            traceback.print_exc()
            message = type_and_message(error)
        path, line = sweep / ERRORS, f"{name}: {message}"
        known = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if line not in (other.replace(other.partition(": ")[0], name) for other in known):  # but for the run's folder
            sys.stderr.write(f"error: {label}: {message}\n")
        try:
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{line}\n")
        except OSError as problem:  # the sweep must not succeed with a failed run
            text = f"{path}: {problem.strerror or problem}; free some space, and run the same command with its sweep="
            raise SweepEnded(text) from problem


def _finish(
    command: Command, settings: Settings, folder: Path, label: str, alone: bool, progress: SweepProgress
) -> None:
    waits = False
    while True:
        if summary := read_finished(folder, settings.identity, command.result):
            changed, lacking = _other_code(summary, settings), file_lacking(folder, settings, command.result)
            if not lacking and (not changed or settings.other_code == "keep"):
                print(f"{label}: finished before{_by(changed)}", flush=True)
                number, about = settings.composed.number, summary["about"]  # the number orders the tables of the sweep
                if about.get("number") != number and (folder / command.result).is_file():
                    with suppress(OSError):  # the folder may be read-only
                        write_json(folder / command.result, {**summary, "about": {**about, "number": number}})
                return
            why = f"lacks {lacking}" if lacking else f"was made by other code ({changed})"
            print(f"{label}: runs again, {why}", flush=True)
        try:
            check_free(folder)
            if command.resume_hint:
                print(f"{label} ...", flush=True)
            begin = " " if alone else f"{label}:"  # others print, too
            log = partial(print, begin, flush=True) if command.resume_hint else lambda line: None
            summary = command.serve(settings, folder, replace=True, log=log, bar=alone)
            done = progress.text(num_finished(folder.parent, command.result) - progress.others)
            print(f"{command.line(label, summary)}; {done}", flush=True)
            return
        except ClaimedError as error:  # another worker has the same run, or one that survived an earlier command
            if not waits:
                print(f"{label}: waits for {error.who}, which runs it", flush=True)
            waits = True
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _follow_the_launcher() -> None:
    """Makes a worker's process ignore Ctrl-C, and end if its launcher is killed.

    The launcher also receives Ctrl-C and ends its workers. A worker interrupted while it returns a result would leave the launcher waiting.
    """
    if current_process().name != "MainProcess" and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_the_parent()


def _output_folder(output: str) -> Path:
    """Returns the folder that `output` names; raises ConfigError if it is a sweep's, or inside a run's or a sweep's."""
    folder = Path(output).expanduser()
    for path in (folder, *folder.parents):
        is_sweep, is_run = (path / MULTIRUN).is_file(), (path / CONFIG).is_file() and (path / SUMMARY).is_file()
        if is_sweep or (is_run and path != folder):
            what = "a sweep; give another folder, or -m and sweep=NAME" if is_sweep else "a run; give another folder"
            raise ConfigError(f"output={output}: {path} is the folder of {what}")
    return folder


def _other_code(summary: Mapping[str, Any], settings: Settings) -> str:
    """Returns the names of the code and files that have changed since a run, in words."""
    return differences(summary["about"].get("code"), sources_of(settings.composed.keys))


def _by(changed: str) -> str:
    return f", by other code ({changed})" if changed else ""


def folder_name(overrides: str) -> str:
    """Returns a readable, unique name for a run of a sweep, short enough for file systems.

    overrides: as in `chunk=256,policy=sarathi`. If one value of a sweep is quoted, as in `orca,'slai(x=1)'`, Hydra quotes all of them:
        the name leaves out quotes. Arguments of a policy become `slai_x=1`, of an object `mine.Router_x=1`; the keys of mappings are
        dotted, as in `pools=a.batch=8,b.replicas=2`.
    """
    overrides = _CALL.sub(r"\1_\2", _QUOTED_WORD.sub(r"\1", _with_objects(overrides)))
    name = _for_a_path(_flatten(overrides)) or "run"
    if name == overrides and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]},~{hashlib.sha256(overrides.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _with_objects(overrides: str) -> str:
    """Writes `{_target_: mine.Router, x: 1}` as `mine.Router(x=1)`."""
    return _OBJECT.sub(lambda text: f"{text[1]}({_equations(text[2] or '')})".removesuffix("()"), overrides)


def _flatten(overrides: str) -> str:
    """Writes the keys of mappings as dotted names."""
    flat, inner = "", overrides
    while flat != inner:
        flat, inner = inner, _INNER_MAPPING.sub(_dotted, inner)
    return _MAPPING.sub(lambda mapping: _equations(mapping[1]), flat)


def _equations(items: str) -> str:
    """Returns the items of a mapping as on a command line: `batch: 8` becomes `batch=8`."""
    return re.sub(": ?", "=", items)


def _dotted(mapping: re.Match[str]) -> str:
    """Returns a mapping inside another one by dotted keys: `b:{replicas:2,batch:8}` becomes `b.replicas:2,b.batch:8`."""
    return ",".join(f"{mapping[1]}.{item.strip()}".removesuffix(".") for item in mapping[2].split(","))


def _for_a_path(name: str) -> str:
    """Replaces characters that a shell or file system may refuse: `'orca(x=1)'` becomes `orca_x=1`."""
    return re.sub(r"[^\w.,=+~-]+", "_", re.sub(r"[)']", "", name))
