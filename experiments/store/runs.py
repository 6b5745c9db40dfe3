"""The complete runs of a folder, and labels from what varies among them."""

import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import yaml

from cbatch import ConfigError
from experiments.store.run_folder import CONFIG, SUMMARY, WITHOUT_EFFECT, damage, read_summary, run_folders
from experiments.store.text import flat, name_of

ERRORS = "errors.log"
"""File in a sweep's folder with one line per failed run."""

INDIRECT = ("chunk", "chunking", "predictor")
"""Root keys that affect a run only where the policy's settings refer to them; `experiment` is resolved into other keys."""

_IGNORED = {*WITHOUT_EFFECT, *INDIRECT}

_NAMED = ("workload", "model", "runtime", "backend", "slo")
"""Groups whose option is in `about`."""

_POLICY = "policy._target_"  # part of a run's name

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, EOFError, BadZipFile, zlib.error, yaml.YAMLError)


class Run(NamedTuple):
    """A complete run. settings: every key of config.yaml, nested ones joined by "."; summary: as in summary.json."""

    folder: Path
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def about(self) -> Mapping[str, Any]:
        about: Mapping[str, Any] = self.summary["about"]
        return about

    @property
    def given(self) -> dict[str, str]:
        """The values on the command line, by key."""
        return {key.lstrip("+~"): value for key, _, value in (text.partition("=") for text in self.about["overrides"])}

    @property
    def experiment(self) -> dict[str, str]:
        """The option of `experiment=`, by this key; empty if none was given."""
        return {key: value for key, value in self.given.items() if key == "experiment"}

    @property
    def effective(self) -> dict[str, Any]:
        """The settings that the run depends on, and `code`: a hash of its own modules and files, if they were recorded."""
        keys = {key: value for key, value in self.settings.items() if key.split(".")[0] not in _IGNORED}
        if "chunking" in self.about.get("chosen", {}):  # in place of the settings
            keys = {key: value for key, value in keys.items() if not key.startswith("policy.chunking.")}
        own = json.dumps(self.about["code"]["own"], sort_keys=True) if "code" in self.about else ""
        return {**keys, "code": sha256(own.encode()).hexdigest()[:6]} if own else keys


def read_runs(folder: str | Path) -> list[Run]:
    """The complete runs in and below a folder, sorted by name with numbers in numerical order.

    Raises:
        ConfigError: there is no such folder, no complete run in it, or a file of a run was changed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; give the folder of a run or of a sweep")
    if not (found := run_folders(root)):
        raise ConfigError(f"{root}: holds no finished run; give the folder of a run or of a sweep, or run it again")
    return [_read(path) for path in found]


def _read(folder: Path) -> Run:
    with reading(folder / CONFIG):
        settings = yaml.load((folder / CONFIG).read_text(encoding="utf-8"), yaml.CSafeLoader)
    with reading(folder / SUMMARY):
        summary = read_summary(folder)
        assert summary is not None, "a run's folder has a summary"
        name_of(summary["about"])
        check_whole(folder, summary)
        return Run(folder, dict(flat(settings)), summary)


def check_whole(folder: Path, summary: Mapping[str, Any] | None) -> None:
    """Raises ConfigError if a table of a complete run was cut off since."""
    if summary is not None and (problem := damage(folder, summary)):
        raise ConfigError(problem)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises ConfigError if `path`, which is read within this context, was changed after the run."""
    try:
        yield
    except (OSError, *_MALFORMED) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise ConfigError(f"{path}: is damaged ({what}); run it again") from error


# -- labels -----------------------------------------------------------------------------------------------------------


def label_runs(runs: Sequence[Run], without: Collection[str] = (), *, apart: bool = True) -> list[str]:
    """Labels of runs: policy and chunk, and the settings that vary among them.

    Settings that follow from others, such as those that a swept `experiment=` sets, are left out.

    Args:
        without: settings that are shown in another way, such as on an axis.
        apart: give each run a label of its own. If false, repeated runs have the same one.
    """
    names = [name_of(run.about) for run in runs]
    varying = _varying([run.effective for run in runs])
    named = _varying([named_options(run) for run in runs])
    known: list[list[Any]] = [names, *(column for key, column in {**varying, **named}.items() if key in without)]
    given = {key for run in runs for key in run.given} - {*without, _POLICY}
    parts = {key: column for key, column in named.items() if key not in without}
    parts |= {key: varying[key] for key in sorted(given) if key in varying}
    others = {**_varying([run.experiment for run in runs]), **varying}
    if apart:
        others |= _varying([{key: value for key, value in run.settings.items() if key in INDIRECT} for run in runs])
        others["folder"] = [run.folder.name for run in runs]
    for key, column in others.items():
        shown = [*known, *parts.values()]
        if key not in parts and key not in without and _classes([*shown, column]) > _classes(shown):
            parts[key] = column
    short = _short_names(parts)
    labels = []
    for index, name in enumerate(names):
        texts = [f"{short[key]}{parts[key][index]}" for key in parts if parts[key][index] is not None]
        arguments = re.split(r", *|[()]", name)
        labels.append(", ".join([name, *(text for text in texts if text not in arguments)]))
    return labels


def label_seeds(runs: Sequence[Run]) -> list[str]:
    """Labels of runs in which those that differ only in a seed share one; without several seeds each has its own."""
    seeds = _varying([run.settings for run in runs]).keys() & seed_keys(runs)
    return label_runs(runs, seed_keys(runs), apart=False) if seeds else label_runs(runs)


def seed_keys(runs: Iterable[Run]) -> set[str]:
    """The settings of runs that are seeds."""
    return {key for run in runs for key in run.settings if key.rpartition(".")[2] == "seed"}


def named_options(run: Run) -> dict[str, Any]:
    return {key: run.about.get(key) for key in _NAMED}


def _varying(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """The keys whose values differ among the rows, and the values as text, [rows]; None where a row has no such key."""
    columns = {key: [_text(row[key]) if key in row else None for row in rows] for row in rows for key in row}
    return {key: _without_folders(key, column) for key, column in columns.items() if len(set(column)) > 1}


def _text(value: object) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _without_folders(key: str, column: list[str | None]) -> list[str | None]:
    """Paths as their last parts, and classes as their names, if these differ as well."""
    mark = "." if key.endswith("_target_") else "/"
    short = [value if value is None else value.rstrip(mark).rpartition(mark)[2] for value in column]
    return short if len(set(short)) == len(set(column)) else column


def _classes(columns: Sequence[Sequence[Any]]) -> int:
    """How many runs the columns distinguish."""
    return len(set(zip(*columns, strict=True)))


def _short_names(keys: Collection[str]) -> dict[str, str]:
    """The last parts of each key, as many as tell it from the others, with "=" behind it; nothing for a folder."""
    whole = {key: key.removesuffix("._target_").split(".") for key in keys}
    short = {"folder": ""}
    for key, parts in whole.items():
        tails = [parts[-size:] for size in range(1, len(parts) + 1)]
        unique = (tail for tail in tails if sum(other[-len(tail) :] == tail for other in whole.values()) == 1)
        short.setdefault(key, f"{'.'.join(next(unique, parts))}=")
    return short
