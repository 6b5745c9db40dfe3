"""`python -m experiments.paper [FIGURE ...] [tables=FOLDER] [links=FILE] [hardware=sim|gpu] [folder=results]`

Without a name: every figure. Each is drawn, its claims are checked, and it leaves folder/paper/<name>.png, .pdf, .csv and
.json. Times are simulated; with hardware=gpu requests are served with real tokens on the GPU at hand, and results go to
folder/<gpu>/paper.

tables: published A100 kernel timings, .../aiconfigurator/a100_sxm; links: the file of NCCL timings beside them. What needs
one of them is left out without it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path

from cbatch import CbatchError, ConfigError
from experiments.bench.report import slug
from experiments.paper import gallery
from experiments.paper.machines import Machines
from experiments.paper.report import table
from experiments.settings import check_known, nearest

COMMANDS = {
    "a6000": "write the profile of the A6000 with LLaMA-13B from the paper's printed numbers",
    "closure": "the claims of SARATHI that are measured on simulated machines, as one table",
    "fig12_systems": "where the time of Fig 12's pipeline stages goes",
    "fig12_sensitivity": "what its ratios owe to what the paper leaves open",
    "served": "a run that others served and measured, against its simulation",
}

MODULES = {"fig12_systems": "fig12"}
"""Where a command is not named as its module, because a figure is."""


def main(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(_help())
        return 0
    try:
        names, options = _parse(arguments)
        if len(names) == 1 and names[0] in COMMANDS:
            command = import_module(f"experiments.paper.{MODULES.get(names[0], names[0])}").main
            _check(names[0], options, inspect.signature(command).parameters)
            return command(**options) or 0
        check_known(options, inspect.signature(figures).parameters, "experiments.paper: ")
        return figures(names, **options)
    except CbatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what is written is whole", file=sys.stderr)
        return 130


def figures(names: Sequence[str], tables: str | None = None, links: str | None = None, hardware: str = "sim",
            folder: str = "results") -> int:  # fmt: skip
    """Make figures, all if none is named; 1 if a tested claim fails, 2 if a figure could not be made."""
    chosen = [*names] or gallery.names()
    for name in chosen:
        gallery.module_of(name)
    machines, into = _machines(tables, links, hardware, Path(folder))
    shown = []
    with closing(machines):
        for place, name in enumerate(chosen, 1):
            print(f"[{place}/{len(chosen)}] {name}: {gallery.about(name)}", flush=True)
            try:
                shown.append(gallery.show(name, machines, into, lambda text: print(f"    {text}", flush=True)))
            except CbatchError as error:  # the others can be made all the same
                print(f"error: {name}: {error}", file=sys.stderr, flush=True)
            else:
                _report(shown[-1], into, in_full=len(chosen) == 1)
    if shown:
        print(f"\n{gallery.totals(shown)}")
    if len(shown) < len(chosen):
        return 2
    return 1 if any(verdict.failed for figure in shown for verdict in figure.verdicts) else 0


def _machines(tables: str | None, links: str | None, hardware: str, folder: Path) -> tuple[Machines, Path]:
    """The machines, and the folder for what is measured on them."""
    if hardware not in ("sim", "gpu"):
        raise ConfigError(f"hardware={hardware}: give sim, or gpu for the one at hand")
    if hardware == "sim":
        return Machines(tables, links), folder
    from experiments.paper.real import on_gpu  # it loads PyTorch

    real = on_gpu()
    return Machines(tables, links, real), folder / slug(real.hardware)


def _report(shown: gallery.Shown, folder: Path, *, in_full: bool) -> None:
    """What one figure came to; `in_full`: claims that hold as well."""
    held = sum(verdict.holds for verdict in shown.verdicts)
    for note in shown.notes:
        print(f"    {note}")
    if shown.text and in_full:
        print(f"\n{shown.text}\n")
    listed = shown.verdicts if in_full else [verdict for verdict in shown.verdicts if not verdict.holds]
    if listed:
        print(table(listed))
    print(
        f"    {held} of {len(shown.verdicts)} claims hold; {shown.seconds:.1f} s; {folder}/paper/{shown.name}.*",
        flush=True,
    )


def _help() -> str:
    """Figures and commands, a line each."""
    drawn = [f"  {name:18} {gallery.about(name)}" for name in gallery.names()]
    other = [f"  {name:18} {what}" for name, what in COMMANDS.items()]
    return "\n".join([str(__doc__), "figures:", *drawn, "\nother commands:", *other])


def _parse(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Names, which come first, and options."""
    names = [argument for argument in arguments if "=" not in argument]
    known = [*gallery.names(), *COMMANDS]
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} is no figure, command or option of the form key=value; {nearest(name, known)}")
    pairs = [argument.partition("=") for argument in arguments if "=" in argument]
    return names, {key: value for key, _, value in pairs}


def _check(name: str, options: Mapping[str, str], parameters: Mapping[str, inspect.Parameter]) -> None:
    check_known(options, parameters, f"{name}: ")
    for key, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and key not in options:
            raise ConfigError(
                f"{name} needs {key}=...; see the docstring of experiments/paper/{MODULES.get(name, name)}.py"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
