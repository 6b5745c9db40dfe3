"""`make sim-speed`: simulated iterations per second, on one core: 128 running requests, decodes with chunks of prompts among them.

With outputs of 300 to 900 tokens and with long ones; once as it is, and once asking the policy for each plan, without leaps
(`cbatch.leap`), in turn. Seconds are CPU time, as other work on the machine lengthens wall time.
"""

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from places import RESULTS

from cbatch import KVSize, Limits, Policy, Request, Server
from cbatch.sim import ProfileCost, SimExecutor, load_profile
from experiments.settings.presets import load_spec
from experiments.settings.this_machine import cpu_name
from experiments.store.provenance import spread, write_benchmark
from policies.chunking import TileAligned
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

BATCH, REPEATS = 128, 5
OUTPUTS = {"": (1000, 300, 900), ", long outputs": (800, 2000, 6000)}
"""Number of requests, and shortest and longest output."""

POLICIES: dict[str, Callable[[], Policy]] = {
    "orca": Orca,
    "prefill_first": PrefillFirst,
    "sarathi, chunk 1024": lambda: Sarathi(TileAligned(1024)),
    "sarathi_serve, chunk 1024": lambda: SarathiServe(TileAligned(1024)),
}


def main() -> None:
    """Measures, prints and writes sim.json."""
    figures = {}
    print(f"simulation on one core of {cpu_name()}: batch {BATCH}")
    for (name, make), (kind, outputs) in product(POLICIES.items(), OUTPUTS.items()):
        runs = [(_rate(Asked(make()), *outputs), _rate(make(), *outputs)) for _ in range(REPEATS)]
        asked, rates = (spread(values) for values in zip(*runs, strict=True))
        gain = spread([after / before for before, after in runs])
        figures[f"{name}{kind}"] = {"iterations_per_second": rates, "without_leaps": asked, "gain": gain}
        extremes = f"({rates['min']:.0f} to {rates['max']:.0f}), {gain['median']:.2f} times those without leaps"
        print(f"  {name + kind:42} {rates['median']:8.0f} iterations/s   {extremes}", flush=True)
    print(f"written: {write_benchmark('sim', cpu_name(), {'figures': figures}, RESULTS, 'make sim-speed')}")


class Asked:
    """Any policy, which does not say that it is steady: it is asked for each plan."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.plan = policy.plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def simulated(limits: Limits, num_blocks: int) -> Server[SimExecutor]:
    """Returns a server of Llama-3.1-8B on an H200 in the asynchronous loop, with blocks of 16 tokens."""
    profile = load_profile("h200")
    cost = ProfileCost(profile, load_spec("llama-3.1-8b"))
    return Server(SimExecutor(cost, profile.host_time(asynchronous=True)), limits, cost, KVSize(num_blocks, 16))


def _rate(policy: Policy, num_requests: int, least: int, most: int) -> float:
    """Returns the iterations per second of one run, without making the requests."""
    server = simulated(Limits(BATCH, 16384, 8192), 56_000)
    random = np.random.default_rng(0)
    lengths = zip(random.integers(100, 2000, num_requests), random.integers(least, most, num_requests), strict=True)
    requests = [Request(index, int(prompt), int(output)) for index, (prompt, output) in enumerate(lengths)]
    engine = server.engine(policy, requests)
    begin = time.process_time()
    record = engine.run()
    return len(record.steps) / (time.process_time() - begin)


if __name__ == "__main__":
    main()
