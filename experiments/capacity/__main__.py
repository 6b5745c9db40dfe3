"""`python -m experiments.capacity key=value ...`: the highest request rate at which objectives are met, with an interval.

Of sessions in closed loop (workload=chat, workload=agents) it is the most concurrent sessions.

With -m, comma-separated values are swept, as in `experiments.run`. `--help` lists all keys.
"""

import sys
from functools import partial

from experiments.capacity.command import SearchKeys, SearchSettings, measure
from experiments.capacity.folder import RESULT
from experiments.capacity.report import capacity_line, capacity_table, capacity_text
from experiments.job import Command
from experiments.run import main
from experiments.settings.settings import read_as

COMMAND = Command(
    config="capacity",
    read=partial(read_as, SearchSettings, SearchKeys),
    serve=measure,
    result=RESULT,
    table=capacity_table,
    text=capacity_text,
    line=capacity_line,
    resume_hint="simulations that ended are kept",
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], COMMAND))
