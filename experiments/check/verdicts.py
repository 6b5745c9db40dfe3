"""The verdict as text: one line per property, with the smallest schedule that violates it."""

from collections.abc import Iterator, Sequence
from textwrap import indent

from experiments.check.properties import Property
from experiments.check.search import Counterexample, Found

_SHOWN = 30
"""Iterations of a schedule that are printed; the first ones of a longer schedule are left out."""


def text(found: Found, properties: Sequence[Property]) -> str:
    width = max(len(prop.name) for prop in properties)
    lines: list[str] = []
    for prop in properties:
        counterexample = found[prop.name]
        verdict = "yes" if counterexample is None else "NO " if prop.needed else "no "
        lines.append(f"{prop.name:{width}}  {verdict}  {prop.text}")
        if counterexample is not None:
            lines += ["", indent("\n".join(_schedule(counterexample)), "    "), ""]
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
