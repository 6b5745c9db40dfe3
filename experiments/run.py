"""`python -m experiments.run [-m] key=value ...`: serve a workload with a scheduling policy. `--help` lists all keys.

With -m, comma-separated values are swept; the same command with the same `sweep=NAME` goes on with an interrupted sweep.
"""

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
from typing import Any, NamedTuple

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from cbatch.validation import read
from experiments.job import ReaderEnded, Refused, run_job
from experiments.settings.choices import swept_options, with_arguments
from experiments.settings.command_line import ends_with_its_reader, say_repeated
from experiments.settings.error_lines import CONFIG_FOLDER, one_line
from experiments.settings.run_options import parse_options, with_seeds
from experiments.settings.settings import Metrics
from experiments.settings.sweep_jobs import check_jobs_first
from experiments.store.crash_report import TerminatedError, sigterm_raises
from experiments.store.run_folder import remove_killed, run_folders
from experiments.store.runs import ERRORS
from experiments.sweep import claimed_sweep, end_of_sweep, how_to_resume, run_table, sweep_folder

_FULL_ERROR = "HYDRA_FULL_ERROR"

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


class Command(NamedTuple):
    """A command whose settings Hydra composes. config: their file in conf/. job: what it does with those of one run.

    folders, table: the finished ones in and below a folder; their table. alone: what an interrupted single run leaves.
    lacks: groups of conf/ that are not for it. check: raises ConfigError for settings that it cannot use, before a sweep begins.
    """

    config: str
    job: Callable[[DictConfig], float | None]
    folders: Callable[[Path], list[Path]]
    table: Callable[[Path], str]
    alone: str = "nothing was written"
    lacks: tuple[str, ...] = ()
    check: Callable[[dict[str, Any]], object] = lambda keys: read(Metrics, keys["metrics"], "metrics.")


RUN = Command("config", run_job, run_folders, run_table, lacks=("slo:",))


def main(command: Command = RUN) -> int:
    """Runs the command line; returns the exit status.

    0, 2 for an error, 130 after Ctrl-C, 141 if the reader of the output has ended, 143 after SIGTERM.
    """
    with ExitStack() as claims:  # released after the last line that is printed
        return ends_with_its_reader(partial(_main, command, claims))


def _main(command: Command, claims: ExitStack) -> int:
    check_jobs_first(command.check)
    logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)  # failed runs are reported by `run_job`
    began = datetime.now()
    options = Namespace(overrides=[], config_dir=None)
    sweep: str | None = None
    traceback_wanted = os.environ.get(_FULL_ERROR) == "1"
    try:
        given = with_seeds(sys.argv[1:], replications=command is not RUN)
        arguments = with_arguments([*given, *swept_options(given, CONFIG_FOLDER)])
        arguments.sort(key=lambda argument: argument not in ("-m", "--multirun"))  # Hydra accepts it only at an end
        sys.argv[1:] = arguments
        options = parse_options(arguments)
        say_repeated(options.overrides)
        if options.multirun and not any(getattr(options, name) for name in _SHOWS_ONLY):
            sweep = claims.enter_context(claimed_sweep(arguments))
            (sweep_folder(sweep) / ERRORS).unlink(missing_ok=True)
        with sigterm_raises(), _hydra_raises():
            hydra_main = hydra.main(config_path=str(CONFIG_FOLDER), config_name=command.config, version_base="1.3")(
                command.job
            )
            if options.help:
                print(_help(hydra_main, command))
            elif any(argument.startswith("-") or "hydra" in argument for argument in arguments):
                hydra_main()
            else:  # a single run
                command.job(_compose(command.config, arguments))
    except ReaderEnded:
        raise BrokenPipeError from None
    except KeyboardInterrupt:
        if sweep is not None:
            remove_killed(sweep_folder(sweep), since=began)
        print(f"\ninterrupted; {_how_to_go_on(command, sweep)}", file=sys.stderr)
        return 130
    except TerminatedError as error:
        print(error if sweep is None else f"terminated; {_how_to_go_on(command, sweep)}", file=sys.stderr)
        return 143
    except (Exception, Refused) as error:
        refused = isinstance(error, Refused)
        message = str(error) if refused else one_line(error, options.overrides, options.config_dir, command.config)
        if sweep is not None and str(error) == _ALL_FAILED and not traceback_wanted:
            return end_of_sweep(sweep, command.folders, command.table)
        if message is None or traceback_wanted:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 2
    return 0 if sweep is None else end_of_sweep(sweep, command.folders, command.table)


def _how_to_go_on(command: Command, sweep: str | None) -> str:
    return command.alone if sweep is None else how_to_resume(sweep, len(command.folders(sweep_folder(sweep))))


def _help(hydra_main: Callable[[], object], command: Command) -> str:
    """Returns Hydra's text without the groups that are not for the command line, or not of this command."""
    hidden = (*_NOT_LISTED, *command.lacks)
    with redirect_stdout(StringIO()) as text, suppress(SystemExit):
        hydra_main()
    return "".join(line for line in text.getvalue().splitlines(keepends=True) if not line.startswith(hidden))


def _compose(name: str, overrides: list[str]) -> DictConfig:
    """Composes the settings of one run, once; `hydra.main` would do it twice, first to see whether they are a sweep."""
    with hydra.initialize_config_dir(str(CONFIG_FOLDER), job_name="run", version_base="1.3"):
        config = hydra.compose(name, overrides, return_hydra_config=True)
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


if __name__ == "__main__":
    sys.exit(main())
