"""Runs a router of one's own beside the built-in ones, over four simulated replicas: `python examples/own_router.py`."""

from cbatch import Request
from cbatch.cluster import ClusterView
from experiments.api import simulate


class FewestTokens:
    """Chooses the replica with the fewest outstanding tokens among those whose KV cache is not nearly full."""

    def __init__(self, free: float = 0.1) -> None:
        self.free = free  # share of the KV blocks

    def choose(self, request: Request, view: ClusterView) -> int:
        def load(index: int) -> tuple[bool, int]:
            replica = view[index]  # as its newest report says
            return replica.num_free < self.free * replica.num_blocks, replica.outstanding_tokens

        return min(view.fitting(request), key=load)


def main() -> None:
    """The same requests for each router; reports reach it 20 ms after they are posted."""
    for router in ("round_robin", "least_loaded", "lmetric", FewestTokens()):
        result = simulate(
            "sarathi_serve", "open_loop", rate=180, requests=400, batch=32, replicas=4, router=router, staleness=0.02
        )
        ttft = result.summary["ttft_seconds"]
        name = router if isinstance(router, str) else type(router).__name__
        print(f"sarathi_serve, {name:13} TTFT P50 {ttft['p50']:.3f} s, P99 {ttft['p99']:.3f} s")


if __name__ == "__main__":
    main()
