"""From figures to files: measure, draw, check the claims, and write the files of one figure.

    <folder>/paper/<name>.png, .pdf     the drawing; of a table, or where no page shows a drawing, <name>.md
    <folder>/paper/<name>.json          command, date, versions, where the times come from, the claims, and the drawn values

`rows` of a .json file are lines of CSV: the names of the columns, then one line for each drawn value.
Each file is written atomically, the .json last.
"""

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pandas as pd

from cbatch import ConfigError
from cbatch.validation import nearest
from experiments.plots import saving, style
from experiments.store.provenance import provenance, write_json, write_text
from reproduction.papers.claims import Claim, Verdict, check, conclusion, read_claims
from reproduction.papers.machines import Machines, origin_of

FOLDER = Path(__file__).parent / "figures"

OF_THE_PAPER = ("fig3", "fig4", "table2", "fig5", "fig7", "fig8", "table4", "fig9", "fig10", "fig11", "fig12", "fig13")
"""In the paper's order; the other figures follow by name."""
LANDSCAPE = "landscape"
"""The group of figures about the published policies, in a folder of their own."""


class Shown(NamedTuple):
    """Outcome of one figure.

    verdicts: of the claims that could be checked. notes: what was left out, and why. drawn: whether it has files.
    """

    name: str
    verdicts: list[Verdict]
    seconds: float
    notes: list[str]
    drawn: bool = True


def names() -> list[str]:
    """Names of all figures but the landscape's."""
    return [*OF_THE_PAPER, *sorted({path.stem for path in FOLDER.glob("[!_]*.py")} - {*OF_THE_PAPER})]


def landscape() -> list[str]:
    """Names of the landscape's figures, as in `landscape/vtc`."""
    return sorted(f"{LANDSCAPE}/{path.stem}" for path in (FOLDER / LANDSCAPE).glob("[!_]*.py"))


def module_of(name: str) -> ModuleType:
    """The module that makes a figure.

    Raises:
        ConfigError: unknown figure.
    """
    known = [*names(), *landscape()]
    if name not in known:
        raise ConfigError(f"figure {name!r} is unknown; {nearest(name, known)}")
    return import_module(f"reproduction.papers.figures.{name.replace('/', '.')}")


def about(name: str) -> str:
    """What a figure shows: the first line of its module's docstring."""
    return (module_of(name).__doc__ or "").partition("\n")[0]


def show(name: str, machines: Machines, folder: Path, say: Callable[[str], None]) -> Shown:
    """Make one figure and write its files to `folder`/paper; `say` is called with progress."""
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
        why = "its machines are simulated" if machines.are_real else "there is nothing to draw"
        return Shown(name, verdicts, time.perf_counter() - begin, notes or [f"left out: {why}"], drawn=False)
    path = folder / "paper" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = data.attrs.get("measured", [])
    sessions = {  # of which stored measurements are drawn
        f"measured on {one['hardware']}, {one['date']}, {one['commit'][:12] if 'commit' in one else 'commit not recorded'}"
        for one in measured
    }
    origin = "\n".join(filter(None, [*sorted(sessions), origin_of(machines.provenance().values())]))
    _draw(module, data, claims, path, origin)
    content = {
        **provenance("python -m reproduction.papers"),
        "machines": machines.provenance(),
        "figure": about(name),
        "seconds": round(time.perf_counter() - begin, 1),
        "left_out": notes,
        "claims": [verdict.row() for verdict in verdicts],
        "measured": measured,
        "rows": data.to_csv(index=False, float_format="%.6g").splitlines(),
    }
    write_json(path.with_suffix(".json"), content)
    return Shown(name, verdicts, time.perf_counter() - begin, notes)


def _draw(module: ModuleType, data: pd.DataFrame, claims: Sequence[Claim], path: Path, origin: str) -> None:
    """Writes the drawing, or the table; a module without `draw` has a table of all that it measures."""
    printed = [claim for claim in claims if not claim.ratio_to]
    with style.print_style():
        drawn = module.draw(data, printed) if hasattr(module, "draw") else data.to_markdown(index=False, floatfmt=".4g")
        if isinstance(drawn, str):
            write_text(path.with_suffix(".md"), f"{drawn}\n\n{'; '.join(origin.splitlines())}\n")
            return
        if origin:
            lines = filter(None, [drawn.get_supxlabel(), origin])
            drawn.supxlabel("\n".join(lines), fontsize=6, color="#444444", wrap=True)
        saving.save(drawn, path.parent, path.name)


def totals(shown: Sequence[Shown]) -> str:
    """How many claims hold, in all and by source."""
    verdicts = [verdict for figure in shown for verdict in figure.verdicts]
    seconds = sum(figure.seconds for figure in shown)
    sources = sorted({verdict.claim.source for verdict in verdicts})
    each = [(source, [verdict for verdict in verdicts if verdict.claim.source == source]) for source in sources]
    lines = [f"{conclusion(verdicts)}; {len(shown)} figures in {seconds:.0f} s"]
    lines += [f"  {source}: {conclusion(own)}" for source, own in each if len(each) > 1]
    return "\n".join(lines)
