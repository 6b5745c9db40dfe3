"""Leaps over iterations that a steady policy need not be asked for change nothing, to the bit, and policies are asked less.

`--workloads=1000` draws as many workloads for each steady policy.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from every_policy import EVERY_POLICY
from inventory import take_inventory
from schedules import Logged, UnitCost, make_engine
from small_cluster import SPEC, profile
from test_sim_power import LIMIT

from cbatch import (
    SLO,
    BatchShape,
    Engine,
    Eviction,
    Limits,
    Plan,
    Policy,
    PolicyError,
    Request,
    RunRecord,
    Server,
    View,
    is_steady,
)
from cbatch.arrivals import Listed
from cbatch.cluster import Cluster, LeastLoaded
from cbatch.kv import KVSize, PrefixPool, blocks_for
from cbatch.model.topology import Topology
from cbatch.request import spec_of
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.measured import HostTime, Measured
from policies.chunking import Fixed, Slack
from policies.evictions import FIFO, LFU, LRU, SLRU, Belady, Marconi
from policies.mlfq import MLFQ
from policies.orca import Orca
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

WIDEST, LONGEST = 8, 120
STEADY = {name: make for name, make in EVERY_POLICY.items() if is_steady(make(8))}


class Choosy(Orca):
    """Rejects requests by their length, at most one per plan; such a plan admits no request."""

    steady = True

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        if refused := [each for each in view.waiting if each.max_tokens % 3 == 0]:
            plan.reject(refused[0], "no multiples of three")
            return plan.build()
        for request in view.waiting:
            if not plan.add(request, whole=True, reserve=request.max_tokens):
                break
        return plan.build()


STEADY["choosy"] = lambda chunk: Choosy()
AT_TIMES = {name: make for name, make in EVERY_POLICY.items() if vars(type(make(8))).get("steady") is False}
"""Policies that are steady while no request waits."""
CACHED = [
    *product(("orca", "prefill_first", "sarathi_serve"), (LRU, LFU, FIFO, SLRU, Marconi, Belady)),
    *product(("plas", "atlas", "continuum", "infercept", "infercept_paper", "aimd", "thunder", "justitia"), (LRU,)),
]
AT_TIMES["mlfq_short"] = lambda chunk: MLFQ(quantum=1e-3, promote_after=0.05)


def draw_requests(numbers: random.Random) -> Listed:
    """Many at once or spread in time, some by iteration; with hidden lengths, objectives, deadlines and clients that leave."""
    arrive = numbers.choice(("at once", "in time", "in bursts", "by iteration"))
    hidden, now, found = numbers.random() < 0.4, 0.0, []
    for index in range(numbers.randint(1, 12)):
        if arrive == "in time" or (arrive == "in bursts" and index % 4 == 0):
            now += numbers.expovariate(1 / numbers.choice((1e-3, 1e-2, 0.1)))
        prompt, output = numbers.randint(1, 60), numbers.choice((1, 2, 20, 60))
        output = numbers.randint(1, output)
        found.append(
            Request(
                index,
                prompt,
                output,
                arrival_time=now,
                true_new_tokens=numbers.randint(1, output) if hidden else None,
                slo=SLO(total=numbers.random() if numbers.random() < 0.5 else None),
                priority=numbers.randint(0, 2),
                timeout=numbers.choice((1e-5, 0.02, 0.1)) if numbers.random() < 0.2 else None,
            )
        )
    return Listed(found, {id_: 4 * id_ for id_ in range(len(found))} if arrive == "by iteration" else {})


def make_cost(numbers: random.Random) -> ProfileCost:
    """One GPU or a pipeline; the clock may follow the power, and the tables may end below the largest batch."""
    measured = Measured(
        linear=PiecewiseLinear((1.0, 64.0), (1e-4, 1e-3)),
        chunks=BilinearGrid.through([(1, 0, 1e-6), (1, 60, 2e-6), (64, 0, 1e-5), (64, 60, 3e-5)]),
        decodes=BilinearGrid.through([(1, 1, 1e-6), (1, 70, 7e-6), (4, 2, 2e-6), (4, 40, 9e-6)]),
        power=LIMIT if numbers.random() < 0.5 else None,
    )
    stages = numbers.choice((1, 1, 1, 2))
    return ProfileCost(profile(measured={1: measured}), SPEC, Topology(1, stages))


def serve(
    make: Callable[[int], Policy],
    seed: int,
    count: Callable[[], None],
    places: Callable[[int], int] = lambda batch: 0,
    eviction: Eviction | None = None,
) -> list[Any]:
    """Everything that a run tells. `count` is called for each plan. places: `max_running` for a batch. eviction: of a prefix cache."""
    numbers = random.Random(seed)
    arrivals, cost = draw_requests(numbers), make_cost(numbers)
    if eviction is not None:
        arrivals = Listed([sharing(request, numbers) for request in arrivals.known], arrivals.iterations)
    block_size, batch, stages = numbers.choice((1, 3, 16)), numbers.randint(1, WIDEST), cost.topology.pipeline_stages
    limits = Limits(batch, LONGEST + batch, LONGEST, tile=8, num_stages=stages, max_running=places(batch))
    longest = max(blocks_for(request.max_tokens, block_size) for request in arrivals.known)
    on_host = random.Random(seed).choice((0, 0, 5, 1000)) if eviction is not None else 0
    kv = KVSize(longest + numbers.choice((1, 4, 1000)), block_size, on_host)
    chunk = 8 * numbers.randint(1, 3)
    host, asynchronous = HostTime(1e-5, numbers.choice((0.0, 1e-6, 1e-3))), numbers.random() < 0.7
    replicas = 2 if not arrivals.iterations and numbers.random() < 0.2 else 1
    policies = [make(chunk) for _ in range(replicas)]
    for policy in policies:
        policy.plan = counted(policy.plan, count)  # type: ignore[method-assign]
    servers = [Server(SimExecutor(cost, host), limits, cost, kv, asynchronous, prefix_cache=eviction) for _ in policies]
    engines = [server.engine(policy) for server, policy in zip(servers, policies, strict=True)]
    engine: Engine | Cluster = engines[0] if replicas == 1 else Cluster(engines, LeastLoaded())
    engine.attach(arrivals)
    record = engine.run()
    orders = ((pool, (*pool._cached, *sorted(pool._cached, key=pool._created.item))) for pool in pools_of(engines))
    cached = [[pool._hashes[block] for block in order] for pool, order in orders]  # as released, and as they got hashes
    return [tell(record), cost.num_outside, [each.executor.accounts() for each in engines], cached]


def sharing(request: Request, numbers: random.Random) -> Request:
    """The same request, one of a session, whose prompt begins like others: an id of 48 tokens stands for the whole prompt up to its end."""
    path = numbers.choices((1, 2), k=-(-request.num_prompt_tokens // 48))
    ids = tuple(sum(2**place * step for place, step in enumerate(path[: end + 1])) for end in range(len(path)))
    session = {
        "session": str(request.id % 3),
        "turn": request.id // 3,
        "last": request.id > 8,
        "extra": {"tool": "any"},
    }
    return Request.from_spec(replace(spec_of(request), prefix_hashes=ids, hash_block=48, **session))


def pools_of(engines: Sequence[Engine]) -> list[PrefixPool]:
    return [engine.state.pool for engine in engines if isinstance(engine.state.pool, PrefixPool)]


def counted(plan: Callable[[View], Plan], count: Callable[[], None]) -> Callable[[View], Plan]:
    def plan_and_count(view: View) -> Plan:
        count()
        return plan(view)

    return plan_and_count


def tell(record: RunRecord) -> list[object]:
    """The steps, who received tokens when, and the requests in the order of their ends."""
    names = [name for name in Request.__slots__ if name not in ("__weakref__", "_spec")]
    requests = [[request.id, *(getattr(request, name) for name in names)] for request in record.requests]
    return [record.steps, record.blocks, *(column.tolist() for column in record.tokens()), requests]


def compare(name: str, num_workloads: int, eviction: type[Eviction] | None = None) -> Counter[bool]:
    """Serves workloads with leaps and without, to the same end; returns how many plans each way asked for."""
    make, asked = {**STEADY, **AT_TIMES}[name], Counter[bool]()

    def run(seed: int, leaping: bool) -> list[Any]:
        policy = make if leaping else lambda chunk: Logged(make(chunk))
        return serve(policy, seed, lambda: asked.update([leaping]), eviction=eviction and eviction())

    for seed in range(num_workloads):
        assert run(seed, True) == run(seed, False), f"workload {seed}"
    return asked


@pytest.mark.long
@pytest.mark.parametrize(("name", "eviction"), CACHED)
def test_leaps_change_nothing_with_a_prefix_cache(name: str, eviction: type[Eviction], num_workloads: int) -> None:
    asked = compare(name, num_workloads, eviction)
    assert (asked[True] < asked[False]) == (not eviction.dynamic)


@pytest.mark.parametrize("name", [*STEADY, *AT_TIMES])
def test_leaps_change_nothing(name: str, num_workloads: int) -> None:
    asked = compare(name, num_workloads)
    assert (asked[True] < asked[False]) == (name != "vtc_predict")  # whose sums depend on the order of their terms


def test_which_policies_are_steady() -> None:
    told = "hrrn trail srpt lars ltr mlfq mc_sf mc_benchmark past_future past_future_aggressive qoserve qoserve_slack slai joint "
    told += "vtc vtc_mdrr vtc_predict lpm dfs_weight spf_uncached hrrn_uncached dlpm tgi plas atlas session_affinity"
    assert STEADY.keys() - {"choosy"} == EVERY_POLICY.keys() - set(told.split())
    assert not is_steady(Sarathi(Slack()))


def test_a_plan_is_asked_for_where_a_decode_follows_a_prompt_and_for_the_last_token() -> None:
    """One prompt and ten tokens, the clock at full seconds: iterations 2 to 8 repeat iteration 1."""
    seen: list[int] = []
    policy = Orca()
    policy.plan = counted(lambda view: seen.append(view.iteration) or Orca.plan(policy, view), lambda: None)  # type: ignore[func-returns-value, method-assign]
    engine = make_engine(policy, Limits(2, 10, 100))
    engine.submit([Request(0, 3, 10)])
    turns: list[int] = []
    record = engine.run(lambda engine: turns.append(engine.state.iteration))
    assert seen == [0, 1, 9]
    assert turns == [1, 2, 9, 10]
    told = [(step.iteration, step.ended, step.kv_blocks_used) for step in record.steps]
    assert told == [(number, number + 1.0, 4) for number in range(10)], "4 blocks are reserved for 13 tokens"


class Newest(Orca):
    """The newest comes first."""

    steady = True

    def __init__(self) -> None:
        self.seen: list[int] = []

    def plan(self, view: View) -> Plan:
        self.seen.append(view.iteration)
        plan = view.plan()
        for request in reversed([*view.running, *view.waiting]):
            plan.add(request, reserve=request.max_tokens)
        return plan.build()


def test_decodes_in_another_order_than_that_of_admission_repeat_as_well() -> None:
    engine = make_engine(policy := Newest(), Limits(2, 10, 100))
    engine.submit([Request(id_, 3, 10) for id_ in range(2)])
    engine.run()
    assert policy.seen == [0, 1, 9]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_policy_hears_of_each_iteration(asynchronous: bool) -> None:
    """Tokens are reported as they come, records after a leap, for which no plan is made. The asynchronous loop plans once more."""
    for method, num_plans in (("on_tokens", 10 + asynchronous), ("on_step", 3)):
        heard: list[object] = []
        seen: list[int] = []
        policy = Orca()
        setattr(policy, method, heard.append)
        policy.plan = counted(policy.plan, lambda: seen.append(0))  # type: ignore[method-assign] # noqa: B023
        engine = make_engine(policy, Limits(2, 10, 100), asynchronous=asynchronous)
        engine.submit([Request(0, 3, 10)])
        record = engine.run()
        assert len(heard) == 10 and len(seen) == num_plans
        assert method == "on_tokens" or heard == record.steps


def test_only_the_own_class_says_that_it_is_steady() -> None:
    class Heir(Orca):
        """Inherits a plan."""

    class Says(Orca):
        steady = "often"

    assert is_steady(Orca()) and not is_steady(Heir()) and not is_steady(Logged(Orca()))
    with pytest.raises(PolicyError, match="Says: steady is a str; make it True or False, or rename it"):
        make_engine(Says(), Limits(2, 10, 100))


def test_accounts_add_up_after_an_error_in_a_leap() -> None:
    """The device fails at its sixth iteration, the fourth of a leap in which another is in flight."""

    class Failing(UnitCost):
        def predict(self, shape: BatchShape) -> float:
            if shape.decode_context == 8:
                raise OSError("lost")
            return super().predict(shape)

    server, requests = (
        Server(SimExecutor(Failing()), Limits(2, 10, 100), UnitCost(), KVSize(50, 2)),
        [Request(0, 3, 20)],
    )
    engine = server.engine(SarathiServe(Fixed(4)), requests)
    with pytest.raises(OSError, match="lost"):
        engine.run()
    inventory = take_inventory([engine], requests)
    assert (inventory.iterations, inventory.in_flight) == (4, 1)
    assert (inventory.held, requests[0].num_computed) == (4, 7)  # iterations 0 to 4 computed 3 + 4 tokens
