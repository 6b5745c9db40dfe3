"""`python -m experiments.plot NAME FOLDER [key=value ...]`: plot a finished run or sweep into FOLDER/plots."""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from cbatch import ConfigError
from experiments.settings.command_line import check_name, keyword_arguments, listed, run
from experiments.store.provenance import write_text
from experiments.store.run_folder import PLOTS

NAMES = {
    "throughput_vs_pd": "throughput and gain over a baseline against P:D (of a sweep)",
    "latency_vs_rate": "percentiles of time to first token and between tokens against the request rate (of a sweep)",
    "latency_cdf": "distributions of time to first token, between tokens, end to end (of up to 16 series)",
    "attainment": "share of requests that attain their objectives against the request rate, by tier (of a sweep)",
    "service": "service received by each client over time, and the service difference (of one run)",
    "composition": "tokens of the iterations, requests and KV cache over time (of one run)",
    "schedule": "what each request does in each iteration: prefill, decode, waiting, preempted (of a small run with decisions=true)",
    "table": "metrics side by side, in Markdown",
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns its exit status."""
    return run(_plot, arguments, lambda: "\n".join([str(__doc__), "", *map(_usage, NAMES)]))


def _usage(name: str) -> str:
    """What a plot shows, and its keys, as its docstring describes them."""
    keys = str(inspect.getdoc(_maker(name))).partition("Args:\n")[2].partition("\n\n")[0]
    return f"{listed({name: NAMES[name]})}\n{indent(dedent(keys), ' ' * 6)}"


def _maker(name: str) -> Callable[..., Any]:
    """Returns the function that makes a plot of a folder."""
    module = import_module(f"experiments.plots.{name}")
    return module.text if name == "table" else module.draw  # type: ignore[no-any-return]


def _plot(name: str, where: str = "", *options: str) -> None:
    if Path(name).is_dir():
        raise ConfigError(f"plot {name}: is a folder; give the plot first: python -m experiments.plot NAME {name}")
    check_name("plot", name, NAMES)
    if not where or ("=" in where and not Path(where).exists()):
        raise ConfigError(f"plot {name}: needs a run's or sweep's folder: python -m experiments.plot {name} FOLDER")
    folder = Path(where)
    make = partial(_maker(name), folder)
    given = keyword_arguments(make, options, f"plot {name}")
    made = make(**given)
    if name == "table":
        print(made)
        from experiments.plots.table import source

        path = write_text(folder / PLOTS / "table.md", f"{made}\n\n{source(folder, **given)}\n")
        print(f"\n{path}")
        return
    from experiments.plots.style import save

    print(*save(made, folder / PLOTS, name), sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
