"""Prints verdicts: of one policy, with the smallest schedule that violates each property; of all, as the table in docs/policies/properties.md."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent

from tabulate import tabulate

from experiments.check.properties import PROPERTIES, Property
from experiments.check.scenario import History
from experiments.check.search import Counterexample, Verdicts, search, tiny_scenarios
from experiments.settings.compose import compose_run, policy_names
from experiments.store.provenance import around_marks, write_text

BEGIN, END = "<!-- begin: written by `python -m experiments.check table=FILE` -->", "<!-- end -->"
SHARE = 8
"""The table tries one in `SHARE` of the tiny scenarios with up to three requests, and every longer one."""

_SHOWN = 30
"""Iterations of a schedule that are printed; the first ones of a longer schedule are left out."""


def describe(verdicts: Verdicts, properties: Sequence[Property], *, complete: bool = True) -> str:
    """Returns a line per property, with the schedule that violates it.

    complete: at least one run was served to its end. Without such a run, a property that holds counts as not tested.
    """
    width = max(len(prop.name) for prop in properties)
    lines: list[str] = []
    for prop in properties:
        counterexample = verdicts[prop.name]
        held = "yes" if complete else "-  "
        verdict = held if counterexample is None else "NO " if prop.needed else "no "
        lines.append(f"{prop.name:{width}}  {verdict}  {prop.text}")
        if counterexample is not None:
            lines += ["", indent("\n".join(_schedule(counterexample)), "    "), ""]
    if not complete:
        lines.append("-: not tested, as no run reached its end")
    return "\n".join(lines).rstrip()


def _schedule(counterexample: Counterexample) -> Iterator[str]:
    history, violation = counterexample
    yield str(history.scenario)
    for id_, arrival in enumerate(history.scenario.arrivals):
        yield f"request {id_}: {arrival}"
    plans = [(decision.iteration, str(decision.decided)) for decision in history.decisions[: violation.decision + 1]]
    if not plans:
        yield violation.why
        return
    if len(plans) > _SHOWN:
        yield f"... {len(plans) - _SHOWN} plans"
    *before, (last, plan) = plans[-_SHOWN:]
    yield from (f"iteration {iteration}: {text}" for iteration, text in before)
    yield f"iteration {last}: {plan}  <- {violation.why}"


def write_table(path: Path, chunk: int, num_random: int, tick: Callable[[History], object]) -> str:
    """Checks the built-in policies and writes the table between its marks in a file; returns the table.

    Raises:
        ConfigError: no such file, or it has no marks.
    """
    around_marks("table", path, BEGIN, END)  # before it takes long
    table = tabulate_verdicts({name: _check(name, chunk, num_random, tick) for name in policy_names()})
    before, after = around_marks("table", path, BEGIN, END)
    write_text(path, f"{before}\n{table}\n{after}")
    return table


def tabulate_verdicts(verdicts: Mapping[str, Verdicts]) -> str:
    """Returns rows of policies and columns of properties: no where a schedule violates the property."""
    names = [prop.name for prop in PROPERTIES]
    rows = [[f"`{policy}`", *("no" if held[name] else "yes" for name in names)] for policy, held in verdicts.items()]
    return tabulate(rows, ["", *(f"`{name}`" for name in names)], tablefmt="github")


def _check(name: str, chunk: int, num_random: int, tick: Callable[[History], object]) -> Verdicts:
    policy = compose_run(f"policy={name}", f"chunk={chunk}").policy()
    numbered = enumerate(tiny_scenarios(chunk))
    tiny = (scenario for number, scenario in numbered if number % SHARE == 0 or len(scenario.arrivals) > 3)
    return search(policy, PROPERTIES, chunk, num_random=num_random, tiny=tiny, tick=tick)
