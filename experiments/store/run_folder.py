"""The results folder of a run. docs/metrics.md lists its files and columns. `experiments.store.tables` reads it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from socket import gethostname
from typing import Any

import numpy as np
import yaml

from cbatch import ConfigError, Request, RunRecord
from cbatch.executor import CopyTimes
from cbatch.results.metrics import Served
from cbatch.results.timeline import write_timeline
from experiments.report.headings import flat
from experiments.report.notes import origin_of
from experiments.store import claim
from experiments.store.csv_tables import ENERGY, REQUESTS, STEPS, has_rows, write_csv
from experiments.text import up_to_stop

CONFIG, SUMMARY, COPIES, STAGES = "config.yaml", "summary.json", "copies.csv", "stages.csv"
REPLICAS = "replicas.csv"
TOKENS, OUTPUTS, TIMELINE = "tokens.npz", "outputs.jsonl", "timeline.json.gz"
DECISIONS, PROFILE = "decisions.jsonl.gz", "profile.json"
FILES = (
    *(CONFIG, SUMMARY, REQUESTS, STEPS, REPLICAS, ENERGY, COPIES, STAGES),
    *(TOKENS, OUTPUTS, TIMELINE, DECISIONS, PROFILE, claim.UNFINISHED),
)

_PARTIAL = (f".{claim.UNFINISHED}", f".{SUMMARY}")  # prefixes of hidden files that a killed run leaves behind

Decode = Callable[[Sequence[int]], str]  # converts token ids to text
ERRORS = "errors.log"  # file in a sweep's folder with one line per failed run
PLOTS = "plots"  # subfolder of a run or sweep for the output of `experiments.plot`


def read_finished(folder: Path, identity: Mapping[str, Any], name: str = SUMMARY) -> dict[str, Any] | None:
    """Returns the figures of a complete run with this identity and undamaged tables, or None. name: see `read_summary`."""
    summary = read_summary(folder, name)
    if summary is None or summary["about"].get("identity") != identity or damage(folder, summary):
        return None
    return summary


def file_lacking(folder: Path, settings: Any, name: str = SUMMARY) -> str:
    """Returns the first file that the command line asks for and a finished run has not, else "". name: see `read_summary`."""
    if name != SUMMARY:
        return ""
    files = {"decisions": DECISIONS, "tables": REQUESTS}
    if settings.tables and not settings.stream:
        files["timeline"] = TIMELINE
    asked = [file for key, file in files.items() if key in settings.composed.given() and getattr(settings, key)]
    return next((file for file in asked if not (folder / file).is_file()), "")


def damage(folder: Path, summary: Mapping[str, Any]) -> str:
    """Returns an error and remedy if a figure or table of a complete run was changed afterwards, else "". Tables may be missing."""
    run = summary.get("run", {})
    for key, value in flat({**summary, "about": {}}) if run else ():
        if key == "run" or not isinstance(value, int | float | None):
            return f"{folder / SUMMARY}: {key} was changed; remove {folder} and run it again"
    for name, key in ((REQUESTS, "requests"), (STEPS, "iterations"), (COPIES, "iterations"), (STAGES, "iterations")):
        path = folder / name
        if key in run and path.is_file() and not has_rows(path, run[key]):
            return f"{path}: is cut off or changed, the run wrote {run[key]} rows; remove {folder} and run it again"
    return ""


def check_whole(folder: Path, summary: Mapping[str, Any] | None) -> None:
    """Raises ConfigError if a figure or table of a complete run was changed afterwards."""
    if summary is not None and (problem := damage(folder, summary)):
        raise ConfigError(problem)


def read_summary(folder: Path, name: str = SUMMARY) -> dict[str, Any] | None:
    """Returns the figures of a complete run, or None. name: the file that is written last."""
    with suppress(OSError, ValueError):
        summary = json.loads((folder / name).read_text(encoding="utf-8"))
        return summary if isinstance(summary, dict) and "about" in summary else None
    return None


def survivals_of(folder: Path) -> list[float]:
    """Returns the survivals of a run with drafts, `drafts.survivals` of its figures. Raises ConfigError if there are none."""
    survivals = (read_summary(folder) or {}).get("drafts", {}).get("survivals")
    if not survivals:
        problem = f"drafter.survivals={folder}: no survivals in its {SUMMARY}"
        raise ConfigError(f"{problem}; give a list as [0.8,0.6], or the folder of a run with drafts by this version")
    return [*survivals.values()]


def run_folders(root: Path, name: str = SUMMARY) -> list[Path]:
    """Returns the folders of complete runs in and below a folder, sorted by name. name: see `read_summary`."""
    return sorted(path.parent for path in root.rglob(name) if read_summary(path.parent, name) is not None)


@contextmanager
def open_run_folder(
    folder: Path, config: Mapping[str, Any], identity: Mapping[str, Any], *, replace: bool
) -> Iterator[None]:
    """Claims the folder and writes config.yaml. A failed run leaves a crash report; an interrupted run leaves no files.

    identity: everything that the run depends on; see `Settings.identity`.
    replace: whether a complete run in this folder may be overwritten.

    Raises:
        ConfigError: the folder cannot be written, or contains other files or a complete run that must not be replaced.
        ClaimedError: another process writes to the folder.
        CbatchError: see `report_crashes`.
    """
    _check_ours(folder, identity, replace)
    with ExitStack() as held:
        try:
            begun = held.enter_context(claim.claimed(folder))
            _check_ours(folder, identity, replace)  # another run may just have ended here
            _remove_files(folder)
            (folder / CONFIG).write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise claim.not_writable(folder, error) from error
        held.enter_context(claim.report_crashes(folder, begun))
        try:
            yield
        except BaseException as error:  # partial results may have filled the disk
            _remove_files(folder, but=() if isinstance(error, KeyboardInterrupt) else (CONFIG, DECISIONS))
            raise


def remove_begun(sweep: Path) -> None:
    """Removes the files of a sweep's runs whose processes were killed, as Ctrl-C does for runs in this process."""
    for folder in [path.parent for path in sweep.glob(f"*/{claim.UNFINISHED}")]:
        state = claim.read_state(folder)
        if state.get("status") == "begun" and state.get("host") == gethostname():
            with suppress(claim.ClaimedError), claim.claimed(folder):
                _remove_files(folder)
            claim.remove_empty([folder])


def write_results(
    folder: Path,
    record: RunRecord,
    requests: Served,
    summary: Mapping[str, Any],
    *,
    timeline: bool,
    decode: Decode | None = None,
) -> None:
    """Writes what a run has beside `RunTables`: times of copies and stages, tokens and the timeline.

    requests: `collect_served(record)`. summary: the run's summary, for the timeline's title. decode: None without a tokenizer.
    """
    if record.copies:
        write_csv(folder / COPIES, CopyTimes._fields, record.copies)
    if record.stages:
        times = [f"{name}_{stage}" for stage in range(len(record.stages[0])) for name in ("started", "ended")]
        write_csv(folder / STAGES, times, (chain.from_iterable(spans) for spans in record.stages))
    if requests.tokens:
        np.savez_compressed(folder / TOKENS, request_id=requests.tokens[0], time=requests.tokens[1])
    if any(request.output for request in record.requests):
        in_order = sorted(record.requests, key=lambda request: request.id)
        lines = [json.dumps(_output(request, decode)) for request in in_order]
        (folder / OUTPUTS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if timeline:
        about = summary["about"]
        write_timeline(folder / TIMELINE, record, f"{about['policy']}, {origin_of(about)}", requests)


def _output(request: Request, decode: Decode | None) -> dict[str, Any]:
    reason = request.finish_reason and request.finish_reason.value
    texts = {}
    if decode is not None:
        ends = bool(request.output) and request.output[-1] in request.stop_tokens
        text, _ = up_to_stop(decode(request.output[: len(request.output) - ends]), request.stop_strings)
        texts = {"prompt": decode(request.prompt or ()), "text": text}
    return {"id": request.id, "finish_reason": reason, **texts, "output": request.output}


def check_usable(folder: Path, identity: Mapping[str, Any], replace: bool) -> None:
    """Raises ConfigError for a folder that `open_run_folder` would refuse, before a long setup."""
    _check_ours(folder, identity, replace)
    claim.check_writable(folder)


def _check_ours(folder: Path, identity: Mapping[str, Any], replace: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; {claim.other_folder(folder)}")
    names = {path.name for path in folder.iterdir()} - {*FILES, PLOTS, claim.LOCK}
    if not all(name.startswith(_PARTIAL) for name in names):
        is_run = read_summary(folder) is not None
        inside = "other runs" if not is_run and run_folders(folder) else "files that do not belong to a run"
        raise ConfigError(f"{folder} contains {inside}; {claim.other_folder(folder)}")
    if not replace and (summary := read_summary(folder)) is not None:
        check_whole(folder, summary)
        what = "this run already" if read_finished(folder, identity) else "a complete run with other settings"
        raise ConfigError(f"{folder} contains {what}; {claim.other_folder(folder)}")


def _remove_files(folder: Path, but: Sequence[str] = ()) -> None:
    for name in (SUMMARY, *FILES):  # the summary first, since it marks the others as complete
        if name not in (claim.UNFINISHED, *but):
            (folder / name).unlink(missing_ok=True)
    for path in chain.from_iterable(folder.glob(f"{name}*") for name in _PARTIAL):
        path.unlink(missing_ok=True)
