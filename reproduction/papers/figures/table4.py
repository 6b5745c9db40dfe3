"""Table 4 of SARATHI (arXiv 2308.16369): decode speedup and throughput gain end to end at C = 256, by length and batch.

LLaMA-13B on the A6000, LLaMA-33B on the A100, and the first one's rows on the other available machines.
"""

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
from tabulate import tabulate

from reproduction.papers.claims import Claim
from reproduction.papers.frames import Row, data_frame, pivot
from reproduction.papers.machines import TITLES, Machines
from reproduction.papers.quantities import decode_speedup
from reproduction.papers.steady import Load

CHUNK = 256
OF_13B = (Load(1024, 6, 50), Load(2048, 6, 50), Load(3072, 6, 50))
LOADS = {
    "a6000": OF_13B,
    "a100": (Load(1024, 10, 28), Load(2048, 5, 63), Load(3072, 3, 127)),
    "h200-13b": OF_13B,
    "gpu": OF_13B,
}
KEYS = ["hardware", "length", "batch", "pd_ratio"]
HEAD = ("hardware, model", "L", "B", "P:D")
COLUMNS = {"decode_speedup": "decode speedup", "gain": "throughput gain"}


@data_frame("hardware", "series", "length", "batch", "pd_ratio", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Yields the speedup of a decode and the throughput gain for each load."""
    for hardware, at in machines.available(LOADS):
        say(hardware)
        for load in LOADS[hardware]:
            values = (decode_speedup(at, load.length, load.batch, CHUNK), at.gain("sarathi", load, CHUNK))
            for series, value in zip(COLUMNS, values, strict=True):
                yield hardware, series, load.length, load.batch, load.pd_ratio, value


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> str:
    """The table in Markdown, with the paper's values in parentheses."""
    table = pivot(data, KEYS)
    paper = {(claim.hardware, claim.setting["length"], claim.quantity): claim.printed for claim in printed}
    rows = []
    for (hardware, length, batch, ratio), row in zip(table.index, table.to_dict("records"), strict=True):
        values = []
        for series in COLUMNS:
            known = paper.get((hardware, length, series))
            values.append(f"{row[series]:.2f}" + ("" if known is None else f" ({known:.2f})"))
        rows.append((TITLES[hardware], f"{length // 1024}K", batch, f"{ratio:g}:1", *values))
    return tabulate(rows, (*HEAD, *COLUMNS.values()), tablefmt="github", disable_numparse=True)
