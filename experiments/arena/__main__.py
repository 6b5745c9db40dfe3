"""`python -m experiments.arena key=value ...`: a leaderboard of policies on traces, loads and objectives. `--help` lists all keys.

The arena is a sweep of ordinary runs with `workload.load=`, one run per replication. The same command resumes the sweep, and
another command adds runs to it. The page shows all runs in the sweep's folder.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from cbatch import ConfigError
from cbatch.validation import parse, whole
from experiments.arena.board import count_runs, page_of
from experiments.capacity.command import SimulatedKeys, SimulatedSettings
from experiments.job import Command
from experiments.run import main, run_sweep
from experiments.settings.command_line import HELP, exit_status
from experiments.settings.settings import read_as
from experiments.store.provenance import write_text
from experiments.store.run_folder import run_folders
from experiments.sweep import FailedRunsError, sweep_folder

_OWN = ("-m", "--multirun", "sweep=", "replications=")

COMMAND = Command("arena", partial(read_as, SimulatedSettings, SimulatedKeys), table=count_runs)


def arena(arguments: Sequence[str]) -> int:
    """Runs the command line. Returns its exit status."""
    if HELP & {*arguments}:
        return main(arguments, COMMAND)
    return exit_status(partial(_arena, arguments), "")


def _arena(arguments: Sequence[str]) -> int:
    keys = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    folder_of_traces = keys.get("traces", "traces")
    if "traces/" in keys.get("workload", "traces/") and not Path(folder_of_traces).is_dir():
        problem = "no such folder; give the one with the published traces, or workload="
        raise ConfigError(f"traces={folder_of_traces}: {problem}")
    replications = parse(Annotated[int, whole(2, 10_000)], keys.get("replications", "5"), "replications")
    sweep = keys.get("sweep", "arena").removesuffix("/runs")
    runs = [argument for argument in arguments if not argument.startswith(_OWN)]
    runs += [] if "experiment" in keys else ["experiment=arena"]
    seeds = f"workload.seed={','.join(map(str, range(replications)))}"
    try:
        run_sweep([*runs, f"workload.replications={replications}", seeds, f"sweep={sweep}/runs"], COMMAND)
    except FailedRunsError:
        _write_page(sweep_folder(sweep))
        raise
    _write_page(sweep_folder(sweep))
    return 0


def _write_page(folder: Path) -> None:
    if run_folders(folder):
        print(write_text(folder / "arena.md", page_of(folder)))


if __name__ == "__main__":
    sys.exit(arena(sys.argv[1:]))
