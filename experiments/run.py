"""`python -m experiments.run [-m] key=value ...`: serve a workload with a scheduling policy. `--help` lists all keys.

With -m, comma-separated values are swept; the same command with the same `sweep=NAME` resumes an interrupted sweep.
"""

import logging
import sys
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec

from experiments.job import RUN, Command, SweepEnded, read_checked, run_alone, run_in_sweep
from experiments.settings.command_line import exit_status, no_such_option, shield_workers
from experiments.settings.compose import compose, compose_sweep, show
from experiments.settings.error_lines import with_notes
from experiments.settings.overrides import check_given_once, check_overrides, with_search_path, with_seeds
from experiments.store.claim import TerminatedError, sigterm_raises
from experiments.store.run_folder import ERRORS, remove_begun, run_folders
from experiments.sweep import claimed_sweep, end_of_sweep, how_to_resume, sweep_folder

_SWEEPS = {"-m", "--multirun"}
_SHOWS = {"--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc", "--cfg", "-c", "--info", "-i"}
"""Options of Hydra that print something instead of running."""

_NOT_LISTED = (
    "workload/common:",
    "hydra:",
    *(f"hydra/{name}:" for name in ("env", "help", "hydra_help", "hydra_logging", "job_logging", "output")),
)
"""Groups that --help omits: parts of other options, and Hydra's own ways of writing."""


def main(command: Command = RUN) -> int:
    """Runs the command line; returns the exit status.

    0, 2 for an error, 130 after Ctrl-C, 141 if the reader of the output has ended, 143 after SIGTERM.
    """
    with ExitStack() as claims:  # released after the last line that is printed
        return exit_status(partial(_main, command, claims), "nothing was written")


def _main(command: Command, claims: ExitStack) -> int:
    logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)  # failed runs are reported by `run_in_sweep`
    sweep = None
    try:
        if _SHOWS & set(sys.argv[1:]):
            print(show(command.config, (*_NOT_LISTED, *command.lacks)), end="")
            return 0
        check_given_once(sys.argv[1:], sweeps=True)
        arguments = with_search_path(with_seeds(sys.argv[1:], replications=command is not RUN))
        overrides = [argument for argument in arguments if not argument.startswith("-")]
        for option in {*arguments} - {*overrides} - _SWEEPS:
            raise no_such_option(option)
        sweeps = bool(_SWEEPS & {*arguments})
        check_overrides(overrides, sweeps=sweeps)
        with sigterm_raises():
            if not sweeps:
                run_alone(command, read_checked(command, compose(*overrides, name=command.config)))
                return 0
            sweep = claims.enter_context(claimed_sweep(overrides))
            _run_sweep(command, overrides, sweep)
            return end_of_sweep(sweep, run_folders(sweep_folder(sweep), command.result), command.table)
    except SweepEnded as ended:
        if not str(ended):
            raise BrokenPipeError from None
        print(f"error: {ended}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        if sweep is not None:
            remove_begun(sweep_folder(sweep))
            error.add_note(how_to_resume(sweep, command.result, command.kept))
        raise
    except TerminatedError as error:
        left = "" if sweep is None else how_to_resume(sweep, command.result, command.kept)
        print(f"terminated; {left}" if left else with_notes(error), file=sys.stderr)
        return 143


def _run_sweep(command: Command, overrides: list[str], name: str) -> None:
    """Runs a sweep; each of its runs is checked before the first one starts."""
    folder = sweep_folder(name)
    (folder / ERRORS).unlink(missing_ok=True)
    sweep = compose_sweep(*overrides, name=command.config)
    if not sweep.in_turn and find_spec("joblib"):
        shield_workers()
    for composed in sweep.jobs:
        read_checked(command, composed)
    sweep.launch(partial(run_in_sweep, command, folder, sweep.in_turn))


if __name__ == "__main__":
    if not any("hydra" in argument or argument.startswith("-") for argument in sys.argv[1:]):
        # a single run needs no launchers, whose import takes 6% of its start
        for name in ("joblib", "ray", "submitit"):
            sys.modules.setdefault(f"hydra_plugins.hydra_{name}_launcher", None)  # type: ignore[arg-type]
    sys.exit(main())
