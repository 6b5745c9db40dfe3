"""A request that vLLM does not admit as planned, or preempts by itself, goes back to its policy's queue, and loses nothing there.

Every policy is told of its arrival and its end once (`on_wait` tells the rest), so that no policy counts it twice.
"""

import random
from collections import Counter, deque
from typing import Any

import pytest
from contended import LinearCost
from every_policy import EVERY_POLICY
from schedules import Wrapped
from test_vllm_fuzz import Clients, run
from vllm_rig import Rig

from cbatch import Limits, Plan, Policy, Request, View
from cbatch.stall import Patience
from cbatch.vllm import Adapter
from policies.chunking import Fixed
from policies.continuum import Continuum
from policies.dlpm import DLPM
from policies.pauses import Pauses, TimeToLive
from policies.predictors import Predictor
from policies.vtc import VTC

LIMITS = Limits(4, 64, 60)


class Refusing(Clients):
    """Half of the planned requests are not admitted, and now and then vLLM preempts all that run, if `resets`."""

    def __init__(self, numbers: random.Random, resets: bool) -> None:
        super().__init__(numbers, leave=0.1)
        self.resets = resets

    def act(self, rig: Any) -> None:
        super().act(rig)
        if self.resets and self.numbers.random() < 0.05:
            rig.scheduler.reset_prefix_cache(reset_running_requests=True)

    def extra(self) -> dict[str, Any]:
        return {"client": "ab"[self.num_sent % 2], "session": f"{self.num_sent % 3}"}


def serve(policy: Policy, seed: int, resets: bool = True) -> tuple[Clients, Counter[str], int]:
    """Returns the clients, the iterations of each request that was admitted, and how often vLLM granted less than planned."""
    numbers = random.Random(seed)
    clients = Refusing(numbers, resets)
    adapter = Adapter(policy, cost=LinearCost(), tile=8, patience=Patience(1.0))
    flags = {"asynchronous": numbers.random() < 0.6, "prefix_cache": resets}
    rig = Rig(adapter, LIMITS, 60 if resets else 200, 4, **flags)
    scheduler = rig.scheduler
    granted = scheduler._mamba_block_aligned_split

    def grant(request: Any, tokens: int, *computed: int) -> int:
        refused = request not in scheduler.running and numbers.random() < 0.5
        return 0 if refused else granted(request, tokens, *computed)

    scheduler._mamba_block_aligned_split = grant
    scheduled = run(rig, clients)
    return clients, Counter(id_ for *entries, _ in scheduled for id_, _ in entries), scheduler.counts.short


class Heard(Wrapped):
    """A policy whose calls are counted."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.arrived, self.ended = Counter[int](), Counter[int]()

    def on_arrival(self, request: Request) -> None:
        self.arrived[request.id] += 1
        getattr(self.policy, "on_arrival", lambda request: None)(request)

    def on_wait(self, request: Request) -> None:
        assert self.arrived[request.id] == 1 and not self.ended[request.id]
        getattr(self.policy, "on_wait", lambda request: None)(request)

    def on_finish(self, request: Request) -> None:
        self.ended[request.id] += 1
        getattr(self.policy, "on_finish", lambda request: None)(request)


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_every_request_arrives_and_ends_once(name: str, num_runs: int, draw: int) -> None:
    num_short = 0
    for seed in range(draw, draw + -(-num_runs // 4)):
        policy = Heard(EVERY_POLICY[name](8))
        *_, short = serve(policy, seed)
        assert set(policy.arrived.values()) | set(policy.ended.values()) <= {1}
        assert policy.ended.keys() <= policy.arrived.keys()
        num_short += short
    assert num_short


class Unaware:
    """A policy that was written without vLLM in mind: it has a queue of its own, and counts what it knows of."""

    def __init__(self) -> None:
        self.queue, self.open = deque[Request](), set[Request]()
        self.begun = dict[Request, int]()

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        for request in view.prefilling:
            plan.add(request)
        while self.queue and plan.add(self.queue[0], reserve=self.queue[0].max_tokens):
            request = self.queue.popleft()
            assert request not in self.begun
            self.begun[request] = view.iteration
        return plan.build()

    def on_arrival(self, request: Request) -> None:
        assert request not in self.open and request not in self.begun
        self.open.add(request)
        self.queue.append(request)

    def on_finish(self, request: Request) -> None:
        self.open.remove(request)
        self.begun.pop(request, None)
        if request in self.queue:
            self.queue.remove(request)


def test_a_policy_that_knows_nothing_of_it_serves_all(num_runs: int, draw: int) -> None:
    num_short = 0
    for seed in range(draw, draw + num_runs):
        policy = Unaware()
        *_, short = serve(policy, seed)
        assert not (policy.open or policy.queue or policy.begun)
        num_short += short
    assert num_short


def services(clients: Clients, admitted: Counter[str]) -> Counter[str | None]:
    """The prompt tokens, and twice the output tokens, of each client's admitted requests."""
    service = Counter[str | None]()
    for id_ in admitted:
        service["ab"[int(id_) % 2]] += clients.asked[id_].num_prompt_tokens + 2 * len(clients.outputs[id_])
    return service


def test_a_client_pays_once_for_what_was_admitted_and_nothing_for_the_rest(num_runs: int, draw: int) -> None:
    for seed in range(draw, draw + num_runs):
        policy = VTC(Predictor(), lift=False)
        clients, admitted, _ = serve(policy, seed)
        assert +Counter(policy.counters) == services(clients, admitted), f"seed {seed}"


@pytest.mark.parametrize("name", ["mlfq", "plas"])
def test_no_request_is_charged_for_more_iterations_than_it_was_in(name: str, num_runs: int, draw: int) -> None:
    for seed in range(draw, draw + num_runs):
        policy, charged = EVERY_POLICY[name](8), Counter[str]()
        charge = policy._repeats._charge  # type: ignore[attr-defined]

        def count(request: Request, seconds: float, samples: bool, charge: Any = charge, to: Any = charged) -> None:
            to[str(request.id)] += 1
            charge(request, seconds, samples)

        policy._repeats._charge = count  # type: ignore[attr-defined]
        clients, computed, _ = serve(policy, seed)
        assert charged and (charged - computed).keys() <= clients.aborted, f"seed {seed}"


class Seen(Continuum):
    """Notes which sessions are pinned before each plan."""

    def lapse(self, view: View) -> None:
        self.__dict__.setdefault("seen", []).append([*self.pinned])
        super().lapse(view)


def test_a_pin_outlives_the_plan_of_a_turn_that_is_not_admitted() -> None:
    """Two turns of one token. The second is planned twice: vLLM grants it nothing at first."""
    policy = Seen(Fixed(16), TimeToLive(Pauses(), seconds=50.0))
    rig = Rig(Adapter(policy, cost=LinearCost(), tile=8), LIMITS, 60, 4, prefix_cache=True)
    scheduler = rig.scheduler
    scheduler.add_request(rig.request(Request(0, 8, 1), session="s", tool="search"))
    rig.step()
    scheduler.add_request(rig.request(Request(1, 9, 2), session="s", tool="search"))
    granted, scheduler._mamba_block_aligned_split = scheduler._mamba_block_aligned_split, lambda *given: 0
    rig.step()
    scheduler._mamba_block_aligned_split = granted
    rig.step()
    rig.step()
    assert policy.seen == [[], ["s"], ["s"], []] and scheduler.counts.short == 1  # type: ignore[attr-defined]


def test_deficits_are_whole_quanta_less_what_was_admitted(num_runs: int, draw: int) -> None:
    """Nothing is preempted, nor found in a cache."""
    for seed in range(draw, draw + num_runs):
        policy = DLPM(Fixed(8), quantum=13, prompt_weight=1, output_weight=2)
        clients, admitted, _ = serve(policy, seed, resets=False)
        service = services(clients, admitted)
        assert all((policy.deficits[client] + service[client]) % 13 == 0 for client in policy.deficits), f"seed {seed}"
