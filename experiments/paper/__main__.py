"""`python -m experiments.paper [FIGURE ...] [tables=FOLDER] [links=FOLDER] [hardware=sim|gpu] [folder=results]`

Without a name: every figure. Each is drawn, its claims are checked, and it leaves folder/paper/<name>.png, .pdf, .csv and
.json. Times are simulated; with hardware=gpu requests are served with real tokens on the GPU at hand, and results go to
folder/<gpu>/paper.

tables: published A100 kernel timings, .../aiconfigurator/a100_sxm; links: those of NCCL between GPUs, .../vidur/network/a100_dgx.
What needs one of them is left out without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from pathlib import Path

from cbatch import CbatchError, ConfigError
from cbatch.validation import nearest
from experiments.config.command_line import keyword_arguments, listed, run
from experiments.paper import gallery
from experiments.paper.machines import Machines
from experiments.paper.verdicts import table
from experiments.store.benchmark_file import slug

COMMANDS = {
    "a6000": "write the profile of the A6000 with LLaMA-13B from the paper's printed numbers",
    "closure": "the claims of SARATHI that are measured on simulated machines, as one table",
    "fig12_systems": "where the time of Fig 12's pipeline stages goes",
    "fig12_sensitivity": "what its ratios owe to what the paper leaves open",
    "served": "a run that others served and measured, against its simulation",
}

MODULES = {"fig12_systems": "fig12"}
"""Where a command is not named as its module, because a figure is."""


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns its exit status."""
    return run(_paper, arguments, _usage, bare=True, interrupted="interrupted; what is written is whole")


def _paper(*arguments: str) -> int:
    options = [argument for argument in arguments if "=" in argument]
    names = [argument for argument in arguments if "=" not in argument]
    known = [*gallery.names(), *COMMANDS]
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} is no figure, command or option of the form key=value; {nearest(name, known)}")
    if len(names) == 1 and names[0] in COMMANDS:
        command = import_module(f"experiments.paper.{MODULES.get(names[0], names[0])}").main
        return command(**keyword_arguments(command, options, names[0])) or 0
    make = partial(figures, names)
    return make(**keyword_arguments(make, options, "experiments.paper"))


def figures(
    names: Sequence[str],
    tables: str | None = None,
    links: str | None = None,
    hardware: str = "sim",
    folder: str = "results",
) -> int:
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


def _usage() -> str:
    figures = {name: gallery.about(name) for name in gallery.names()}
    return f"{__doc__}\nfigures:\n{listed(figures)}\n\nother commands:\n{listed(COMMANDS)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
