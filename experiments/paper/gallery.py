"""From figures to files: measure, draw, check the claims, and write everything that one figure leaves.

    <folder>/paper/<name>.csv           what was measured, a row a drawn value
    <folder>/paper/<name>.png, .pdf     the drawing
    <folder>/paper/<name>.json          command, date, versions, where the times come from, and the claims

The files of a figure appear one after the other, each whole; the .json comes last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from cbatch import ConfigError
from cbatch.validation import nearest
from experiments.paper.claims import Verdict, check, read_claims
from experiments.paper.machines import Machines
from experiments.paper.verdicts import write
from experiments.plots import style
from experiments.store.provenance import at_once

FOLDER = Path(__file__).parent / "figures"

OF_THE_PAPER = ("fig3", "fig4", "table2", "fig5", "fig7", "fig8", "table4", "fig9", "fig10", "fig11", "fig12", "fig13")
"""In its order; the others follow by name."""


class Shown(NamedTuple):
    """What a figure came to. verdicts: of the claims that could be checked. notes: what was left out, and why."""

    name: str
    verdicts: list[Verdict]
    seconds: float
    notes: list[str]
    text: str


def names() -> list[str]:
    """Every figure there is."""
    found = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    return [*(name for name in OF_THE_PAPER if name in found), *sorted(found - {*OF_THE_PAPER})]


def module_of(name: str) -> ModuleType:
    """
    Raises:
        ConfigError: there is no figure of that name.
    """
    if name not in names():
        raise ConfigError(f"figure {name!r} is unknown; {nearest(name, names())}")
    return import_module(f"experiments.paper.figures.{name}")


def about(name: str) -> str:
    """What a figure shows: the first line of its docstring."""
    return (module_of(name).__doc__ or "").partition("\n")[0]


def show(name: str, machines: Machines, folder: Path, say: Callable[[str], None]) -> Shown:
    """Make one figure, and write what it leaves to `folder`/paper."""
    module, claims, begin = module_of(name), read_claims(name), time.perf_counter()
    machines.begin()
    notes: list[str] = []

    def note(text: str) -> None:
        if text.startswith("left out"):
            notes.append(text)
        say(text)

    data: pd.DataFrame = module.measure(machines, note)
    verdicts = list(check(claims, machines, module, data, notes.append))
    if left_out := machines.left_out():
        notes.append(left_out)
    if data.empty:
        why = "its machines are simulated" if machines.are_real else "nothing to be drawn is at hand"
        return Shown(name, verdicts, time.perf_counter() - begin, notes or [f"left out: {why}"], "")
    _write_table(data, folder / "paper" / f"{name}.csv")
    figure = module.draw(data, claims)
    _sign(figure, machines.origin())
    style.save(figure, folder / "paper", name)
    described = {
        "figure": about(name),
        "seconds": round(time.perf_counter() - begin, 1),
        "left_out": notes,
        "claims": [verdict.row() for verdict in verdicts],
        "measured": data.attrs.get("measured", []),
    }
    write(name, described, machines.provenance(), folder)
    table = str(module.text(data)) if hasattr(module, "text") else ""
    return Shown(name, verdicts, time.perf_counter() - begin, notes, table)


def totals(shown: Sequence[Shown]) -> str:
    """How many claims hold, by source, and every one that does not, with its reason."""
    verdicts = [verdict for figure in shown for verdict in figure.verdicts]
    seconds = sum(figure.seconds for figure in shown)
    sources = sorted({verdict.claim.source for verdict in verdicts})
    each = [(source, [verdict for verdict in verdicts if verdict.claim.source == source]) for source in sources]
    lines = [f"{_share(verdicts)} claims hold; {len(shown)} figures in {seconds:.0f} s"]
    lines += [f"  {source}: {_share(own)}" for source, own in each if len(each) > 1]
    return "\n".join([*lines, *(_failure(verdict) for verdict in verdicts if not verdict.holds)])


def _share(verdicts: Sequence[Verdict]) -> str:
    held = sum(verdict.holds for verdict in verdicts)
    return f"{held} of {len(verdicts)}" + (f" ({held / len(verdicts):.1%})" if verdicts else "")


def _failure(verdict: Verdict) -> str:
    claim = verdict.claim
    return (
        f"  does not hold: {claim.id}, {claim.where}: {claim.asked}, ours {verdict.value:.3g}: "
        f"{claim.note or 'no reason is known'}"
    )


def _sign(figure: Figure, origin: str) -> None:
    """Say below a figure where its times come from, after what it says there itself."""
    if origin:
        said = figure.get_supxlabel()
        text = style.wrapped(origin)
        figure.supxlabel(f"{said}\n{text}" if said else text, fontsize=6, color="#444444")


def _write_table(data: pd.DataFrame, path: Path) -> None:
    with at_once(path) as partial:
        data.to_csv(partial, index=False, float_format="%.6g")
