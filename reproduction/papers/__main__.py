"""`python -m reproduction.papers [FIGURE ...] [tables=FOLDER] [links=FOLDER] [traces=FOLDER] [hardware=sim|gpu] [folder=results]`

Makes the named figures, or all: draws each one, checks its claims, and writes folder/paper/<name>.png, .pdf (of a
table .md) and .json. Times are simulated; with hardware=gpu requests are served with real tokens on this
machine's GPU, and results go to folder/<gpu>/paper.

tables: published A100 kernel timings, .../aiconfigurator/a100_sxm; links: NCCL timings, .../vidur/network/a100_dgx.
Without one of them, what needs it is left out. `landscape` names all figures about the published policies; it takes minutes.
traces: published traces, for some of them.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cbatch import CbatchError, ConfigError
from cbatch.validation import nearest
from experiments.settings.command_line import keyword_arguments, list_names, run
from experiments.store.claim import check_writable
from experiments.store.provenance import slug
from reproduction import RESULTS
from reproduction.benchmark import Benchmark
from reproduction.papers import gallery
from reproduction.papers.claims import SETTLED, conclusion, table
from reproduction.papers.machines import Machines

HERE = "reproduction.papers"
_command = partial(Benchmark, needs_gpu=False)
COMMANDS = {
    "a6000": _command(
        "write the profile of the A6000 with LLaMA-13B from the paper's printed numbers", f"{HERE}.a6000"
    ),
    "prefix_cache": _command(
        "measure and draw hits against the size of the prefix cache, on Mooncake's trace", f"{HERE}.prefix_cache"
    ),
    "properties": _command("print which properties each policy has: docs/policies/properties.md", f"{HERE}.properties"),
    "roles": _command(
        "simulate and draw disaggregated prefill and decode: when it pays, in which ratio", f"{HERE}.roles"
    ),
    "schedules": _command("draw each policy's schedule of five requests: docs/figures/policies", f"{HERE}.schedules"),
    "traces": _command("make the files of conf/workload/traces from clones of what is published", f"{HERE}.traces"),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run(_paper, arguments, _usage, bare=True, resume_hint="files already written are complete")


def _paper(*arguments: str) -> int:
    options = [argument for argument in arguments if "=" in argument]
    names = [argument for argument in arguments if "=" not in argument]
    names = [each for name in names for each in (gallery.landscape() if name == gallery.LANDSCAPE else [name])]
    known = [*gallery.names(), gallery.LANDSCAPE, *gallery.landscape(), *COMMANDS]
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} is not a figure, a command or an option key=value; {nearest(name, known)}")
    make: Callable[..., Any] = partial(figures, list(dict.fromkeys(names)))
    if len(names) == 1 and names[0] in COMMANDS:
        make = COMMANDS[names[0]].load()
    return make(**keyword_arguments(make, options, names[0] if len(names) == 1 else HERE)) or 0


def figures(
    names: Sequence[str],
    tables: str | None = None,
    links: str | None = None,
    traces: str | None = None,
    hardware: Literal["sim", "gpu"] = "sim",
    folder: str = RESULTS,
) -> int:
    """Makes figures, all if none is named; returns 1 if a claim is missed unexpectedly, 2 if a figure is not made."""
    chosen, shown, into = [*names] or gallery.names(), list[gallery.Shown](), Path(folder)
    check_writable(into, "give another folder=")
    machines = Machines(tables, links, traces=traces)
    if hardware == "gpu":
        from reproduction.papers.real import on_gpu  # it loads PyTorch

        real = on_gpu()
        machines, into = Machines(tables, links, real), into / slug(real.hardware)
    with closing(machines):
        for place, name in enumerate(chosen, 1):
            print(f"[{place}/{len(chosen)}] {name}: {gallery.about(name)}", flush=True)
            try:
                made = gallery.show(name, machines, into, lambda text: print(f"    {text}", flush=True))
                if names and not made.drawn:
                    raise ConfigError(made.notes[0])
            except CbatchError as error:  # go on with the other figures
                print(f"error: {name}: {error}", file=sys.stderr, flush=True)
            else:
                shown.append(made)
                _report(made, into, in_full=len(chosen) == 1)
    if shown:
        print(f"\n{gallery.totals(shown)}")
    if len(shown) < len(chosen):
        return 2
    return 1 if any(verdict.failed for figure in shown for verdict in figure.verdicts) else 0


def _report(shown: gallery.Shown, folder: Path, *, in_full: bool) -> None:
    """Prints the outcome of one figure; `in_full`: with the claims that hold."""
    for note in shown.notes:
        print(f"    {note}")
    verdicts = shown.verdicts if in_full else [verdict for verdict in shown.verdicts if verdict.outcome not in SETTLED]
    if verdicts:
        print(table(verdicts))
    print(f"    {conclusion(shown.verdicts)}; {shown.seconds:.1f} s; {folder}/paper/{shown.name}.*", flush=True)


def _usage() -> str:
    figures = {name: gallery.about(name) for name in [*gallery.names(), *gallery.landscape()]}
    commands = {name: command.about for name, command in COMMANDS.items()}
    return f"{__doc__}\nfigures:\n{list_names(figures)}\n\nother commands:\n{list_names(commands)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
