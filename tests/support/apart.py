"""Random requests that one replica prefills and another decodes, by random policies, in real time: tokens, and that nothing is left."""

import random
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from fuzz_policy import FuzzPolicy
from schedules import UnitCost
from tiny_models import LONGEST_OUTPUT, greedy_references

from cbatch import FinishReason, KVSize, Limits, Request, Server
from cbatch.cluster import LiveCluster, Moves, ReplicatedServer, Role, RoundRobin
from cbatch.cluster.transfers import Copier
from cbatch.model import ModelSpec
from cbatch.request import spec_of
from cbatch.sim.interpolation import PiecewiseLinear
from policies.evictions import LRU


def check_empty(cluster: Any) -> None:
    """No replica of a cluster that has ended holds a request, a row, a block or a lease."""
    for engine in cluster.engines:
        assert engine.is_idle and not engine.state.leases and engine.state.pool.num_used == 0
        assert sorted(engine.state.table._free_rows) == list(range(engine.state.table.num_rows))


def serve_apart(
    executors: list[Any],
    spec: ModelSpec,
    limits: Limits,
    kv: KVSize,
    connect: Callable[[Any, Any], Copier],
    seed: int,
    timeouts: bool = True,
    layerwise: bool = False,
) -> LiveCluster:
    """Serves on the first executor, then on the second. kv: the fewest blocks of a cache; it has up to three times as many. layerwise: by push."""
    draw, references = random.Random(seed), greedy_references(spec)
    lease = draw.choice([inf, inf, 0.002])
    push, layers, block_bytes = draw.random() < 0.5, 1, spec.kv_bytes_per_token * kv.block_size
    if layerwise:
        push, layers = True, spec.num_layers
    moves = Moves(block_bytes, PiecewiseLinear((1.0,), (0.0,)), push, layers, lease=lease, connect=connect)
    sizes = [KVSize(draw.randint(kv.num_blocks, 3 * kv.num_blocks), kv.block_size) for _ in executors]
    servers = [
        Server(executor, limits, UnitCost(), size, prefix_cache=LRU())
        for executor, size in zip(executors, sizes, strict=True)
    ]
    roles = Role.PREFILL, Role.DECODE
    server = ReplicatedServer(servers, RoundRobin(), cluster=LiveCluster, roles=roles, moves=moves)
    requests = []
    for id_ in range(24):
        asked = references[draw.randrange(len(references))].request(id_, draw.randint(1, LONGEST_OUTPUT))
        made = replace(spec_of(asked), arrival_time=0.001 * id_)
        if timeouts and draw.random() < 0.4:
            made = replace(made, timeout=draw.uniform(0.001, 0.05))
        requests.append(Request.from_spec(made))
    cluster: Any = server.engine([FuzzPolicy(seed), FuzzPolicy(seed + 1)], requests)
    cluster.run()
    by_prompt = {tuple(reference.prompt): reference.output for reference in references}
    for request in requests:
        whole = request.max_new_tokens if request.finish_reason is FinishReason.LENGTH else len(request.output)
        assert request.output == by_prompt[tuple(request.prompt or ())][:whole], request
    check_empty(cluster)
    return cluster  # type: ignore[no-any-return]
