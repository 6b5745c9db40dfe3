"""`python -m experiments.capacity key=value ...`: the highest request rate at which objectives are met, with an interval.

With -m, comma-separated values are swept, as in `experiments.run`. `--help` lists all keys.
"""

import sys
from functools import partial

from omegaconf import DictConfig

from experiments.capacity.command import SearchKeys, SearchSettings, measure, read_simulated
from experiments.capacity.folder import read_finished, result_folders
from experiments.capacity.report import capacity_line, capacity_table, capacity_text
from experiments.job import Work, run_job
from experiments.run import Command, main

_READ = partial(read_simulated, SearchSettings, SearchKeys)
_WORK = Work(_READ, read_finished, measure, capacity_text, capacity_line, "_capacity", ("capacity.",))


def _job(config: DictConfig) -> float | None:
    return run_job(config, _WORK)


COMMAND = Command(
    "capacity",
    _job,
    result_folders,
    capacity_table,
    alone="simulations that ended are kept if output=FOLDER was given; the same command goes on from them",
    check=_READ,
)

if __name__ == "__main__":
    sys.exit(main(COMMAND))
