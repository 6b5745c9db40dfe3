"""The benchmarks of graphs and loops with real tokens on a CPU; what only CUDA does is in tests/gpu."""

from functools import partial
from typing import Any

import pytest
import torch
from cpu_server import cpu_server
from tiny_models import LLAMA

from cbatch import Limits
from cbatch.runtime.batch import Shape
from cbatch.runtime.graphs import GraphedIteration
from experiments.settings.backends import GRAPHS
from experiments.settings.servers import equal_requests
from experiments.workloads import AllAtOnce, OpenLoop, UniformLengths
from policies.chunking import TileAligned
from policies.orca import Orca
from policies.sarathi_serve import SarathiServe
from reproduction.bench import graph_memory, graphs, loops
from reproduction.bench.graphs import Asked


def test_a_way_is_measured_batch_by_batch() -> None:
    asked = Asked((1, 2, 4), prompt=4, new=24, window=8)
    found: dict[str, Any] = {}
    way = graphs.WAYS["fused, graphs"]
    seen = [(batch, list(found["by_batch"])) for batch in graphs.measure(LLAMA, way, asked, found, cpu_server)]
    assert seen == [(1, ["1"]), (2, ["1", "2"]), (4, ["1", "2", "4"])]
    assert found["output_tokens_per_second"]["repeats"] == graphs.RUNS
    assert found["by_batch"]["4"]["repeats"] == graphs.STRETCHES
    assert found["graphs"] == 8 and found["capture_seconds"] == 0.5


def test_rates_of_a_window_are_those_of_its_iterations() -> None:
    server = cpu_server(LLAMA, Limits(2, 16, 32))
    record = server.serve(Orca(), equal_requests(2, 4, 17, LLAMA.vocab_size))
    rates = graphs.rates_of_window(record, batch=2, window=8)
    seconds = record.steps[-1].received_at - record.steps[-9].received_at
    assert len(rates) == graphs.STRETCHES
    assert sum(2 * 2 / rate for rate in rates) == pytest.approx(seconds)
    server.close()


@pytest.mark.parametrize("kind", GRAPHS)
def test_both_loops_are_measured_on_the_same_traffic(kind: str) -> None:
    lengths = UniformLengths(min_length=12, max_length=40, pd_ratio=3)
    workload = OpenLoop(num_requests=9, arrivals=AllAtOnce(), lengths=lengths)
    policy = partial(SarathiServe, TileAligned(16))
    server = cpu_server(LLAMA, Limits(3, 64, 40, tile=16))
    found = loops.measure(server, policy, workload, kind, 2)
    server.close()
    assert list(found) == [f"sync, graphs {kind}", f"async, graphs {kind}"]
    for figures in found.values():
        assert figures["tokens_per_second"]["repeats"] == 2
        assert 0 < figures["mixed_iterations"] < figures["iterations"]
        assert figures["median_ms"]["mixed"] > 0


class Recorded(graph_memory.Recaptured):
    """Takes 10 bytes a token from a pool of its own, and from a shared one what exceeds the most that was taken."""

    def _warm_up(self, shape: Shape) -> None:
        """Nothing to compile."""

    def _capture(self, shape: Shape, slot: Any, pool: Any) -> None:
        taken, most = getattr(self, "taken", (0, 0))
        needed = 10 * shape.num_tokens
        self.taken = (taken + (needed if pool is None else max(needed - most, 0)), max(most, needed))
        self.graphs[shape, slot] = None  # type: ignore[assignment, index]

    def _used_bytes(self) -> int:
        return 1000 + getattr(self, "taken", (0, 0))[0]


@pytest.mark.parametrize(
    ("way", "tokens", "used"),
    [
        ("one pool, largest first", [8, 8, 2, 2, 1, 1], [80, 80, 80, 80, 80, 80]),
        ("one pool, smallest first", [1, 1, 2, 2, 8, 8], [10, 10, 20, 20, 80, 80]),
        ("a pool for each graph", [8, 8, 2, 2, 1, 1], [80, 160, 180, 200, 210, 220]),
    ],
)
def test_graphs_are_captured_again_in_the_order_and_pools_asked_for(
    way: str, tokens: list[int], used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    of = GraphedIteration.__new__(GraphedIteration)
    of._eager = of.caches = None  # type: ignore[assignment]
    of._streams = [None]  # type: ignore[list-item]
    of._slots = (0, 1)  # type: ignore[assignment]
    found = Recorded(of, [Shape(size, size, 4) for size in (1, 2, 8)], graph_memory.WAYS[way])
    assert (found.tokens, found.used) == (tokens, used)
    assert found.report.num_graphs == 6 and found.report.bytes == used[-1]
