"""`python -m experiments.arena key=value ...`: a leaderboard of policies on traces, loads and objectives. `--help` lists all keys.

Every combination of the keys is a cell, simulated as a run of a sweep, so that the same command goes on with it and another one
adds to it. The pages show all that the folder of the sweep holds.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from cbatch import ConfigError
from cbatch.validation import Switch, parse
from experiments.arena import markdown, web
from experiments.arena.cell import CELL, Cell, CellKeys, cell_line, measure
from experiments.arena.rows import read_board
from experiments.capacity.__main__ import COMMAND as OF_CAPACITY
from experiments.capacity.command import read_simulated
from experiments.capacity.folder import CAPACITY
from experiments.job import Work, run_job
from experiments.run import Command, main
from experiments.settings.command_line import HELP
from experiments.store.provenance import write_text
from experiments.sweep import sweep_folder

_READ = partial(read_simulated, Cell, CellKeys)
_WORK = Work(_READ, CELL.read_finished, measure, str, cell_line, "_arena", ("cell.",))
_OF_CELLS, _OF_CAPACITY = ("load=", "replications=", "requests="), ("accuracy=", "attainment=", "cores=", "definition=")
_SLOS = "slo=strict,relaxed"
_TITLE = "Arena of scheduling policies"


def _job(config: DictConfig) -> float | None:
    return run_job(config, _WORK)


def _count(root: Path) -> str:
    number = len(CELL.folders(root))
    return f"{number} cell{'' if number == 1 else 's'}"


COMMAND = Command("arena", _job, CELL.folders, _count, check=_READ)


def arena(arguments: list[str]) -> int:
    """Runs the command line; returns its exit status."""
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if HELP & set(arguments):
        sys.argv[1:] = arguments
        return main(COMMAND)
    try:
        web.check_plotly()
        _check_traces(given)
        searches = parse(Switch, given.get("capacity", "off"), "capacity")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sweep = given.get("sweep", "arena").removesuffix("/cells").removesuffix("/capacity")
    both = [key for key in arguments if key not in ("-m", "--multirun") and not key.startswith(("sweep=", "capacity="))]
    both += [] if "experiment" in given else ["experiment=arena"]
    status = _sweep(COMMAND, [*_without(_OF_CAPACITY, both), f"sweep={sweep}/cells"])
    if searches and status in (0, 2):
        both += [] if "slo" in given else [_SLOS]
        status = max(status, _sweep(OF_CAPACITY, [*_without(_OF_CELLS, both), f"sweep={sweep}/capacity"]))
    folder = sweep_folder(sweep)
    if status in (0, 2) and [*CELL.folders(folder), *CAPACITY.folders(folder)]:
        board = read_board(folder)
        print(write_text(folder / "arena.md", markdown.page(board, _TITLE)))
        print(write_text(folder / "arena.html", web.page(board, _TITLE)))
    return status


def _check_traces(given: Mapping[str, str]) -> None:
    """Raises ConfigError, once and not for every cell, if the folder of traces does not exist."""
    folder, asked = given.get("traces", "traces"), given.get("workload", "traces/")
    if "traces/" in asked and not Path(folder).is_dir():
        raise ConfigError(f"traces={folder}: no such folder; give the one with the published traces, or workload=")


def _without(keys: tuple[str, ...], arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if not argument.startswith(keys)]


def _sweep(command: Command, arguments: list[str]) -> int:
    sys.argv[1:] = ["-m", *arguments]
    return main(command)


if __name__ == "__main__":
    sys.exit(arena(sys.argv[1:]))
