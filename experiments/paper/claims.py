"""Claims as data, and the only place where they are checked.

claims/<source>.yaml holds what one source states, one claim per entry:

    id: unique.  figure: the module of experiments/paper/figures that shows it.  where: in the source.
    hardware: the machine it is checked on, see `machines`; none if the figure's data are of one measured run.
    quantity, setting: what is measured, and its arguments: a function of `quantities`, which takes the machine, or a
        function of the figure's module whose first parameter is `data`. NaN: the measurements do not cover it.
    printed: the value in the source.
    within: largest absolute difference, or share: largest relative one, or at_least / at_most: bounds of the value itself.
    note: what the reader should know.  tested: false where the printed value cannot be met; the note says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import signature
from math import isnan
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import yaml

from cbatch.errors import ConfigError
from cbatch.validation import nearest
from experiments.paper.machines import Machines
from experiments.paper.quantities import QUANTITIES
from experiments.paper.steady import SteadyState

FOLDER = Path(__file__).parent / "claims"


@dataclass(frozen=True, kw_only=True)
class Claim:
    id: str
    figure: str
    where: str
    quantity: str
    source: str = ""
    hardware: str = ""
    setting: Mapping[str, Any] = field(default_factory=dict)
    printed: float | None = None
    within: float | None = None
    share: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""
    tested: bool = True

    @property
    def asked(self) -> str:
        """What the claim demands of the value, in words."""
        if self.within is not None:
            return f"{self.printed} +- {self.within}"
        if self.share is not None:
            return f"{self.printed} +- {100 * self.share:g}%"
        return " ".join(
            f"{sign} {bound}" for sign, bound in ((">=", self.at_least), ("<=", self.at_most)) if bound is not None
        )

    def holds(self, value: float) -> bool:
        if self.within is not None or self.share is not None:
            assert self.printed is not None, "checked when it was read"
            slack = self.within if self.within is not None else (self.share or 0.0) * self.printed
            return abs(value - self.printed) <= slack
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


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
    def failed(self) -> bool:
        """Whether the claim is tested and does not hold."""
        return self.claim.tested and not self.holds

    def row(self) -> dict[str, Any]:
        """Entry in a results file."""
        claim = self.claim
        return {
            "id": claim.id,
            "source": claim.source,
            "where": claim.where,
            "hardware": claim.hardware,
            "asked": claim.asked,
            "printed": claim.printed,
            "ours": self.value,
            **self.extra,
            "holds": self.holds,
            "tested": claim.tested,
            "note": claim.note,
        }


def read_claims(figure: str = "") -> list[Claim]:
    """The claims of all sources, or those of one figure.

    Raises:
        ConfigError: there are none at all; a claim has an unknown key, lacks a required one, demands nothing, or repeats
            an id.
    """
    claims = [
        _claim(path, entry)
        for path in sorted(FOLDER.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text()) or ()
    ]
    if not claims:
        raise ConfigError(f"{FOLDER}: no claims in *.yaml; the installation is not complete: install cbatch again")
    ids: set[str] = set()
    for claim in claims:
        if claim.id in ids:
            raise ConfigError(f"{FOLDER / claim.source}.yaml: claim {claim.id}: this id is taken; choose another")
        ids.add(claim.id)
    return [claim for claim in claims if figure in ("", claim.figure)]


def _claim(path: Path, entry: Mapping[str, Any]) -> Claim:
    known, name = [field.name for field in fields(Claim)], f"{path}: claim {entry.get('id', '?')}"
    for key in entry:
        if key not in known:
            raise ConfigError(f"{name}: {key} is not a key of a claim; {nearest(key, known)}")
    try:
        claim = Claim(**{"source": path.stem, **entry})
    except TypeError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not claim.asked or (claim.printed is None and (claim.within, claim.share) != (None, None)):
        raise ConfigError(f"{name} demands nothing; give printed with within or share, or at_least or at_most")
    return claim


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
    function = getattr(figure, claim.quantity, None)
    if callable(function) and next(iter(signature(function).parameters), "") == "data":
        return function, True
    if claim.quantity not in QUANTITIES:
        hint = nearest(claim.quantity, QUANTITIES)
        raise ConfigError(f"claim {claim.id}: quantity {claim.quantity} is unknown; {hint}")
    return QUANTITIES[claim.quantity], False


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
        known = {"hardware": claim.hardware} if "hardware" in signature(function).parameters else {}
        return Verdict(claim, float(function(data, **{**known, **claim.setting})))
    if at := machines.get(claim.hardware):
        return Verdict(claim, float(function(at, **claim.setting)), _by_hand(claim, at))
    return None


def _by_hand(claim: Claim, at: SteadyState) -> dict[str, float]:
    """Sarathi's gain computed by hand, to compare with that of a run."""
    is_gain = claim.quantity == "gain" and "scheme" not in claim.setting
    return {"by_hand": QUANTITIES["closed_form"](at, **claim.setting)} if is_gain else {}
