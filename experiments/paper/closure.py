"""Closure with the SARATHI paper: its end results, predicted from single-iteration times.

    python -m experiments.paper closure [tables=FOLDER] [folder=results]

tables: the folder of published A100 kernel timings (aiconfigurator/a100_sxm) for LLaMA-33B; without it those rows are
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile import load_profile
from experiments.bench.presets import load_spec
from experiments.paper.a6000 import MODEL, NAME
from experiments.paper.claims import Claim, Verdict, conclusion, read_claims, table
from experiments.paper.quantities import QUANTITIES
from experiments.paper.report import write
from experiments.paper.steady import SteadyState


def main(tables: str | None = None, folder: str = "results") -> int:
    """Check every claim, print the table, write closure.json; 1 if a tested claim fails."""
    hardware = {"a6000": SteadyState(ProfileCost(load_profile(NAME), load_spec(MODEL)))}
    if tables is not None:
        hardware["a100"] = SteadyState(ProfileCost(load_profile(tables), load_spec("nanogpt-33b")))
    verdicts = list(check(read_claims("closure", QUANTITIES), hardware))
    print(table(verdicts))
    print(f"\n{conclusion(verdicts)}"
          + ("" if tables else "; LLaMA-33B on A100 is left out: give tables=.../aiconfigurator/a100_sxm"))  # fmt: skip
    provenance = {name: at.cost.provenance() for name, at in hardware.items()}
    path = write("closure", {"claims": [verdict.row() for verdict in verdicts]}, provenance, Path(folder))
    print(f"written: {path}")
    return 1 if any(verdict.failed for verdict in verdicts) else 0


def check(claims: Sequence[Claim], hardware: Mapping[str, SteadyState]) -> Iterator[Verdict]:
    """Measure each claim on its hardware; those whose hardware is not at hand are left out."""
    for claim in claims:
        at = hardware.get(claim.hardware)
        if at is not None:
            by_hand = {}
            if claim.quantity == "gain" and "scheme" not in claim.setting:
                by_hand = {"by hand": QUANTITIES["closed_form"](at, **claim.setting)}
            yield Verdict(claim, QUANTITIES[claim.quantity](at, **claim.setting), by_hand)
