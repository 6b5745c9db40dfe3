"""`python -m experiments.run [-m] key=value ...`: serve a workload with a scheduling policy. `--help` lists all keys.

With -m, comma-separated values are swept; the same command with the same `sweep=NAME` resumes an interrupted sweep.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cbatch import ConfigError
from experiments import job
from experiments.job import RUN, Command
from experiments.report.text import count_text
from experiments.settings.command_line import HELP, exit_status, no_such_option
from experiments.settings.compose import compose, compose_sweep, show
from experiments.settings.overrides import check_given_once, check_overrides, log_unread, with_search_path, with_seeds
from experiments.settings.settings import ROOT_KEYS, Settings
from experiments.setup.pools import check_policies
from experiments.store.claim import TerminatedError, sigterm_raises
from experiments.store.run_folder import ERRORS, remove_begun, run_folders
from experiments.sweep import claimed_sweep, end_of_sweep, how_to_resume, sweep_folder

Check = Callable[[Sequence[Settings]], object]
_SWEEPS = {"-m", "--multirun"}
_SHOWS = {"--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc", "--cfg", "-c", "--info", "-i"}
"""Options of Hydra that print something instead of running."""

_OF_HYDRA = ("env", "help", "hydra_help", "hydra_logging", "job_logging", "output")
_NOT_LISTED = ("workload/common:", "hydra:", *(f"hydra/{name}:" for name in _OF_HYDRA))
"""Groups that --help omits: parts of other options, and Hydra's own ways of writing."""


def main(arguments: Sequence[str], command: Command = RUN) -> int:
    """Runs a command line; returns the exit status, as `exit_status`."""
    return exit_status(partial(_main, arguments, command), "nothing was written")


def _main(arguments: Sequence[str], command: Command) -> int:
    if _SHOWS & {*arguments}:
        helps = bool(HELP & {*arguments})
        text = show(command.config, (*_NOT_LISTED, *command.hidden_groups) if helps else ())
        own = re.compile(rf"^(?!(?:{'|'.join(ROOT_KEYS)}):)[a-z_]+:.*", re.MULTILINE)
        print(own.sub(rf"\g<0>  # of {command.config} alone", text) if helps else text, end="")
        return 0
    overrides, sweeps = _overrides(arguments, command)
    if sweeps:
        _run_sweep(overrides, command, lambda runs: None)
        return 0
    with sigterm_raises():
        job.run_alone(command, job.read_checked(command, compose(*overrides, name=command.config)))
    return 0


def run_sweep(arguments: Sequence[str], command: Command = RUN, check: Check = lambda runs: None) -> Path:
    """Runs a sweep and prints its table; returns its folder. arguments: as on the command line, without -m.

    check: called with the settings of all runs before the first one.

    Raises:
        CbatchError: a setting that cannot be used, or a run that failed.
        KeyboardInterrupt, TerminatedError: with a note that says how to resume.
    """
    return _run_sweep(_overrides(["-m", *arguments], command)[0], command, check)


def _overrides(arguments: Sequence[str], command: Command) -> tuple[list[str], bool]:
    """Returns the overrides among the arguments, and whether they are a sweep's. Raises ConfigError if they cannot be used."""
    check_given_once(arguments, sweeps=True)
    several = [option for option in arguments if option in _SWEEPS or option.startswith("seeds=")]
    if several and not command.result:
        problem = "a server serves its clients once, under one policy"
        raise ConfigError(f"{several[0]}: {problem}; leave it out, or start a server for each")
    expanded = with_search_path(with_seeds(arguments, replications=command is not RUN))
    overrides = [argument for argument in expanded if not argument.startswith("-")]
    for option in {*expanded} - {*overrides} - _SWEEPS:
        raise no_such_option(option)
    sweeps = bool(_SWEEPS & {*expanded})
    check_overrides(overrides, sweeps=sweeps)
    return overrides, sweeps


def _run_sweep(overrides: list[str], command: Command, check: Check) -> Path:
    logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)  # failed runs are reported by `run_in_sweep`
    with sigterm_raises(), claimed_sweep(overrides) as name:
        folder = sweep_folder(name)
        try:
            _launch(overrides, command, folder, check)
            end_of_sweep(name, run_folders(folder, command.result), command.table)
        except job.SweepEnded as ended:
            raise (ConfigError(str(ended)) if str(ended) else BrokenPipeError) from None
        except (KeyboardInterrupt, TerminatedError) as error:
            if isinstance(error, KeyboardInterrupt):
                remove_begun(folder)
            error.add_note(how_to_resume(name, command.result, command.resume_hint))
            raise
    return folder


def _launch(overrides: list[str], command: Command, folder: Path, check: Check) -> None:
    """Runs a sweep; each of its runs is checked before the first one starts."""
    (folder / ERRORS).unlink(missing_ok=True)
    sweep = compose_sweep(*overrides, name=command.config)
    runs = [job.read_checked(command, composed) for composed in sweep.jobs]
    check(runs)
    check_policies(runs)
    log_unread(sweep.jobs)
    names = {job.folder_name(composed.name) for composed in sweep.jobs}
    if others := [run for run in run_folders(folder, command.result) if run.name not in names]:
        number = count_text(len(others), "run")
        print(f"{folder} holds {number} of other settings, which its table shows too", flush=True)
    finished = job.num_finished(folder, command.result) - len(others)
    progress = job.SweepProgress(len(sweep.jobs), finished, time.time(), sweep.shared, len(others))
    sweep.launch(partial(job.run_in_sweep, command, folder, sweep.in_turn, progress))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
