"""Replicas of a model behind a router."""

from cbatch.cluster.cluster import Cluster
from cbatch.cluster.live import LiveCluster
from cbatch.cluster.merging import Executors
from cbatch.cluster.routers import LeastLoaded, PoolRouters, Reject, RoundRobin, Route, Router
from cbatch.cluster.scaling import Autoscaler, Scaling
from cbatch.cluster.server import ReplicatedServer
from cbatch.cluster.transfers import Moves
from cbatch.cluster.views import ClusterView, Phase, ReplicaView, Role

__all__ = ["Autoscaler", "Cluster", "ClusterView", "Executors", "LeastLoaded", "LiveCluster", "Moves", "Phase"]
__all__ += ["PoolRouters", "Reject", "ReplicaView", "ReplicatedServer", "Role", "RoundRobin", "Route", "Router"]
__all__ += ["Scaling"]
