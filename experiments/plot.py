"""`python -m experiments.plot NAME FOLDER [key=value ...]`: plot a finished run or sweep into FOLDER/plots."""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from cbatch import ConfigError
from experiments.config.command_line import check_name, keyword_arguments, listed, run
from experiments.store.run_folder import PLOTS

NAMES = {
    "throughput_vs_pd": "throughput and gain over a baseline against P:D (of a sweep)",
    "latency_cdf": "time to first token, between tokens, end to end (of up to 8 runs)",
    "composition": "tokens of the iterations, requests and KV cache over time (of one run)",
    "lanes": "host and device during a few iterations (of up to 8 runs)",
    "table": "metrics side by side, in Markdown",
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns its exit status."""
    return run(_plot, arguments, lambda: f"{__doc__}\n{listed(NAMES)}")


def _plot(name: str, where: str = "", *options: str) -> None:
    check_name("plot", name, NAMES)
    if not where or ("=" in where and not Path(where).exists()):
        raise ConfigError(f"plot {name}: needs a run's or sweep's folder: python -m experiments.plot {name} FOLDER")
    folder = Path(where)
    module = import_module(f"experiments.plots.{name}")
    make = partial(module.text if name == "table" else module.draw, folder)
    made = make(**keyword_arguments(make, options, f"plot {name}"))
    if name == "table":
        print(made)
        path = folder / PLOTS / "table.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(made + "\n", encoding="utf-8")
        print(f"\n{path}")
        return
    from experiments.plots.style import save

    print(*save(made, folder / PLOTS, name), sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
