"""Replicas of a model behind a router."""

from cbatch.cluster.cluster import Cluster, Executors
from cbatch.cluster.live import LiveCluster
from cbatch.cluster.routers import LeastLoaded, LMetric, RoundRobin, Router, make_router
from cbatch.cluster.server import ReplicatedServer
from cbatch.cluster.views import ClusterView, ReplicaView

__all__ = ["Cluster", "ClusterView", "Executors", "LMetric", "LeastLoaded", "LiveCluster", "ReplicaView"]
__all__ += ["ReplicatedServer", "RoundRobin", "Router", "make_router"]
