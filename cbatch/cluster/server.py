"""Servers behind a router, with the interface of one `Server`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cbatch.arrivals import Arrivals, listed
from cbatch.cluster.cluster import Cluster
from cbatch.cluster.routers import Router
from cbatch.cluster.scaling import Scaling
from cbatch.cluster.transfers import Moves
from cbatch.cluster.views import Role
from cbatch.policy import Policy, copy_policy
from cbatch.request import Request
from cbatch.server import Server


@dataclass(frozen=True, eq=False)
class ReplicatedServer:
    """Serves like a `Server`, on one server per replica behind a router. Each replica has a copy of the policy.

    router: copied for each run, as the autoscaler of `scaling`. cluster: `LiveCluster` where time is real. The others: see `Cluster`.
    """

    servers: Sequence[Server]
    router: Router
    pools: Sequence[str] = ()
    staleness: float = 0.0
    cluster: Callable[..., Cluster] = Cluster
    scaling: Scaling | None = None
    prices: Sequence[float | None] = ()
    roles: Sequence[Role] = ()
    moves: Moves | None = None

    def engine(
        self,
        policy: Policy | Sequence[Policy],
        requests: Arrivals | Iterable[Request] = (),
        *,
        asynchronous: bool | None = None,
    ) -> Cluster:
        """As `Server.engine`. policy: of all replicas, or one for each; an object that occurs again is copied."""
        policies = list(policy) if isinstance(policy, Sequence) else [policy] * len(self.servers)
        earlier = [{*map(id, policies[:place])} for place in range(len(policies))]
        policies = [copy_policy(each) if id(each) in ids else each for each, ids in zip(policies, earlier, strict=True)]
        pairs = zip(self.servers, policies, strict=True)
        engines = [server.engine(policy, asynchronous=asynchronous) for server, policy in pairs]
        scaling, router = self.scaling, copy_policy(self.router, "router")
        if scaling is not None:
            scaling = replace(scaling, autoscaler=copy_policy(scaling.autoscaler, "autoscaler"))
        options = self.staleness, scaling, self.prices, self.roles, self.moves
        cluster = self.cluster(engines, router, self.pools, *options)
        cluster.attach(listed(requests))
        return cluster

    def close(self) -> None:
        for server in self.servers:
            server.close()
