"""What `experiments.check router=` tests: the replica that a router chooses for each request."""

from functools import partial

from cbatch import KVSize, Server
from cbatch.cluster import Moves, ReplicatedServer, Router
from cbatch.sim import SimExecutor
from cbatch.sim.roofline import Affine
from experiments.check.plugins import BLOCK, LIMITS, Event, History, Plain, Subject, Workload
from experiments.check.scenario import EVEN_COST
from policies.evictions import LRU

RULES = {
    "legal": "choose() returns the index of a replica that can serve the request, and nothing raises",
    "deterministic": "the same workload is routed the same each time",
    "blind": "no choice depends on requests that arrive later, or on the hidden length of the arriving one",
}


def subject_of(router: Router) -> Subject:
    """Returns the router as the subject of a check."""
    needed = frozenset({"legal", "blind"})
    return Subject(type(router).__name__, partial(_serve, router), RULES, needed, hides_length=True)


def _serve(router: Router, workload: Workload) -> History:
    """Serves a workload on three replicas, behind a copy of the router. The first replica is too small for the longest requests.

    If the router is a placement, requests move, and the replica that computes the prompt is what is compared: whether a request moves on
    depends on its hidden length.
    """
    sizes = (workload.num_blocks // 2, workload.num_blocks, workload.num_blocks)
    caches = [KVSize(size, BLOCK) for size in sizes]
    servers = [Server(SimExecutor(EVEN_COST), LIMITS, EVEN_COST, kv, prefix_cache=LRU()) for kv in caches]
    moves = Moves(1, Affine(0.0, 0.001)) if getattr(router, "moves", False) else None
    cluster = ReplicatedServer(servers, router, moves=moves).engine(Plain(), workload.made())
    senders = {sent.request: sent.sender for sent in cluster.run().transfers}
    pairs = {**cluster.replica_of, **senders}.items()  # in the order of arrival
    events = [Event(workload.requests[id_].arrival_time, f"sends request {id_} to replica {to}") for id_, to in pairs]
    return History(events, {})
