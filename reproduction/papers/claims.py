"""Claims as data, and the only place where they are checked; verdicts as text and in results files.

claims/*.yaml hold what the sources state, one claim per entry:

    id: unique.  source: the paper or post; without it, the name of the file.
    figure: the module of reproduction/papers/figures that shows it.  where: in the source.
    hardware: the machine it is checked on, see `machines`; none if the figure's data are of one measured run.
    quantity, setting: what is measured, and its arguments: a function of `quantities` or of the figure's module, whose
        first parameter is the machine, `at`, or the figure's `data`. NaN: the measurements do not cover it.
    ratio_to: settings that differ in the quantity by which the measured one is divided; such a ratio is not drawn.
    printed: the value in the source.  basis: how it is known: printed, formula, plot (read off one), rerun (the
        authors' code, run again) or logs (computed from what they measured).
    within: largest absolute difference, share: largest relative one, gain: largest one relative to printed - 1, the
        gain over the baseline, or steps: how many steps of the swept grid (`outputs`) the peak may lie from it.
    at_least / at_most: bounds of the value itself. Beside a printed value they are its direction only: a value within
        them but not within the tolerance is "same direction".
    derived_from: what the value follows from, if it went into the machine's profile or follows from another claim: such
        a claim checks our arithmetic and is no evidence.
    expected: missed or not comparable where the source's value cannot be met; the note says why.
    note: what the reader should know.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import getmembers, isfunction, signature
from math import inf, isnan, nan
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pandas as pd
import yaml
from tabulate import tabulate

from cbatch import ConfigError
from cbatch.validation import nearest
from reproduction.papers import quantities
from reproduction.papers.machines import Machines

FOLDER = Path(__file__).parent / "claims"

Outcome = Literal["held", "same direction", "missed", "not comparable", "derived"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    id: str
    figure: str
    where: str
    quantity: str
    source: str = ""
    hardware: str = ""
    setting: Mapping[str, Any] = field(default_factory=dict)
    ratio_to: Mapping[str, Any] = field(default_factory=dict)
    printed: float | None = None
    basis: Literal["printed", "formula", "plot", "rerun", "logs"] = "printed"
    within: float | None = None
    share: float | None = None
    gain: float | None = None
    steps: int | None = None
    at_least: float | None = None
    at_most: float | None = None
    derived_from: str = ""
    expected: Literal["held", "missed", "not comparable"] = "held"
    note: str = ""

    @property
    def asked(self) -> str:
        """What the claim demands of the value, in words."""
        bounds = ((">=", self.at_least), ("<=", self.at_most))
        asked = " ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
        if self.printed is None:
            return asked
        of_gain = "" if self.gain is None else f"{100 * self.gain:g}% of the gain"
        of_value = "" if self.share is None else f"{100 * self.share:g}%"
        of_grid = "" if self.steps is None else f"{self.steps} of the grid's steps"
        tolerance = f"{self.printed} +- {of_gain or of_value or of_grid or self.within}"
        return f"{tolerance}; direction {asked}" if asked else tolerance

    def value_of(self, quantity: Callable[..., float]) -> float:
        """The quantity with the claim's settings or, with `ratio_to`, the ratio of two; NaN if the second is 0."""
        value = float(quantity(**self.setting))
        if not self.ratio_to:
            return value
        other = float(quantity(**{**self.setting, **self.ratio_to}))
        return value / other if other else nan

    def holds(self, value: float) -> bool:
        """Whether the value is within the tolerance or, without a printed value, within the bounds."""
        if self.printed is None:
            return self.within_bounds(value)
        if self.steps is not None:
            grid = [self.setting["length"] / output - 1 for output in self.setting["outputs"]]
            low, high = _reach(grid, value, self.steps)
            return low <= self.printed <= high
        if self.gain is not None:
            slack = self.gain * (self.printed - 1)
        else:
            slack = self.within if self.within is not None else (self.share or 0.0) * self.printed
        return abs(value - self.printed) <= slack

    def within_bounds(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


def _reach(grid: Iterable[float], peak: float, steps: int) -> tuple[float, float]:
    """The points of the grid that many steps from a peak, rounded as sources print; none beyond the grid's ends."""
    points = [round(point, 1) for point in sorted(grid)]
    at = points.index(round(peak, 1))
    if not steps <= at < len(points) - steps:
        return inf, -inf  # the highest value is at the end of the grid: the peak may lie beyond it
    return points[at - steps], points[at + steps]


@dataclass(frozen=True)
class Verdict:
    """A claim and our value. extra: further values for comparison, by name."""

    claim: Claim
    value: float
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return self.claim.holds(self.value)

    @property
    def outcome(self) -> Outcome:
        claim = self.claim
        if claim.expected == "not comparable":
            return "not comparable"
        if claim.derived_from:
            return "derived" if self.holds else "missed"
        if self.holds:
            return "held"
        has_direction = claim.printed is not None and (claim.at_least, claim.at_most) != (None, None)
        return "same direction" if has_direction and claim.within_bounds(self.value) else "missed"

    @property
    def failed(self) -> bool:
        """Whether the claim is missed and not expected to be."""
        return self.outcome == "missed" and self.claim.expected == "held"

    def row(self) -> dict[str, Any]:
        """Entry in a results file."""
        named = ("id", "source", "where", "hardware", "asked", "printed", "basis", "derived_from")
        stated = {name: getattr(self.claim, name) for name in named}
        return {**stated, "ours": self.value, **self.extra, "outcome": self.outcome, "note": self.claim.note}


def read_claims(figure: str = "") -> list[Claim]:
    """Returns the claims of all sources, or those of one figure."""
    entries = (
        {"source": path.stem, **entry}
        for path in sorted(FOLDER.glob("*.yaml"))
        for entry in yaml.load(path.read_text(), yaml.CSafeLoader)  # in 30 ms, safe_load in 220
    )
    return [Claim(**entry) for entry in entries if figure in ("", entry["figure"])]


def printed_points(claims: Iterable[Claim], quantity: str, x: str, **settings: object) -> list[tuple[Any, float]]:
    """(value of the setting `x`, printed value) of the claims about a quantity whose hardware or settings are these."""
    return [
        (claim.setting[x], claim.printed)
        for claim in claims
        if claim.quantity == quantity and claim.printed is not None
        if settings.items() <= {"hardware": claim.hardware, **claim.setting}.items()
    ]


def quantity_of(claim: Claim, figure: ModuleType) -> tuple[Callable[..., float], bool]:
    """The function that measures a claim, and whether it takes the figure's data.

    Raises:
        ConfigError: neither `quantities` nor the figure's module has it.
    """
    known = {
        name: (function, first == "data")
        for module in (quantities, figure)
        for name, function in getmembers(module, isfunction)
        if (first := next(iter(signature(function).parameters), "")) in ("at", "data")
    }
    if claim.quantity not in known:
        raise ConfigError(f"claim {claim.id}: quantity {claim.quantity} is unknown; {nearest(claim.quantity, known)}")
    return known[claim.quantity]


def check(
    claims: Sequence[Claim],
    machines: Machines,
    figure: ModuleType,
    data: pd.DataFrame,
    note: Callable[[str], None] | None = None,
) -> Iterator[Verdict]:
    """Measure the claims of a figure; leave out those whose machine is not available or not in `data`.

    Args:
        note: called with a line for each claim that the measurements do not cover.
    """
    for claim in claims:
        verdict = _measure(claim, machines, figure, data)
        if verdict is None:
            continue
        if not isnan(verdict.value):
            yield verdict
        elif note:
            note(f"left out: claim {claim.id}, {claim.where}: the measurements do not cover it")


def _measure(claim: Claim, machines: Machines, figure: ModuleType, data: pd.DataFrame) -> Verdict | None:
    function, from_data = quantity_of(claim, figure)
    if from_data:
        if not len(data) or (claim.hardware and claim.hardware not in set(data["hardware"])):
            return None
        takes = claim.hardware and {"hardware", "rows"} & signature(function).parameters.keys()
        known = {"hardware": claim.hardware} if takes else {}
        return Verdict(claim, claim.value_of(partial(function, data, **known)))
    if at := machines.get(claim.hardware):
        of_sarathi = claim.quantity == "gain" and "scheme" not in claim.setting and not claim.ratio_to
        extra = {"by_hand": quantities.closed_form(at, **claim.setting)} if of_sarathi else {}
        return Verdict(claim, claim.value_of(partial(function, at)), extra)
    return None


def table(verdicts: Sequence[Verdict]) -> str:
    """One line per verdict."""
    rows = [
        {
            "claim": verdict.claim.id,
            "where": verdict.claim.where,
            "on": verdict.claim.hardware,
            "asked": verdict.claim.asked,
            "ours": f"{verdict.value:.3f}",
            "outcome": verdict.outcome,
            **{name.replace("_", " "): f"{value:.3f}" for name, value in verdict.extra.items()},
            "note": verdict.claim.note,
        }
        for verdict in verdicts
    ]
    return tabulate(rows, "keys", disable_numparse=True)


def conclusion(verdicts: Sequence[Verdict]) -> str:
    """Each outcome's number among the independent claims, and how many follow from inputs or from other claims."""
    count = Counter(verdict.outcome for verdict in verdicts)
    tested = sum(count[outcome] for outcome in TESTED)
    lists = [[f"{count[key]} {words}" for key, words in names.items() if count[key]] for names in (TESTED, NOT_TESTED)]
    parts = [", ".join(each) for each in lists]
    return "; ".join(filter(None, [f"{tested} independent claims tested: {parts[0]}", parts[1]]))


TESTED: Mapping[Outcome, str] = {
    "held": "held",
    "same direction": "in the same direction but not reproduced",
    "missed": "missed",
}
NOT_TESTED: dict[Outcome, str] = {"not comparable": "not comparable", "derived": "derived from inputs or other claims"}
SETTLED: tuple[Outcome, ...] = ("held", "derived")
"""Outcomes that need no reason."""
