"""Closure with the SARATHI paper: its end results, predicted from single-iteration times.

    python -m experiments.paper closure [tables=FOLDER] [folder=results]

tables: the folder of published A100 kernel timings (aiconfigurator/a100_sxm) for LLaMA-33B; without it those rows are
left out. The same claims are checked by the figures that show them; this command draws nothing.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.paper import quantities
from experiments.paper.claims import Claim, check, read_claims
from experiments.paper.machines import Machines
from experiments.paper.verdicts import conclusion, table, write


def claims_of_closure() -> list[Claim]:
    """What the paper prints that is measured on a machine, and not read off a figure's data."""
    return [claim for claim in read_claims() if claim.source == "sarathi" and claim.quantity in quantities.QUANTITIES]


def main(tables: str | None = None, folder: str = "results") -> int:
    """Check every claim, print the table, write closure.json; 1 if a tested claim fails."""
    machines = Machines(tables)
    verdicts = list(check(claims_of_closure(), machines, quantities, pd.DataFrame()))
    left_out = machines.left_out()
    print(f"{table(verdicts)}\n\n{conclusion(verdicts)}" + (f"; {left_out}" if left_out else ""))
    rows = {"claims": [verdict.row() for verdict in verdicts]}
    print(f"written: {write('closure', rows, machines.provenance(), Path(folder))}")
    return 1 if any(verdict.failed for verdict in verdicts) else 0
