"""No request and no KV block of vLLM's real scheduler is lost, whatever a policy plans and whatever clients do.

    python -m pytest tests/vllm/test_vllm_fuzz.py --vllm=FOLDER --runs=1000

draws that many runs.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from contended import LinearCost
from every_policy import EVERY_POLICY
from fuzz_policy import FuzzPolicy
from schedules import Wrapped
from test_leaps import STEADY
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus
from vllm_rig import Rig
from vllm_sources import RefusedError

from cbatch import Limits, Plan, Policy, Request, View
from cbatch.plan_check import check_rules
from cbatch.stall import Patience
from cbatch.vllm import Adapter
from cbatch.vllm.support import names_of

STOP = 3
ODD = ("inf", "nan", "x", "1e5000", 0, -1, True, 1e308, 1e-320, 10**400, [1])
"""What a client may send for a number."""


class Checked(FuzzPolicy):
    """Its plans are checked by the public rules, too."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        check_rules(plan, view, "Checked")
        return plan


class Clients:
    """Random requests with shared prefixes, that stop by themselves or are aborted.

    leave: probability of an abort before an iteration. odd: of an odd value in place of each number. outputs: tokens by request.
    """

    def __init__(self, numbers: random.Random, leave: float = 0.03, odd: float = 0.0) -> None:
        self.numbers, self.leave, self.odd = numbers, leave, odd
        self.asked, self.outputs = dict[str, Request](), defaultdict[str, list[int]](list)
        self.num_left, self.num_sent = numbers.randint(3, 16), 0
        self.finished: dict[str, str] = {}
        self.aborted: set[str] = set()

    def turns(self, rig: Any) -> Iterator[None]:
        """The iterations until all requests have ended; the clients act before each."""
        for turn in range(3000):
            self.act(rig)
            if not (self.num_left or rig.in_flight or rig.scheduler.has_requests()):
                return
            rig.now = 1e-3 * turn
            yield

    def act(self, rig: Any) -> None:
        numbers, scheduler = self.numbers, rig.scheduler
        while self.num_left and numbers.random() < 0.4:
            prompt = [self.numbers.choice((11, 12))] * numbers.randint(1, 30) + [20 + self.num_sent] * numbers.randint(
                0, 8
            )
            most, sent_at = numbers.randint(1, 60 - len(prompt)), rig.now + 1e-6 * self.num_sent
            given = {"prompt": prompt, "arrival_time": sent_at, "priority": self.num_sent * 5 % 3}
            request = Request(self.num_sent, len(prompt), most, **given)
            with suppress(RefusedError):  # by vLLM itself
                scheduler.add_request(rig.request(request, STOP, **self.extra()))
                self.asked[str(request.id)] = request
            self.num_left, self.num_sent = self.num_left - 1, self.num_sent + 1
        if scheduler.requests and numbers.random() < self.leave:
            self.abort(numbers.choice(sorted(scheduler.requests)), rig)

    def extra(self) -> dict[str, Any]:
        names = ("predicted_new_tokens", "slo_ttft", "slo_tbt", "slo_total", "client", "session", "tier")
        return {name: self.numbers.choice(ODD) for name in names if self.numbers.random() < self.odd}

    def abort(self, id_: str, rig: Any) -> None:
        self.aborted.add(id_)
        rig.scheduler.finish_requests(id_, RequestStatus.FINISHED_ABORTED)

    def take(self, outputs: dict[int, Any]) -> None:
        for group in outputs.values():
            for output in group.outputs:
                assert output.request_id not in self.finished, "an output after the last one"
                self.outputs[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.finished[output.request_id] = str(output.finish_reason)


def run(rig: Any, clients: Clients) -> list[tuple[Any, ...]]:
    """Serves random clients to the end; returns the tokens of each iteration, by request, and who is preempted."""
    scheduled, schedule = [], rig.scheduler.schedule
    most, again, by_id = Counter[str](), Counter[str](), rig.scheduler._planner.population.by_id
    found, served = dict[str, int](), dict[str, Request]()

    def note() -> Any:
        output = schedule()
        scheduled.append((*output.num_scheduled_tokens.items(), output.preempted_req_ids))
        for id_, number in output.num_scheduled_tokens.items():
            end, served[id_] = rig.scheduler.requests[id_].num_computed_tokens, by_id[id_]
            found.setdefault(id_, end - number)
            again[id_] += max(min(end, most[id_]) - (end - number), 0)
            most[id_] = max(most[id_], end)
        return output

    rig.scheduler.schedule = note
    for _ in clients.turns(rig):
        clients.take(rig.step())
        check_population(rig)
    check_nothing_is_lost(rig, clients)
    for id_, request in served.items():
        assert (request.num_cached_tokens, request.num_recomputed_tokens) == (found[id_], again[id_])
    return scheduled


@pytest.mark.parametrize("mode", ["strict", "fallback", "shadow"])
def test_no_request_and_no_block_is_lost(mode: Any, num_runs: int, draw: int) -> None:
    short = 0
    for seed in range(draw, draw + num_runs):
        numbers = random.Random(seed)
        policy = Checked(seed, preempts=numbers.choice((0, 0.05, 0.2)), rejects=numbers.choice((0, 0.02)))
        limits = Limits(numbers.randint(2, 6), numbers.randint(8, 64), 60)
        flags = {"asynchronous": numbers.random() < 0.6, "prefix_cache": numbers.random() < 0.5}
        rig = Rig(Adapter(policy, mode), limits, numbers.randint(16, 40), 4, **flags)
        rig.sample = lambda id_: STOP if numbers.random() < 0.05 else 7  # noqa: B023 - of this run
        run(rig, Clients(numbers))
        short += rig.scheduler.counts.short
    assert mode == "shadow" or num_runs < 10 or short


class Operated(Clients):
    """Half of the requests wait for a grammar, and an operator pauses vLLM and resets its prefix cache."""

    def __init__(self, numbers: random.Random) -> None:
        super().__init__(numbers)
        self.grammars: list[SimpleNamespace] = []

    def act(self, rig: Any) -> None:
        numbers, scheduler, request_of = self.numbers, rig.scheduler, rig.request

        def with_grammar(*given: Any, **extra: Any) -> Any:
            made = request_of(*given, **extra)
            if numbers.random() < 0.5:
                made.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
                made.structured_output_request = SimpleNamespace(grammar=None)
                self.grammars.append(made.structured_output_request)
            return made

        rig.request = with_grammar
        super().act(rig)
        rig.request = request_of
        self.compile(0.3)
        pauses = self.num_left and numbers.random() < 0.15  # has_requests() is false in a pause
        scheduler.set_pause_state(numbers.choice([*PauseState]) if pauses else PauseState.UNPAUSED)
        if numbers.random() < 0.02:
            scheduler.reset_prefix_cache(reset_running_requests=True)

    def compile(self, share: float) -> None:
        for waited_for in self.grammars:
            if self.numbers.random() < share:
                waited_for.grammar = "compiled"


class Failing(Checked):
    """Grammars are ready while it plans, and it fails now and then."""

    def __init__(self, seed: int, clients: Operated, fails: float) -> None:
        super().__init__(seed, preempts=0.05)
        self._clients, self._fails = clients, fails

    def plan(self, view: View) -> Plan:
        self._clients.compile(0.2)
        self._fail()
        return super().plan(view)

    def on_arrival(self, request: Request) -> None:
        self._fail()

    def on_finish(self, request: Request) -> None:
        self._fail()

    def _fail(self) -> None:
        if self._random.random() < self._fails:
            raise ValueError("no idea")


@pytest.mark.parametrize(("mode", "fails"), [("strict", 0.0), ("fallback", 0.1), ("shadow", 0.1)])
def test_nothing_is_lost_in_pauses_with_grammars_and_with_policies_that_fail(
    mode: Any, fails: float, num_runs: int, draw: int
) -> None:
    for seed in range(draw, draw + num_runs):
        numbers = random.Random(seed)
        clients = Operated(numbers)
        limits = Limits(numbers.randint(2, 6), numbers.randint(8, 64), 60)
        flags = {"asynchronous": numbers.random() < 0.6, "prefix_cache": numbers.random() < 0.5}
        adapter = Adapter(Failing(seed, clients, fails), mode)
        run(Rig(adapter, limits, numbers.randint(16, 40), 4, **flags), clients)


class Interrupted(Wrapped):
    """A policy that does not plan some iterations. num_failed: their number."""

    def __init__(self, policy: Policy, clients: Operated) -> None:
        super().__init__(policy)
        self._clients, self.num_failed = clients, 0

    def plan(self, view: View) -> Plan:
        self._clients.compile(0.2)
        if self._clients.numbers.random() < 0.05:
            self.num_failed += 1
            raise ValueError("no plan")
        return self.policy.plan(view)


@pytest.mark.parametrize("mode", ["fallback", "shadow"])
@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_policy_goes_on_after_iterations_that_vllm_decides(name: str, mode: Any, num_runs: int, draw: int) -> None:
    """It then has requests that it did not admit, and waiting ones that it did."""
    for seed in range(draw, draw + -(-num_runs // 4)):
        numbers = random.Random(seed)
        clients = Operated(numbers)
        policy = Interrupted(EVERY_POLICY[name](8), clients)
        limits = Limits(
            numbers.randint(2, 6), 64, 60
        )  # in shadow mode vLLM serves prompts that are too long for a policy
        adapter = Adapter(policy, mode, cost=LinearCost(), tile=8, patience=Patience(1.0))
        flags = {"asynchronous": numbers.random() < 0.6, "prefix_cache": numbers.random() < 0.5}
        rig = Rig(adapter, limits, numbers.randint(16, 40), 4, **flags)
        run(rig, clients)
        assert rig.scheduler.counts.fallbacks == policy.num_failed, f"seed {seed}"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", EVERY_POLICY)
def test_no_client_ends_or_stops_a_policy(name: str, asynchronous: bool, num_cancellations: int, draw: int) -> None:
    """Clients leave at every moment, ask for more than an iteration holds, and send odd values; the others get their tokens."""
    num_left, seed = 0, draw
    while num_left < num_cancellations:
        numbers, seed = random.Random(seed), seed + 1
        policy, leave = EVERY_POLICY[name](8), numbers.choice((0.05, 0.3))
        limits = Limits(numbers.randint(2, 6), numbers.choice((32, 64)), 60)
        adapter = Adapter(policy, cost=LinearCost(), tile=8, patience=Patience(1.0))
        flags = {"asynchronous": asynchronous, "prefix_cache": numbers.random() < 0.5}
        rig = Rig(adapter, limits, numbers.randint(16, 40), 4, **flags)
        rig.sample = lambda id_: 100 + int(id_)
        run(rig, clients := Clients(numbers, leave, odd=0.2))
        for id_, reason in clients.finished.items():
            request, output = clients.asked[id_], clients.outputs[id_]
            whole = len(output) == request.max_new_tokens
            assert output == [100 + request.id] * len(output) and (whole or reason == "abort"), f"seed {seed - 1}"
            assert whole or id_ in clients.aborted or request.max_tokens > limits.max_tokens, f"seed {seed - 1}"
        num_left += len(clients.aborted)


class Counted(Wrapped):
    """A steady policy whose plans are counted. It is asked for every one if its class does not say that it is steady."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.num_asked = 0

    def plan(self, view: View) -> Plan:
        self.num_asked += 1
        return self.policy.plan(view)


class Steady(Counted):
    steady = True


@pytest.mark.parametrize("name", STEADY)
def test_a_steady_policy_is_asked_less_and_schedules_the_same(name: str, num_runs: int, draw: int) -> None:
    num_asked = {Counted: 0, Steady: 0}
    for seed in range(draw, draw + num_runs):
        schedules = []
        for kind in num_asked:
            numbers = random.Random(seed)
            policy = kind(STEADY[name](numbers.choice((8, 16))))
            flags = {"asynchronous": numbers.random() < 0.6, "prefix_cache": numbers.random() < 0.5}
            limits = Limits(numbers.randint(2, 6), 64, 60, tile=8)
            rig = Rig(Adapter(policy, cost=LinearCost()), limits, numbers.randint(24, 60), 4, **flags)
            rig.sample = lambda id_, numbers=numbers: STOP if numbers.random() < 0.03 else 7
            schedules.append((run(rig, Clients(numbers)), rig.scheduler.counts))
            num_asked[kind] += policy.num_asked
        assert schedules[0] == schedules[1], f"seed {seed}"
    assert num_asked[Steady] < num_asked[Counted]


def check_population(rig: Any) -> None:
    """What policies see is what vLLM's scheduler holds."""
    scheduler, population = rig.scheduler, rig.scheduler._planner.population
    assert set(population.by_id) == set(scheduler.requests)
    running = [request for request in population.by_id.values() if request.source in scheduler.running]
    left = {request for request in running if request.num_computed - request.num_drafts < request.ends_at}
    assert left == set(population.running)
    assert set(population.decoding) | set(population.prefilling) == set(population.running)
    assert all(not request.source.is_prefill_chunk for request in population.decoding)
    side = getattr(scheduler, names_of(scheduler).side)  # of vLLM 0.22.1: with what cannot be computed yet
    assert len(scheduler.waiting) + len(side) + len(scheduler.running) == len(scheduler.requests)


def check_nothing_is_lost(rig: Any, clients: Clients) -> None:
    scheduler = rig.scheduler
    assert not rig.in_flight
    assert not scheduler.requests and not scheduler.running and not scheduler.waiting
    population = scheduler._planner.population
    assert not (population.by_id or population.waiting or population.running)
    assert set(clients.finished) | clients.aborted == set(clients.asked)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == rig.num_blocks
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
