"""`make speed`: CPU time of the engine's host, of plans by policy, and of simulated iterations, on one core.

Of an iteration, engine, policy, KV accounting and packing are real; the executor packs each step into its slot and returns a
fixed token at once. For comparison, on the same kind of machine: nano-vllm 0.15 ms at 32 running requests and 0.87 ms at 256,
transformers' asynchronous continuous batching 1.9 and 6.6 ms.

Plans are timed in simulated runs on an H200, so that policies can predict times: 256 running requests, and 10,000 or 100,000
that wait. Requests of several clients, priorities and objectives end and are admitted all the time, about one per iteration.
Only `Policy.plan` is timed, with the calls of the builder and the view that it makes.

Simulations have 128 running requests, decodes with chunks of prompts among them, with outputs of 300 to 900 tokens and with long
ones; once as they are, and once asking the policy for each plan, without leaps (`cbatch.leap`), in turn.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from places import RESULTS
from schedules import Wrapped

from cbatch import SLO, Executor, KVSize, Limits, Plan, Policy, Request, RequestSpec, Server, Step, StepResult, View
from cbatch.cost import NO_COST
from cbatch.runtime.batch import Shape, host_views, pack
from cbatch.sim import ProfileCost, SimExecutor, load_profile
from experiments.settings.compose import compose_run, policy_names
from experiments.settings.hardware import cpu_name
from experiments.setup.presets import load_spec
from experiments.store.provenance import spread, write_benchmark
from policies.chunking import TileAligned
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

PROMPT, LONGEST, BLOCK = 64, 4096, 16
CASES = ((32, 0), (128, 0), (256, 0), (256, 100_000))
"""Running and waiting requests."""
WARM_UP, REPEATS, ITERATIONS = 50, 7, 200

RUNNING, WAITING = 256, (10_000, 100_000)
PLANS = 100
"""Plans before the first one that counts, and in each of three measurements."""
OBJECTIVES = SLO(ttft=6.0, tbt=0.05), SLO(ttft=20.0, tbt=0.2), SLO(total=600.0)
KEYS = ("chunk=1024", f"batch={RUNNING}", "predictor=noisy")
OWN_KEYS = {"qoserve": ("chunking=slack",)}


BATCH, RUNS = 128, 5
OUTPUTS = {"": (1000, 300, 900), ", long outputs": (800, 2000, 6000)}
"""Number of requests, and shortest and longest output."""

POLICIES: dict[str, Callable[[], Policy]] = {
    "orca": Orca,
    "prefill_first": PrefillFirst,
    "sarathi, chunk 1024": lambda: Sarathi(TileAligned(1024)),
    "sarathi_serve, chunk 1024": lambda: SarathiServe(TileAligned(1024)),
}


def time_host() -> None:
    """Measures, prints and writes host.json."""
    print(f"host time of one decode iteration on {cpu_name()}")
    figures, plans = {}, {}
    for running, waiting in CASES:
        case = f"running {running}, waiting {waiting}"
        values = figures[case] = spread([_milliseconds(running, waiting) for _ in range(REPEATS)])
        print(f"  {case:28} {values['median']:.3f} ms   ({values['min']:.3f} to {values['max']:.3f})")
    # both in one loop, so that the machine's speed cancels out
    ratio = spread([_milliseconds(256, 100_000) / _milliseconds(256, 0) for _ in range(REPEATS)])
    print(f"  100,000 waiting over none      {ratio['median']:.3f}")
    print(f"\n{'CPU time of a plan, median ms':32} " + "".join(f"{number:>10,} waiting" for number in WAITING))
    specs = _specs(max(WAITING) + 2 * RUNNING)
    for name in policy_names():
        times = {f"waiting {number}": _times_of(name, specs[: number + 2 * RUNNING]) for number in WAITING}
        plans[name] = times
        print(f"  {name:30} " + "".join(f"{spread['median']:18.3f}" for spread in times.values()), flush=True)
    content = {"unit": "ms per iteration", "figures": figures, "queue_ratio": ratio, "plans": plans}
    print(f"written: {write_benchmark('host', cpu_name(), content, RESULTS, 'make speed')}")


class PackOnly(Executor):
    """Packs each step as a real executor does, then returns token 1 for every request."""

    num_stages = 1
    needs_tokens = True

    def __init__(self, num_rows: int) -> None:
        self.buffer = np.zeros(Shape(LONGEST, num_rows, LONGEST // BLOCK).size, np.int32)
        self.tokens = np.ones(num_rows, np.int32)

    def launch(self, step: Step) -> Step:
        shape = Shape(step.pad_to, len(step.rows), LONGEST // BLOCK)
        pack(step, shape, host_views(self.buffer, shape))
        return step

    def wait(self, in_flight: Step) -> StepResult:
        return StepResult(self.tokens[: len(in_flight.rows)], 0.0, 0.0)

    def now(self) -> float:
        return time.perf_counter()


def _milliseconds(running: int, waiting: int) -> float:
    """Returns mean milliseconds per iteration with all `running` requests decoding and `waiting` more in the queue."""
    limits = Limits(running, LONGEST, LONGEST, graph_sizes=())
    server = Server(PackOnly(running), limits, NO_COST, KVSize(running * LONGEST // BLOCK, BLOCK))
    prompt = [1] * PROMPT
    requests = (Request(index, PROMPT, 2000, prompt=prompt) for index in range(running + waiting))
    engine = server.engine(SarathiServe(TileAligned(1024)), requests)
    while len(engine.view.decoding) < running:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    begin = time.perf_counter()
    for _ in range(ITERATIONS):
        engine.step()
    return (time.perf_counter() - begin) / ITERATIONS * 1e3


class Timed(Wrapped):
    """Any policy, with the CPU time of each plan, in milliseconds."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.times: list[float] = []
        self.plan = self._timed

    def _timed(self, view: View) -> Plan:
        begin = time.thread_time_ns()
        plan = self.policy.plan(view)
        self.times.append((time.thread_time_ns() - begin) / 1e6)
        return plan


def _times_of(name: str, specs: Sequence[RequestSpec]) -> dict[str, float]:
    """Returns the median of a plan, the least of three measurements in one run, and the mean and largest of all plans."""
    policy = Timed(compose_run(f"policy={name}", *KEYS, *OWN_KEYS.get(name, ())).policy())
    server = simulated(Limits(RUNNING, 8192, 1024), RUNNING * 64)
    engine = server.engine(policy, map(Request.from_spec, specs))
    while len(engine.view.running) < RUNNING * 0.8 or len(policy.times) < PLANS:
        engine.step()
    policy.times.clear()
    while len(policy.times) < 3 * PLANS:
        engine.step()
    medians = [statistics.median(policy.times[begin : begin + PLANS]) for begin in range(0, 3 * PLANS, PLANS)]
    return {"median": min(medians), "mean": statistics.mean(policy.times), "max": max(policy.times)}


def _specs(count: int) -> list[RequestSpec]:
    random = np.random.default_rng(0)
    columns = (random.integers(*bounds, count).tolist() for bounds in ((50, 500), (100, 400), (0, 27), (0, 3)))
    return [
        RequestSpec(
            id_,
            prompt,
            output,
            arrival_time=id_ * 1e-5,
            client=f"client {client}",
            priority=client % 4,
            slo=OBJECTIVES[kind],
        )
        for id_, (prompt, output, client, kind) in enumerate(zip(*columns, strict=True))
    ]


def time_simulation() -> None:
    """Measures, prints and writes sim.json."""
    figures = {}
    print(f"simulation on one core of {cpu_name()}: batch {BATCH}")
    for (name, make), (kind, outputs) in product(POLICIES.items(), OUTPUTS.items()):
        runs = [(_rate(Wrapped(make()), *outputs), _rate(make(), *outputs)) for _ in range(RUNS)]
        asked, rates = (spread(values) for values in zip(*runs, strict=True))
        gain = spread([after / before for before, after in runs])
        figures[f"{name}{kind}"] = {"iterations_per_second": rates, "without_leaps": asked, "gain": gain}
        extremes = f"({rates['min']:.0f} to {rates['max']:.0f}), {gain['median']:.2f} times those without leaps"
        print(f"  {name + kind:42} {rates['median']:8.0f} iterations/s   {extremes}", flush=True)
    print(f"written: {write_benchmark('sim', cpu_name(), {'figures': figures}, RESULTS, 'make speed')}")


def simulated(limits: Limits, num_blocks: int) -> Server:
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
    time_host()
    time_simulation()
