"""`python -m experiments.plot NAME FOLDER [key=value ...]`: plot a finished run or sweep into FOLDER/plots, named by what it shows.

NAME is one of the plots below, or the import path of your function, as in my_module.draw (docs/adding.md)."""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import fields
from functools import partial, update_wrapper
from io import StringIO
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from matplotlib.figure import Figure

from cbatch import ConfigError
from cbatch.errors import call
from cbatch.validation import check_known
from experiments.job import folder_name
from experiments.plots.saving import save, with_suffix
from experiments.plots.style import PLAIN, Look
from experiments.report.headings import COLUMNS, MORE_COLUMNS
from experiments.report.notes import made_text
from experiments.settings.command_line import check_name, keyword_arguments, list_names, run
from experiments.settings.construct import locate
from experiments.store.claim import check_writable
from experiments.store.provenance import arguments, write_text
from experiments.store.run_folder import PLOTS
from experiments.store.runs import run_table, select_runs

NAMES = {
    "curves": "any figures against a setting, y=FIGURE,... x=KEY (of a sweep)",
    "heatmap": "any figure over two settings, value=FIGURE x=KEY y=KEY (of a sweep)",
    "throughput_vs_pd": "throughput and gain over a baseline against P:D (of a sweep)",
    "latency_vs_rate": "percentiles of time to first token and between tokens against the rate of arrivals (of a sweep)",
    "latency_cdf": "distributions of time to first token, between tokens, end to end (of up to 16 series)",
    "attainment": "share of requests that attain their objectives against the rate of arrivals, by tier (of a sweep)",
    "service": "service received by each client over time, and the service difference (of one run)",
    "composition": "tokens of the iterations, requests and KV cache over time (of one run)",
    "replicas": "replicas over time by pool: paid and ready, and the rate of arrivals (of one run with autoscale=)",
    "tradeoff": "any figure against any other, y=FIGURE x=FIGURE, a point for each series with intervals (of a sweep)",
    "schedule": "what each request does in each iteration: prefill, decode, waiting, preempted (of a small run with decisions=true)",
    "table": "metrics side by side, in Markdown",
}
_CURVES = ("throughput_vs_pd", "latency_vs_rate", "attainment")  # plots in the module `curves`, each with a function
_ELSEWHERE = "give output=FILE in another folder"
_SCALES = {"xlim", "ylim", "xscale", "yscale"}
_UNREAD = {"heatmap": _SCALES, "table": {field.name for field in fields(Look)} - {"output", "runs"}}
"""Keys of `Look` that a plot does not read."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line. Returns its exit status."""
    return run(_plot, arguments, _usage)


def _usage() -> str:
    plots = [f"{list_names({name: what})}\n{_keys(_maker(name))}" for name, what in NAMES.items()]
    general = "Every plot also takes (a table runs= and output=, a heat map no limits and scales):"
    return "\n".join([str(__doc__), "", *plots, "", general, _keys(Look)])


def _keys(function: Callable[..., Any]) -> str:
    """Returns the section of a function's docstring that describes its keys."""
    keys = str(inspect.getdoc(function)).partition("Args:\n")[2].partition("\n\n")[0]
    return indent(dedent(keys), " " * 6)


def _maker(name: str) -> Callable[..., Any]:
    """Returns the function that makes a plot of a folder."""
    if name == "table":
        return table
    module = f"experiments.plots.{'curves' if name in _CURVES else name}"
    path = f"{module}.{name if name in _CURVES else 'draw'}" if name in NAMES else name
    maker: Callable[..., Any] = locate("plot", path)
    return maker


def table(folder: Path, look: Look = PLAIN) -> tuple[str, str]:
    """Returns a table with a row per run, or per group of runs that differ in seeds, with the notes on the runs, and the table's origin.

    The origin is the command with this process's arguments, and dates, commits and versions of the runs.
    """
    shown, omitted = select_runs(folder, look.runs)
    abouts = [summary["about"] for summary in shown["summary"]]
    versions = {", ".join(f"{name} {number}" for name, number in about["versions"].items()) for about in abouts}
    origin = f"`python -m experiments.plot {arguments()}`; runs of {'; '.join([made_text(abouts), *sorted(versions)])}"
    return run_table(shown, omitted, (*COLUMNS, *MORE_COLUMNS), "github"), origin


def _plot(name: str, where: str = "", *options: str) -> None:
    with redirect_stderr(StringIO()) as said:  # an error is printed without other lines
        made, look, path = make_plot(name, where, *options, writes=True)
        try:
            if isinstance(made, Figure):
                made.set_label(f"python -m experiments.plot {arguments()}\n{made.get_label()}")
                written = save(made, path.parent, path.name, look.format)
            else:
                written = [write_text(with_suffix(path, "md"), "\n\n".join(made) + "\n")]
                print(made[0], end="\n\n")
        except OSError as error:
            if not error.filename:
                raise
            raise ConfigError(f"{error.filename}: {error.strerror}; {_ELSEWHERE}") from error
    print(said.getvalue(), end="", file=sys.stderr)
    print(*written, sep="\n")


def make_plot(
    name: str, where: str = "", *options: str, writes: bool = False
) -> tuple[Figure | tuple[str, str], Look, Path]:
    """Returns a figure, or a table with its origin; the look that the options describe; and the path for the files, without an ending.

    Raises ConfigError: no such plot, folder or option; the plot cannot be made of these runs; `writes`, and the files cannot be written.
    """
    if Path(name).is_dir():
        raise ConfigError(f"plot {name}: is a folder; give the plot first: python -m experiments.plot NAME {name}")
    if "." not in name:
        check_name("plot", name, NAMES)
    if not where or ("=" in where and not Path(where).exists()):
        raise ConfigError(f"plot {name}: needs a run's or sweep's folder: python -m experiments.plot {name} FOLDER")
    folder, command = Path(where), f"plot {name}"
    if others := [option for option in options if Path(option).is_dir()]:
        remedy = "give a folder that holds these runs, and choose with runs=TEXT|TEXT"
        raise ConfigError(f"{command}: shows the runs below one folder, not {where} and {others[0]}; {remedy}")
    maker = _maker(name)
    try:
        looks, own = (inspect.signature(kind).parameters for kind in (Look, partial(maker, folder, Look())))
    except (TypeError, ValueError):
        raise ConfigError(f"{command}: takes no (folder, look); see docs/adding.md") from None
    common = {key: looks[key] for key in looks if key not in _UNREAD.get(name, ())}
    if unclear := next((key for key, parameter in own.items() if parameter.annotation is parameter.empty), None):
        raise ConfigError(f"{command}: {unclear} has no type; annotate it, as in {unclear}: float = 1.0")
    check_known([option.partition("=")[0] for option in options if "=" in option], [*own, *common], f"{command}: ")
    looking = [option for option in options if option.partition("=")[0] in common]
    look = Look(**keyword_arguments(Look, looking, command))
    make = partial(maker, folder, look)
    keys = keyword_arguments(make, [option for option in options if option not in looking], command)
    content = ",".join([name, *(option for option in options if option.partition("=")[0] in (*own, "runs"))])
    path = Path(look.output) if look.output else folder / PLOTS / folder_name(content)
    if path.is_dir() or look.output.endswith("/"):
        path = path / folder_name(f"{folder.resolve().name},{content}")
    if writes:
        check_writable(path.parent, _ELSEWHERE)
    made = call(command, update_wrapper(partial(make, **keys), maker))
    if name != "table" and not isinstance(made, Figure):
        raise ConfigError(f"{command}: returned a {type(made).__name__}; return a matplotlib figure")
    return made, look, path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
