"""Closure with the SARATHI paper: its end results, predicted from its single-iteration times.

    python -m experiments.paper closure [tables=FOLDER] [folder=results]

tables: the folder of published A100 kernel timings (aiconfigurator/a100_sxm) for LLaMA-33B, whose rows are left out without
it. The figures that show these claims check them too; this command draws nothing.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.paper import quantities
from experiments.paper.claims import Claim, check, read_claims
from experiments.paper.machines import Machines
from experiments.paper.verdicts import conclusion, table, write


def closure_claims() -> list[Claim]:
    """The paper's claims that are measured on a machine, not computed from a figure's data."""
    return [claim for claim in read_claims() if claim.source == "sarathi" and claim.quantity in quantities.QUANTITIES]


def main(tables: str | None = None, folder: str = "results") -> int:
    """Check every claim, print the table, write closure.json; 1 if a tested claim fails."""
    machines = Machines(tables)
    verdicts = list(check(closure_claims(), machines, quantities, pd.DataFrame()))
    left_out = machines.left_out()
    print(f"{table(verdicts)}\n\n{conclusion(verdicts)}" + (f"; {left_out}" if left_out else ""))
    rows = {"claims": [verdict.row() for verdict in verdicts]}
    print(f"written: {write('closure', rows, machines.provenance(), Path(folder))}")
    return 1 if any(verdict.failed for verdict in verdicts) else 0
