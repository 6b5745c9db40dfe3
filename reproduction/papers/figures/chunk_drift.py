"""Ablation of chunk selection: P:D drifts twice in one run, and `pd_aware` follows, beside every fixed total.

The selector is not informed of the drift; it estimates P:D from the requests that have ended. The fixed total that serves the
whole run fastest can only be found by a sweep of the whole run.
"""

from collections.abc import Callable, Iterator

import pandas as pd

from cbatch import KVSize, Limits, Server
from cbatch.sim import ProfileCost, SimExecutor
from policies.chunking import ChunkSelector, PDAware, TileAligned
from policies.sarathi import Sarathi
from reproduction.experiment_files import composed, swept, workload
from reproduction.papers.frames import Row, data_frame, select
from reproduction.papers.machines import Machines
from reproduction.papers.steady import BLOCK

EXPERIMENT = "chunk_drift"
HARDWARE = ("a6000", "h200")
CHOSEN = "auto"
"""The swept value of `chunk` that stands for `pd_aware`."""


@data_frame("hardware", "series", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Seconds of the whole run; series: the chunk."""
    for hardware, at in machines.available(HARDWARE):
        say(hardware)
        for chunk in swept(EXPERIMENT, "chunk"):
            yield hardware, chunk, run(at.cost, PDAware() if chunk == CHOSEN else TileAligned(int(chunk)))


def run(cost: ProfileCost, selector: ChunkSelector) -> float:
    """Serves the requests of the experiment on a host that takes no time; returns the seconds until the last one has ended."""
    config, requests = composed(EXPERIMENT).keys, workload(EXPERIMENT).requests(None)
    longest = max(request.max_tokens for request in requests)
    limits = Limits(config["batch"], config["batch"] * longest, longest, tile=cost.profile.ceilings.tile)
    kv = KVSize(config["kv_tokens"] // BLOCK, BLOCK)
    server = Server(SimExecutor(cost), limits, cost, kv, config["runtime"]["asynchronous"])
    return max(request.finished_at or 0.0 for request in server.serve(Sarathi(selector), requests).requests)


def lead_over_fixed(data: pd.DataFrame, hardware: str) -> float:
    """Throughput of the whole run over that of the best fixed total."""
    seconds = select(data, hardware=hardware).set_index("series")["value"]
    return float(seconds.drop(CHOSEN).min() / seconds[CHOSEN])
