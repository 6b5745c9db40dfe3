"""`python -m experiments.run [-m] key=value ...`: serve a workload with a scheduling policy. `--help` lists all keys.

With -m, comma-separated values are swept; the same command with the same `sweep=NAME` goes on with an interrupted sweep.
"""

import gc
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from datetime import datetime
from functools import partial
from io import StringIO
from pathlib import Path

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict

from cbatch import ConfigError
from experiments.config.choices import with_arguments
from experiments.config.command_line import ends_with_its_reader, values_by_key
from experiments.config.error_lines import CONFIG_FOLDER, one_line
from experiments.config.run_options import parse_options
from experiments.job import ERRORS, ReaderEnded, Refused, run_job
from experiments.store.claim import claimed, make_new_folder
from experiments.store.crash_report import UNFINISHED, TerminatedError, sigterm_raises
from experiments.store.run_folder import CONFIG, read_summary, remove_killed, run_folders
from experiments.store.text import sweep_text

_FULL_ERROR = "HYDRA_FULL_ERROR"

OPTIMUM = "optimization_results.yaml"
"""File in which `hydra-optuna-sweeper` leaves the best settings."""

_SHOWS_ONLY = ("help", "hydra_help", "version", "shell_completion", "cfg", "info")
"""Options that print something instead of running."""

_ALL_FAILED = "No trials are completed yet."
"""Optuna's error after a search without a successful run."""

_NOT_LISTED = (
    "workload/common:",
    "hydra:",
    *(f"hydra/{name}:" for name in ("env", "help", "hydra_help", "hydra_logging", "job_logging", "output")),
)
"""Groups that --help omits: parts of other options, and Hydra's own ways of writing."""


def main() -> int:
    """Runs the command line; returns the exit status.

    0, 2 for an error, 130 after Ctrl-C, 141 if the reader of the output has ended, 143 after SIGTERM.
    """
    with ExitStack() as claims:  # released after the last line that is printed
        return ends_with_its_reader(partial(_main, claims))


def _main(claims: ExitStack) -> int:
    gc.set_threshold(20_000)  # allocations; few of the settings and requests about to be made are garbage
    logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)  # failed runs are reported by `run_job`
    began = datetime.now()
    options = Namespace(overrides=[], config_dir=None)
    sweep: str | None = None
    traceback_wanted = os.environ.get(_FULL_ERROR) == "1"
    try:
        sys.argv[1:] = arguments = with_arguments(sys.argv[1:])
        options = parse_options(arguments)
        for key, values in values_by_key(options.overrides).items():
            if len(values) > 1:
                print(f"{key} is given {len(values)} times; the last one counts: {key}={values[-1]}")
        if options.multirun and not any(getattr(options, name) for name in _SHOWS_ONLY):
            sweep = claims.enter_context(_claimed_sweep(arguments))
            (_folder(sweep) / ERRORS).unlink(missing_ok=True)
        with sigterm_raises(), _hydra_raises():
            hydra_main = hydra.main(config_path=str(CONFIG_FOLDER), config_name="config", version_base="1.3")(run_job)
            if options.help:
                print(_help(hydra_main))
            elif _needs_hydra_main(arguments):
                hydra_main()
            else:
                run_job(_compose(arguments))
    except ReaderEnded:
        raise BrokenPipeError from None
    except KeyboardInterrupt:
        if sweep is not None:
            remove_killed(_folder(sweep), since=began)
        print(f"\ninterrupted; {_how_to_resume(sweep)}", file=sys.stderr)
        return 130
    except TerminatedError as error:
        print(error if sweep is None else f"terminated; {_how_to_resume(sweep)}", file=sys.stderr)
        return 143
    except (Exception, Refused) as error:
        message = str(error) if isinstance(error, Refused) else one_line(error, options.overrides, options.config_dir)
        if sweep is not None and str(error) == _ALL_FAILED and not traceback_wanted:
            return _end_of_sweep(sweep)
        if message is None or traceback_wanted:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 2
    return 0 if sweep is None else _end_of_sweep(sweep)


def _help(hydra_main: Callable[[], object]) -> str:
    """Returns Hydra's text without the groups that are not for the command line."""
    with redirect_stdout(StringIO()) as text, suppress(SystemExit):
        hydra_main()
    return "".join(line for line in text.getvalue().splitlines(keepends=True) if not line.startswith(_NOT_LISTED))


@contextmanager
def _claimed_sweep(arguments: list[str]) -> Iterator[str]:
    """Claims a sweep's folder and yields its name; if the command line has none, adds one to it.

    Known before Hydra composes anything, so that this process can say how to resume after an interruption.

    Raises:
        ConfigError: a name that cannot be used.
        ClaimedError: another command runs this sweep.
    """
    name = _name_of_sweep(arguments)
    if name is None:
        name = make_new_folder(_folder(f"{datetime.now():%Y-%m-%d_%H-%M-%S}")).name
        sys.argv.append(f"sweep={name}")
    with claimed(_folder(name) / UNFINISHED):
        try:
            yield name
        finally:
            _remove_unused(_folder(name))


def _name_of_sweep(arguments: list[str]) -> str | None:
    """Returns the name that the command line gives to the sweep.

    Raises:
        ConfigError: an empty name, several, or one of a folder that is not below multirun/ or holds a run.
    """
    named = [argument for argument in arguments if argument.startswith("sweep=")]
    if not named:
        return None
    override = OverridesParser.create().parse_override(named[-1])
    value = override.value()
    if override.is_sweep_override() or value in (None, "") or "${" in str(value):
        raise ConfigError(f"{named[-1]}: is not a name; give one, without commas or ${{...}}")
    name = Path(str(value))
    if name.is_absolute() or not name.parts or ".." in name.parts:
        raise ConfigError(
            f"{named[-1]}: is not below multirun/, where sweeps are; give a name without .. or a leading /"
        )
    for folder in (_folder(str(name)), *map(_folder, map(str, name.parents))):
        if folder != _folder(".") and (folder / CONFIG).is_file():
            raise ConfigError(f"{named[-1]}: {folder} is the folder of a run; give another name")
    return str(value)


def _needs_hydra_main(arguments: list[str]) -> bool:
    """Whether an argument is an option or one of Hydra's own settings; otherwise the command is a single run."""
    return any(argument.startswith("-") or "hydra" in argument for argument in arguments)


def _compose(overrides: list[str]) -> DictConfig:
    """Composes the settings of one run, once; `hydra.main` would do it twice, first to see whether they are a sweep."""
    with hydra.initialize_config_dir(str(CONFIG_FOLDER), job_name="run", version_base="1.3"):
        config = hydra.compose("config", overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    return config


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Has Hydra raise its errors instead of printing them over many lines and exiting."""
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        del os.environ[_FULL_ERROR]
        if before is not None:
            os.environ[_FULL_ERROR] = before


def _end_of_sweep(sweep: str) -> int:
    """Prints the table of the sweep's runs, the best one if it was a search, and how many failed; returns the exit status."""
    if finished := _finished(sweep):
        print(f"\n{sweep_text(finished)}\n{_best(sweep)}results: {_folder(sweep)}")
    errors = _folder(sweep) / ERRORS
    if not errors.exists():
        if finished:
            return 0
        print(
            "error: the sweep holds no run; glob(...) chooses among the names of a group, give other keys their values",
            file=sys.stderr,
        )
        return 2
    num_failed = len(errors.read_text(encoding="utf-8").splitlines())
    failed = f"{num_failed} {'run' if num_failed == 1 else 'runs'} failed, see {errors}"
    print(f"error: {failed}; the same command with sweep={sweep} runs them again", file=sys.stderr)
    return 2


def _best(sweep: str) -> str:
    """Returns a line with the best settings that a search has found; empty if the sweep was none."""
    file = _folder(sweep) / OPTIMUM
    if not file.is_file():
        return ""
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    settings = " ".join(f"{key}={value}" for key, value in found["best_params"].items())
    return f"best: {settings} ({found['best_value']:g})\n"


def _remove_unused(folder: Path) -> None:
    """Removes the folder of a sweep that ended before its first run, and the parents that it leaves empty."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {"multirun.yaml", UNFINISHED}:
            for path in folder.iterdir():
                path.unlink()
            os.removedirs(folder)


def _folder(sweep: str) -> Path:
    return Path(f"multirun/{sweep}")  # as conf/config.yaml puts it together


def _finished(sweep: str) -> list[tuple[str, dict[str, object]]]:
    """Returns (name, summary) of the sweep's complete runs."""
    return [(folder.name, read_summary(folder) or {}) for folder in run_folders(_folder(sweep))]


def _how_to_resume(sweep: str | None) -> str:
    if sweep is None:
        return "nothing was written"
    return (
        f"runs finished: {len(_finished(sweep))}, in {_folder(sweep)}; "
        f"the same command with sweep={sweep} runs the others"
    )


if __name__ == "__main__":
    sys.exit(main())
