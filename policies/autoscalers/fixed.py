"""A constant number of replicas: the baseline of rules that scale."""

from cbatch import ConfigError
from cbatch.cluster import ClusterView
from policies.autoscalers.pools import pools_of


class Fixed:
    def __init__(self, replicas: int | None = None) -> None:
        """replicas: of each pool; None: all that there are."""
        if replicas is not None and replicas < 1:
            raise ConfigError(f"autoscale: need {replicas=} of at least 1")
        self.replicas = replicas

    def wanted(self, view: ClusterView) -> dict[str, int]:
        return {pool: self.replicas or len(replicas) for pool, replicas in pools_of(view).items()}
