"""Verdicts as text: of one policy with the smallest schedule that violates each property, of all as a table of docs/policies.md."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import indent

from tabulate import tabulate

from experiments.check.properties import PROPERTIES, Property
from experiments.check.scenario import History
from experiments.check.search import Counterexample, Found, search, tiny_scenarios
from experiments.settings.composition import policy_names, policy_of
from experiments.store.provenance import around_marks, write_text

BEGIN, END = "<!-- begin: written by `python -m experiments.check table=FILE` -->", "<!-- end -->"
SHARE = 8
"""One in `SHARE` of the tiny scenarios with up to three requests is tried, and every longer one."""

_SHOWN = 30
"""Iterations of a schedule that are printed; the first ones of a longer schedule are left out."""


def text(found: Found, properties: Sequence[Property], *, some_ended: bool = True) -> str:
    """some_ended: at least one run reached its end; else what no run denies is not tested."""
    width = max(len(prop.name) for prop in properties)
    lines: list[str] = []
    for prop in properties:
        counterexample = found[prop.name]
        kept = "yes" if some_ended else "-  "
        verdict = kept if counterexample is None else "NO " if prop.needed else "no "
        lines.append(f"{prop.name:{width}}  {verdict}  {prop.text}")
        if counterexample is not None:
            lines += ["", indent("\n".join(_schedule(counterexample)), "    "), ""]
    if not some_ended:
        lines.append("-: not tested, as no run reached its end")
    return "\n".join(lines).rstrip()


def _schedule(counterexample: Counterexample) -> Iterator[str]:
    history, violation = counterexample
    yield str(history.scenario)
    for id_, ask in enumerate(history.scenario.asks):
        yield f"request {id_}: {ask}"
    decisions = history.decisions[: violation.place + 1]
    left_out = max(len(decisions) - _SHOWN, 0)
    if left_out:
        yield f"... {left_out} plans"
    width = max((len(str(decision.decided)) for decision in decisions[left_out:]), default=0)
    for place, decision in enumerate(decisions[left_out:], left_out):
        mark = f"{'':{width - len(str(decision.decided))}}  <- {violation.why}" if place == violation.place else ""
        yield f"iteration {decision.iteration}: {decision.decided}{mark}"
    if not decisions:
        yield violation.why


def write_table(path: Path, chunk: int, num_random: int, tick: Callable[[History], object]) -> str:
    """Checks the built-in policies and writes the table between its marks in a file; returns it.

    Raises:
        ConfigError: no such file, or it has no marks.
    """
    around_marks("table", path, BEGIN, END)  # before it takes long
    table = table_of({name: _check(name, chunk, num_random, tick) for name in policy_names()})
    before, after = around_marks("table", path, BEGIN, END)
    write_text(path, f"{before}\n{table}\n{after}")
    return table


def table_of(found: dict[str, Found]) -> str:
    """Rows of policies, columns of properties: no where a schedule denies it."""
    rows = [[f"`{name}`", *("no" if one[prop.name] else "yes" for prop in PROPERTIES)] for name, one in found.items()]
    return tabulate(rows, ["", *(f"`{prop.name}`" for prop in PROPERTIES)], tablefmt="github")


def _check(name: str, chunk: int, num_random: int, tick: Callable[[History], object]) -> Found:
    policy, _ = policy_of(f"policy={name}", f"chunk={chunk}")
    numbered = enumerate(tiny_scenarios(chunk))
    tiny = (scenario for place, scenario in numbered if place % SHARE == 0 or len(scenario.asks) > 3)
    return search(policy, PROPERTIES, chunk, num_random=num_random, tiny=tiny, tick=tick)
