"""Ablation of chunk selection: the ratio of prompt to output tokens drifts twice in one run, and `pd_aware` follows.

The selector is not informed of the drift; it estimates P:D from the requests that have ended. It is compared with the
fixed total that serves the whole run fastest, which only a sweep of the whole run can find.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cbatch import Engine, KVSize, Limits, Server
from cbatch.sim import ProfileCost, SimExecutor
from experiments.plots.style import line_style
from policies.chunking import ChunkSelector, PDAware, TileAligned
from policies.sarathi import Sarathi
from reproduction.experiment_files import composed, swept, workload
from reproduction.papers.claims import Claim
from reproduction.papers.frames import Row, data_frame, select
from reproduction.papers.machines import TITLES, Machines
from reproduction.papers.steady import BLOCK
from reproduction.parts import facet

EXPERIMENT = "chunk_drift"
HARDWARE = ("a6000", "h200")
AWARE, FIXED = "P:D-aware", "best fixed total"
CHOSEN = "auto"
"""The swept value of `chunk` that stands for `pd_aware`."""


class Drift(NamedTuple):
    """One run.

    chunks: (second, total of tokens) where it changed.
    ends: (second, tokens of the request) where requests ended, in this order.
    """

    chunks: list[tuple[float, int]]
    ends: list[tuple[float, int]]

    @property
    def seconds(self) -> float:
        """To the end of the last request."""
        return self.ends[-1][0]


@data_frame("hardware", "series", "what", "second", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """The chosen total and the throughput over the run: what is "total", in tokens, or "rate", in tokens per second."""
    for hardware, at in machines.available(HARDWARE):
        say(hardware)
        totals = [int(chunk) for chunk in swept(EXPERIMENT, "chunk") if chunk != CHOSEN]
        best = min((run(at.cost, TileAligned(total)) for total in totals), key=lambda drift: drift.seconds)
        for series, drift in ((AWARE, run(at.cost, PDAware())), (FIXED, best)):
            yield from ((hardware, series, "total", *point) for point in drift.chunks)
            yield from ((hardware, series, "rate", *point) for point in _rates(drift.ends))


def run(cost: ProfileCost, selector: ChunkSelector) -> Drift:
    """Serve the requests of the experiment on a host that takes no time."""
    config, requests = composed(EXPERIMENT), workload(EXPERIMENT).requests(None)
    longest = max(request.max_tokens for request in requests)
    limits = Limits(config["batch"], config["batch"] * longest, longest, tile=cost.profile.ceilings.tile)
    kv = KVSize(config["kv_tokens"] // BLOCK, BLOCK)
    server = Server(SimExecutor(cost), limits, cost, kv, config["runtime"]["asynchronous"])
    chunks: list[tuple[float, int]] = []

    def note(engine: Engine) -> None:
        total = selector.total if isinstance(selector, PDAware) else getattr(selector, "chunk", 0)
        if not chunks or chunks[-1][1] != total:
            chunks.append((engine.record.steps[-1].started, total))

    record = server.serve(Sarathi(selector), requests, on_step=note)
    ends = [(request.finished_at or 0.0, request.max_tokens) for request in record.requests]
    return Drift([*chunks, (ends[-1][0], chunks[-1][1])], ends)


def _rates(ends: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """(middle second, tokens per second) of each stretch in which as many requests ended as the batch holds."""
    batch = composed(EXPERIMENT)["batch"]
    edges = np.array([0.0, *(second for second, _ in ends[batch - 1 :: batch])])
    tokens = [sum(num for _, num in ends[first : first + batch]) for first in range(0, len(ends) - batch + 1, batch)]
    return list(zip((edges[1:] + edges[:-1]) / 2, np.array(tokens) / np.diff(edges), strict=True))


def seconds_of(data: pd.DataFrame, hardware: str, series: str) -> float:
    """Seconds of the whole run."""
    return float(select(data, hardware=hardware, series=series, what="total")["second"].max())


def lead_over_fixed(data: pd.DataFrame, hardware: str) -> float:
    """Throughput of the whole run over that of the best fixed total."""
    return seconds_of(data, hardware, FIXED) / seconds_of(data, hardware, AWARE)


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A column for each machine: the total above, throughput below. No paper has this."""
    config = composed(EXPERIMENT)
    phases = ", then ".join(map(str, config["workload"]["lengths"]["pd_ratios"]))
    figure, facets = facet(data, 2, 3.8, across=True)
    for hardware, shown, [upper, lower] in facets:
        for index, series in enumerate((AWARE, FIXED)):
            total, rate = (select(shown, series=series, what=what) for what in ("total", "rate"))
            style, label = line_style(index), f"{series}: {seconds_of(data, hardware, series):,.1f} s in all"
            upper.step(total["second"], total["value"], where="post", label=label, **(style | {"marker": ""}))
            lower.plot(rate["second"], rate["value"], **style)
        upper.sharex(lower)
        upper.tick_params(labelbottom=False)
        upper.set(title=f"{TITLES[hardware]}: P:D {phases}", ylabel="chunk and decodes [tokens]")
        upper.legend(loc="upper right")
        lower.set(xlabel="time [s]", ylabel="throughput [tokens/s]")
        for panel in (upper, lower):
            panel.set_ylim(bottom=0)
    note = f"throughput: one point for every {config['batch']} requests that end, with all their tokens"
    figure.supxlabel(f"{note}; during the last ones the batch runs empty")
    return figure
