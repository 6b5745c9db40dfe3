"""`python -m reproduction.papers [FIGURE ...] [tables=FOLDER] [links=FOLDER] [traces=FOLDER] [hardware=sim|gpu] [folder=results]`

Makes the named figures, or all: draws each one, checks its claims, and writes folder/paper/<name>.png, .pdf (of a
table .md), .csv and .json. Times are simulated; with hardware=gpu requests are served with real tokens on this
machine's GPU, and results go to folder/<gpu>/paper.

tables: published A100 kernel timings, .../aiconfigurator/a100_sxm; links: NCCL timings, .../vidur/network/a100_dgx.
Without one of them, what needs it is left out. `landscape` names all figures about the published policies; it takes minutes.
traces: published traces, for some of them.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from pathlib import Path

from cbatch import CbatchError, ConfigError
from cbatch.validation import nearest
from experiments.settings.command_line import keyword_arguments, listed, run
from experiments.store.benchmark_file import slug
from reproduction import RESULTS
from reproduction.papers import gallery
from reproduction.papers.machines import Machines
from reproduction.papers.verdicts import SETTLED, conclusion, table

COMMANDS = {
    "a6000": "write the profile of the A6000 with LLaMA-13B from the paper's printed numbers",
    "closure": "check SARATHI's claims that are measured on simulated machines, as one table",
    "fig12_sensitivity": "show how Fig 12's ratios depend on what the paper leaves open",
    "properties": "print the table of docs/policies/properties.md, which takes minutes",
    "redraw": "draw figure=NAME from its .csv, as after a change of its drawing",
    "schedules": "draw each policy's schedule of five requests beside first come, first served: docs/figures/policies",
    "served": "compare a published run, served on a real GPU, with its simulation",
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns its exit status."""
    return run(_paper, arguments, _usage, bare=True, interrupted="interrupted; files already written are complete")


def _paper(*arguments: str) -> int:
    options = [argument for argument in arguments if "=" in argument]
    names = [argument for argument in arguments if "=" not in argument]
    names = [each for name in names for each in (gallery.landscape() if name == gallery.LANDSCAPE else [name])]
    names = list(dict.fromkeys(names))
    known = [*gallery.names(), gallery.LANDSCAPE, *gallery.landscape(), *COMMANDS]
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} is not a figure, a command or an option key=value; {nearest(name, known)}")
    if len(names) == 1 and names[0] in COMMANDS:
        command = import_module(f"reproduction.papers.{names[0]}").main
        return command(**keyword_arguments(command, options, names[0])) or 0
    make = partial(figures, names)
    return make(**keyword_arguments(make, options, "reproduction.papers"))


def figures(
    names: Sequence[str],
    tables: str | None = None,
    links: str | None = None,
    traces: str | None = None,
    hardware: str = "sim",
    folder: str = RESULTS,
) -> int:
    """Make figures, all if none is named; returns 1 if a claim is missed unexpectedly, 2 if a figure is not made."""
    chosen = [*names] or gallery.names()
    for name in chosen:
        gallery.module_of(name)
    machines, into = _machines(tables, links, traces, hardware, Path(folder))
    shown = []
    with closing(machines):
        for place, name in enumerate(chosen, 1):
            print(f"[{place}/{len(chosen)}] {name}: {gallery.about(name)}", flush=True)
            try:
                made = gallery.show(name, machines, into, lambda text: print(f"    {text}", flush=True))
                if names and not made.drawn:
                    raise ConfigError(made.notes[0])
                shown.append(made)
            except CbatchError as error:  # go on with the other figures
                print(f"error: {name}: {error}", file=sys.stderr, flush=True)
            else:
                _report(shown[-1], into, in_full=len(chosen) == 1)
    if shown:
        print(f"\n{gallery.totals(shown)}")
    if len(shown) < len(chosen):
        return 2
    return 1 if any(verdict.failed for figure in shown for verdict in figure.verdicts) else 0


def _machines(
    tables: str | None, links: str | None, traces: str | None, hardware: str, folder: Path
) -> tuple[Machines, Path]:
    """The machines, and the folder of their results."""
    if hardware not in ("sim", "gpu"):
        raise ConfigError(f"hardware={hardware}: give sim, or gpu for this machine's GPU")
    if hardware == "sim":
        return Machines(tables, links, traces=traces), folder
    from reproduction.papers.real import on_gpu  # it loads PyTorch

    real = on_gpu()
    return Machines(tables, links, real), folder / slug(real.hardware)


def _report(shown: gallery.Shown, folder: Path, *, in_full: bool) -> None:
    """Print the outcome of one figure; `in_full`: with its text and the claims that hold."""
    for note in shown.notes:
        print(f"    {note}")
    if shown.text and in_full:
        print(f"\n{shown.text}\n")
    verdicts = shown.verdicts if in_full else [verdict for verdict in shown.verdicts if verdict.outcome not in SETTLED]
    if verdicts:
        print(table(verdicts))
    files = f"{folder}/paper/{shown.name}.*"
    print(f"    {conclusion(shown.verdicts)}; {shown.seconds:.1f} s; {files}", flush=True)


def _usage() -> str:
    figures = {name: gallery.about(name) for name in [*gallery.names(), *gallery.landscape()]}
    return f"{__doc__}\nfigures:\n{listed(figures)}\n\nother commands:\n{listed(COMMANDS)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
