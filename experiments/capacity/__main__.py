"""`python -m experiments.capacity key=value ...`: the highest request rate at which objectives are met, with an interval.

With -m, comma-separated values are swept, as in `experiments.run`. `--help` lists all keys.
"""

import sys
from functools import partial

from experiments.capacity.command import SearchKeys, SearchSettings, measure
from experiments.capacity.folder import read_finished, result_folders
from experiments.capacity.report import capacity_line, capacity_table, capacity_text
from experiments.job import Command
from experiments.run import main
from experiments.settings.settings import read_as

COMMAND = Command(
    "capacity",
    partial(read_as, SearchSettings, SearchKeys),
    measure,
    read_finished,
    result_folders,
    capacity_table,
    capacity_text,
    capacity_line,
    stem="_capacity",
    figures=("capacity.",),
    alone="simulations that ended are kept if output=FOLDER was given; the same command goes on from them",
)

if __name__ == "__main__":
    sys.exit(main(COMMAND))
