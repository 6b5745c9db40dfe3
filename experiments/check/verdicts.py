"""Describes the verdicts on a policy, with the smallest schedule that violates each property."""

from collections.abc import Iterator, Sequence
from textwrap import indent

from experiments.check.properties import Property
from experiments.check.search import Counterexample, Verdicts

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
