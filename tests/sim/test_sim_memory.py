"""Apart from its results, the memory of a simulation does not grow with simulated time."""

import gc
import tracemalloc

from small_cluster import make_cost

from cbatch import Engine, Limits, Request
from cbatch.model.topology import Topology
from cbatch.sim.executor import SimExecutor
from policies.chunking import Fixed
from policies.sarathi_serve import SarathiServe


def bytes_beside_results(engine: Engine, num_requests: int) -> int:
    """Serve requests and delete their results; returns by how many bytes the traced memory has grown."""
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    begin = engine.executor.now()
    engine.submit(
        Request(number, 20 + number % 50, 1 + number % 30, arrival_time=begin + 1e-4 * number)
        for number in range(num_requests)
    )
    record = engine.run()
    assert len(record.requests) == num_requests
    for results in (record.steps, record.receivers, record.requests):
        results.clear()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def test_memory_does_not_grow_with_simulated_time() -> None:
    """The KV cache holds a fourth of the batch, so that requests are preempted, retired and queued."""
    topology = Topology(2, 4)
    cost = make_cost(topology)
    limits = Limits(8, 64, 100, tile=1, num_stages=topology.pipeline_stages)
    engine = Engine(
        SarathiServe(Fixed(16)), SimExecutor(cost, 1e-5), limits, cost, num_blocks=limits.max_running, block_size=25
    )
    tracemalloc.start()
    try:
        bytes_beside_results(engine, 60)  # tables of the cost model fill up
        grown = [bytes_beside_results(engine, number) for number in (60, 240)]
    finally:
        tracemalloc.stop()
    assert max(grown) < 20_000, f"{grown} bytes after 60 and 240 requests of some 20 iterations each"
