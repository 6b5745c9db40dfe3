"""Replicas of one model behind a router."""

from cbatch.cluster.live import LiveCluster
from cbatch.cluster.replicas import Cluster, Executors, ReplicatedServer, merge
from cbatch.cluster.routers import LeastLoaded, LMetric, Replica, RoundRobin, Router, make_router

__all__ = ["Cluster", "Executors", "LMetric", "LeastLoaded", "LiveCluster", "Replica", "ReplicatedServer"]
__all__ += ["RoundRobin", "Router", "make_router", "merge"]
