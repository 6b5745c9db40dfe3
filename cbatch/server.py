"""A server: an executor with limits, cost model and KV cache, built once to serve one set of requests after another.

The policy is chosen per call, so that several can be compared on one executor.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cbatch.arrivals import Arrivals, listed
from cbatch.cost import CostModel
from cbatch.engine import Engine
from cbatch.kv import Eviction, KVSize
from cbatch.limits import Limits
from cbatch.policy import Policy, copy_policy
from cbatch.record import RunRecord
from cbatch.request import Request
from cbatch.stall import PATIENCE, Patience


@dataclass(frozen=True, eq=False)
class Server:
    """Serves requests on one executor.

    executor: an `Executor`; its clock is set back to 0 for each engine; `close` closes it.
    limits, kv: those that the executor was built for. `dataclasses.replace` narrows them for some of the requests.
    cost: predicts iterations for policies.
    asynchronous: the default of calls that leave the loop open; see `Engine`.
    patience: how long a policy may make no progress.
    prefix_cache: see `Engine`; each engine has a copy of it.
    """

    executor: Any
    limits: Limits
    cost: CostModel
    kv: KVSize
    asynchronous: bool = True
    patience: Patience = PATIENCE
    prefix_cache: Eviction | None = None

    def engine(
        self, policy: Policy, requests: Arrivals | Iterable[Request] = (), *, asynchronous: bool | None = None
    ) -> Engine:
        """Returns an engine with these requests submitted, for callers that step it or look into its state.

        Raises:
            ConfigError: the policy does not fit the limits.
            WorkloadError: a request exceeds the model's positions or the KV cache.
        """
        self.executor.restart()
        engine = Engine(
            policy,
            self.executor,
            self.limits,
            self.cost,
            num_blocks=self.kv.num_blocks,
            block_size=self.kv.block_size,
            num_host_blocks=self.kv.num_host_blocks,
            asynchronous=self.asynchronous if asynchronous is None else asynchronous,
            patience=self.patience,
            prefix_cache=copy_policy(self.prefix_cache, "eviction"),
        )
        engine.attach(listed(requests))
        return engine

    def serve(
        self,
        policy: Policy,
        requests: Arrivals | Iterable[Request],
        *,
        asynchronous: bool | None = None,
        on_step: Callable[[Engine], None] = lambda engine: None,
    ) -> RunRecord:
        """Serves the requests to their end. `on_step` is called as by `Engine.run`."""
        return self.engine(policy, requests, asynchronous=asynchronous).run(on_step)

    def close(self) -> None:
        """Closes the executor; its threads and memory are released."""
        self.executor.close()
