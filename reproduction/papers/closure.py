"""Closure with the SARATHI paper: its end results, predicted from its single-iteration times.

    python -m reproduction.papers closure [tables=FOLDER] [folder=results]

tables: the folder of published A100 kernel timings (aiconfigurator/a100_sxm) for LLaMA-33B, whose rows are left out
without it. The figures that show these claims check them too; this command draws nothing.
"""

from collections.abc import Sequence
from statistics import median

import pandas as pd

from cbatch import ConfigError
from reproduction import RESULTS
from reproduction.papers import quantities
from reproduction.papers.claims import FOLDER, Claim, Verdict, check, read_claims
from reproduction.papers.machines import Machines
from reproduction.papers.verdicts import conclusion, table, write


def closure_claims() -> list[Claim]:
    """The paper's claims that are measured on a machine, not computed from a figure's data."""
    return [claim for claim in read_claims() if claim.source == "sarathi" and hasattr(quantities, claim.quantity)]


def error_of_gains(verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """How far the gains that the paper prints for LLaMA-13B are from ours, as the error of the A6000's profile; and in brief."""
    gains = [verdict for verdict in verdicts if verdict.claim.hardware == "a6000" and verdict.claim.gain is not None]
    differences = [abs(verdict.value - (verdict.claim.printed or 0.0)) for verdict in gains]
    most = f"{max(differences):.3f}"
    printed = f"{len(gains)} gains printed in the paper for LLaMA-13B: median difference {median(differences):.3f}"
    return f"{printed}, largest {most} (python -m reproduction.papers closure)", f"gains within {most}"


def main(tables: str | None = None, folder: str = RESULTS) -> int:
    """Check every claim, print the table, write closure.json; 1 if a claim is missed unexpectedly."""
    machines = Machines(tables)
    verdicts = list(check(closure_claims(), machines, quantities, pd.DataFrame()))
    left_out = machines.left_out()
    if not verdicts:
        raise ConfigError(f"closure: no claims of SARATHI in {FOLDER}; the installation is incomplete")
    print(f"{table(verdicts)}\n\n{conclusion(verdicts)}" + (f"; {left_out}" if left_out else ""))
    print(error_of_gains(verdicts)[0])
    rows = {"claims": [verdict.row() for verdict in verdicts]}
    print(f"written: {write('closure', rows, machines.provenance(), folder)}")
    return 1 if any(verdict.failed for verdict in verdicts) else 0
