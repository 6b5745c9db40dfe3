"""`python -m experiments.plot NAME FOLDER [key=value ...]`: plot a finished run or sweep into FOLDER/plots."""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from cbatch import ConfigError
from cbatch.validation import check_known
from experiments.plots.style import Look, save
from experiments.settings.command_line import check_name, keyword_arguments, listed, run
from experiments.store.headings import COLUMNS, MORE_COLUMNS
from experiments.store.notes import made_text
from experiments.store.provenance import arguments, write_text
from experiments.store.run_folder import PLOTS
from experiments.store.runs import run_table, select_runs

NAMES = {
    "curves": "any figures against a setting, y=FIGURE,... x=KEY (of a sweep)",
    "throughput_vs_pd": "throughput and gain over a baseline against P:D (of a sweep)",
    "latency_vs_rate": "percentiles of time to first token and between tokens against the rate of arrivals (of a sweep)",
    "latency_cdf": "distributions of time to first token, between tokens, end to end (of up to 16 series)",
    "attainment": "share of requests that attain their objectives against the rate of arrivals, by tier (of a sweep)",
    "service": "service received by each client over time, and the service difference (of one run)",
    "composition": "tokens of the iterations, requests and KV cache over time (of one run)",
    "schedule": "what each request does in each iteration: prefill, decode, waiting, preempted (of a small run with decisions=true)",
    "table": "metrics side by side, in Markdown",
}
_CURVES = ("throughput_vs_pd", "latency_vs_rate", "attainment")
"""Plots of the module `curves`, with a function each."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run(_plot, arguments, _usage)


def _usage() -> str:
    plots = [f"{listed({name: what})}\n{_keys(_maker(name))}" for name, what in NAMES.items()]
    return "\n".join([str(__doc__), "", *plots, "", "Every plot but table also takes:", _keys(Look)])


def _keys(function: Callable[..., Any]) -> str:
    """Returns the keys of a function, as its docstring describes them."""
    keys = str(inspect.getdoc(function)).partition("Args:\n")[2].partition("\n\n")[0]
    return indent(dedent(keys), " " * 6)


def _maker(name: str) -> Callable[..., Any]:
    """Returns the function that makes a plot of a folder."""
    if name == "table":
        return table
    module = import_module(f"experiments.plots.{'curves' if name in _CURVES else name}")
    function: Callable[..., Any] = getattr(module, name if name in _CURVES else "draw")
    return function


def table(folder: Path, runs: str = "") -> tuple[str, str]:
    """Returns a line per run, or for the runs of several seeds together, with the notes on the runs; and the table's origin.

    The origin is the command with this process's arguments, and dates, commits and versions of the runs.

    Args:
        runs: only runs whose folder names contain this.
    """
    shown, omitted = select_runs(folder, runs)
    abouts = [summary["about"] for summary in shown["summary"]]
    versions = {", ".join(f"{name} {number}" for name, number in about["versions"].items()) for about in abouts}
    origin = f"`python -m experiments.plot {arguments()}`; runs of {'; '.join([made_text(abouts), *sorted(versions)])}"
    return run_table(shown, omitted, (*COLUMNS, *MORE_COLUMNS), "github"), origin


def _plot(name: str, where: str = "", *options: str) -> None:
    if Path(name).is_dir():
        raise ConfigError(f"plot {name}: is a folder; give the plot first: python -m experiments.plot NAME {name}")
    check_name("plot", name, NAMES)
    if not where or ("=" in where and not Path(where).exists()):
        raise ConfigError(f"plot {name}: needs a run's or sweep's folder: python -m experiments.plot {name} FOLDER")
    folder, command = Path(where), f"plot {name}"
    if others := [option for option in options if Path(option).is_dir()]:
        remedy = "give a folder that holds these runs, and choose with runs=TEXT|TEXT"
        raise ConfigError(f"{command}: shows the runs below one folder, not {where} and {others[0]}; {remedy}")
    if name == "table":
        text, origin = table(folder, **keyword_arguments(partial(table, folder), options, command))
        print(text, write_text(folder / PLOTS / "table.md", f"{text}\n\n{origin}\n"), sep="\n\n")
        return
    looks, own = (inspect.signature(kind).parameters for kind in (Look, partial(_maker(name), folder, Look())))
    check_known([option.partition("=")[0] for option in options if "=" in option], [*own, *looks], f"{command}: ")
    common = [option for option in options if option.partition("=")[0] in looks]
    look = Look(**keyword_arguments(Look, common, command))
    make = partial(_maker(name), folder, look)
    keys = keyword_arguments(make, [option for option in options if option not in common], command)
    with redirect_stderr(StringIO()) as said:  # an error stands alone
        paths = save(make(**keys), folder / PLOTS, name, look.format)
    print(said.getvalue(), end="", file=sys.stderr)
    print(*paths, sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
