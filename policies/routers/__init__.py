"""Routers: which replica serves an arriving request. `ROUTERS` has the names that `backend.router=` takes."""

from collections.abc import Callable

from cbatch.cluster import LeastLoaded, RoundRobin, Router
from policies.routers.bounded_loads import BoundedLoads
from policies.routers.cache_aware import CacheAware
from policies.routers.dynamo import Dynamo
from policies.routers.llm_d import LlmD
from policies.routers.lmetric import LMetric
from policies.routers.power_of_two import PowerOfTwo
from policies.routers.preble import Preble
from policies.routers.production_stack import KVAware, LoadAware, PrefixAware
from policies.routers.random_choice import RandomChoice
from policies.routers.session_hash import SessionHash
from policies.routers.shortest_ttft import ShortestTTFT

ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "bounded_loads": BoundedLoads,
    "session_hash": SessionHash,
    "cache_aware": CacheAware,
    "prefix_aware": PrefixAware,
    "kv_aware": KVAware,
    "load_aware": LoadAware,
    "dynamo": Dynamo,
    "llm_d": LlmD,
    "preble": Preble,
    "lmetric": LMetric,
    "shortest_ttft": ShortestTTFT,
}

__all__ = ["ROUTERS", "BoundedLoads", "CacheAware", "Dynamo", "KVAware", "LMetric", "LeastLoaded", "LlmD", "LoadAware"]
__all__ += ["PowerOfTwo", "Preble", "PrefixAware", "RandomChoice", "RoundRobin", "SessionHash", "ShortestTTFT"]
