"""Replicas of one model behind a router."""

from cbatch.cluster.live import LiveCluster
from cbatch.cluster.replicas import Cluster, Executors, ReplicatedServer, merge
from cbatch.cluster.routers import LeastLoaded, Replica, RoundRobin, Router, make_router

__all__ = ["Cluster", "Executors", "LeastLoaded", "LiveCluster", "Replica", "ReplicatedServer", "RoundRobin", "Router"]
__all__ += ["make_router", "merge"]
