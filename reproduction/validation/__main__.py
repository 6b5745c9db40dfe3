"""`python -m reproduction.validation NAME [key=value ...]`: hold simulation against real runs, or draw where a run's time went.

plots: `bubbles FOLDER`, `lanes FOLDER`, into FOLDER/plots.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from experiments.plots.style import save
from experiments.settings.command_line import keyword_arguments, run
from experiments.store.run_folder import PLOTS
from reproduction.benchmark import Benchmark, run_benchmark
from reproduction.validation import bubbles, lanes

COMPARISONS = {
    "fidelity": Benchmark(
        "simulated runs against real ones, by policy; measured=FILE of kept runs needs no GPU",
        "reproduction.validation.fidelity",
        needs_gpu=False,
    ),
    "capacity": Benchmark(
        "capacities with real tokens beside simulated ones, by policy; measured=FILE of kept runs needs no GPU",
        "reproduction.validation.capacity",
        needs_gpu=False,
    ),
    "sessions": Benchmark(
        "conversations with a prefix cache, served and simulated; measured=FILE of such runs needs no GPU",
        "reproduction.validation.sessions",
        needs_gpu=False,
    ),
    "ranking": Benchmark(
        "how often simulation names the winner that reality names, over all pairs of settings, from stored comparisons",
        "reproduction.validation.ranking",
        needs_gpu=False,
    ),
    "rivals": Benchmark(
        "vLLM's runs that others recorded, simulated from published tables, beside rivals' predictions",
        "reproduction.validation.rivals",
        needs_gpu=False,
    ),
}
DRAWN: dict[str, Callable[..., Figure]] = {"bubbles": bubbles.draw, "lanes": lanes.draw}


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    if arguments and arguments[0] in DRAWN:
        return run(_draw, arguments, lambda: str(__doc__))
    return run_benchmark(arguments, COMPARISONS, str(__doc__))


def _draw(name: str, where: str, *options: str) -> None:
    make = partial(DRAWN[name], Path(where))
    print(*save(make(**keyword_arguments(make, options, name)), Path(where) / PLOTS, name), sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
