"""Claims of the paper as data, and the one place where they are checked.

A claim in a YAML file:

    id: unique.  where: in the paper.  hardware: simulated on.
    quantity, setting: what is measured, and its arguments.
    printed: the value in the paper.
    within: most absolute difference, or share: most relative one, or at_least / at_most / bounds: the value itself.
    note: what the reader should know.  tested: false where the paper's own numbers exclude the value; the note says why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tabulate import tabulate

from cbatch.errors import ConfigError

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Claim:
    id: str
    where: str
    quantity: str
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
        """What the value is held against, in words."""
        if self.within is not None:
            return f"{self.printed} +- {self.within}"
        if self.share is not None:
            return f"{self.printed} +- {self.share:.0%}"
        return " ".join(
            f"{sign} {bound}" for sign, bound in ((">=", self.at_least), ("<=", self.at_most)) if bound is not None
        )

    def holds(self, value: float) -> bool:
        if self.printed is not None:
            slack = self.within if self.within is not None else (self.share or 0.0) * self.printed
            return abs(value - self.printed) <= slack
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    value: float
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return self.claim.holds(self.value)

    def row(self) -> dict[str, Any]:
        """As it stands in a results file."""
        claim = self.claim
        return {"id": claim.id, "where": claim.where, "asked": claim.asked, "printed": claim.printed, "simulated": self.value,
                **self.extra, "holds": self.holds, "tested": claim.tested, "note": claim.note}  # fmt: skip

    @property
    def failed(self) -> bool:
        """Whether a claim that is tested does not hold."""
        return self.claim.tested and not self.holds


def read_claims(name: str, quantities: Collection[str]) -> list[Claim]:
    """The claims of a file beside this one. Raises ConfigError for a claim that cannot be checked."""
    path = FOLDER / f"{name}.yaml"
    claims = [Claim(**entry) for entry in yaml.safe_load(path.read_text())]
    for claim in claims:
        if claim.quantity not in quantities:
            raise ConfigError(
                f"{path}: claim {claim.id}: quantity {claim.quantity} is unknown; known: {', '.join(quantities)}"
            )
        if not claim.asked:
            raise ConfigError(f"{path}: claim {claim.id} asks for nothing; give within, share, at_least or at_most")
    return claims


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as text, a line each."""
    columns = sorted({name for verdict in verdicts for name in verdict.extra})
    rows = [
        (
            verdict.claim.id,
            verdict.claim.where,
            verdict.claim.asked,
            f"{verdict.value:.3f}",
            *(f"{verdict.extra[name]:.3f}" if name in verdict.extra else "" for name in columns),
            ("yes" if verdict.holds else "no") + ("" if verdict.claim.tested else " (not tested)"),
            verdict.claim.note,
        )
        for verdict in verdicts
    ]
    return tabulate(rows, ("claim", "where", "asked", "simulated", *columns, "holds", "note"), disable_numparse=True)


def conclusion(verdicts: Sequence[Verdict]) -> str:
    tested = sum(verdict.claim.tested for verdict in verdicts)
    return f"{tested - sum(verdict.failed for verdict in verdicts)} of {tested} tested claims hold"
