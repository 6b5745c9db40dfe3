"""A recorded run can be replayed: a policy sees again all that it saw, and any policy may say what it would have planned."""

from contextlib import closing
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from contended import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, requests, simulated
from tiny_models import LLAMA, greedy_references, make_executor

from cbatch import Engine, Eviction, Executor, FinishReason, Limits, Plan, Policy, Request, RequestSpec, View
from cbatch.arrivals import Listed
from cbatch.errors import ReplayError
from cbatch.model.topology import Topology
from cbatch.policy import HOOKS
from cbatch.replay.decisions import Decided, Decision, Recorded, Seen, StepEnd, record_decisions
from cbatch.replay.replay import ReplayComparison, replay
from cbatch.request import spec_of
from cbatch.sim import ProfileCost, SimExecutor, load_profile
from experiments.setup.presets import load_spec
from experiments.store.decisions_file import read_decisions, write_decisions
from policies.chunking import Fixed
from policies.evictions import LRU, Belady
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.sarathi_serve import SarathiServe

H200 = load_profile("h200")


def make(policy: Policy, executor: Executor, limits: Limits = LIMITS, **more: Any) -> Engine:
    size = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK}
    return Engine(policy, executor, limits, LinearCost(), **size, **more)


def record(engine: Engine, chosen: list[Request]) -> Recorded:
    events: list[Decision | StepEnd] = []
    policy = engine.policy
    engine.submit(chosen)
    with record_decisions(engine, events.append):
        engine.run()
    assert engine.policy is policy
    return Recorded.of(engine, events)


def ask(
    policy: Policy, recorded: Recorded, chosen: list[Request], eviction: Eviction | None = None
) -> list[ReplayComparison]:
    heard: list[ReplayComparison] = []
    replay(recorded, chosen, policy, LinearCost(), heard.append, eviction)
    return heard


def num_plans(recorded: Recorded) -> int:
    return sum(isinstance(event, Decision) for event in recorded.events)


def alike(timeout: float | None = None) -> list[Request]:
    """Prompts of three kinds that begin alike; some requests end before their limit. timeout: of every fifth request."""
    changed = []
    for spec in map(spec_of, requests()):
        length, prompt = max(spec.max_new_tokens - spec.id % 3, 1), [spec.id % 3] * spec.num_prompt_tokens
        leaves = timeout if spec.id % 5 == 4 else None
        changed.append(replace(spec, true_new_tokens=length, prompt=prompt, timeout=leaves))
    return [Request.from_spec(spec) for spec in changed]


OF_REQUEST = attrgetter(
    *("id", "status", "num_known", "num_tokens", "num_computed", "first_token_at", "last_token_at", "admitted_at"),
    *("finished_at", "finish_reason", "num_output_tokens", "num_preemptions", "num_recomputed_tokens", "arrival_time"),
    *("num_cached_tokens", "num_cached_again"),
)
OF_VIEW = attrgetter(
    *("now", "iteration", "num_in_flight", "num_places", "predicted_end", "kv.num_free", "kv.num_retiring"),
    "kv.num_cached",
)


@pytest.mark.parametrize("field", Decided._fields)
def test_plans_that_differ_in_anything_but_their_note_are_not_the_same(field: str) -> None:
    others = Decided(((0, 2),), (4,), ((5, "why"),), ((0, 8),), 16, 3.0, "note", (("s", True),))
    plan = Decided(((0, 1),))
    recorded = Decision(7, Seen(0.0, 0, 4, (), (), (), (), 9, 0), plan)
    compared = ReplayComparison(recorded, plan._replace(**{field: getattr(others, field)}), "")
    assert (compared.same, compared.same_but_reserves) == (field == "note", field == "reserve")


class Attentive:
    """Keeps all that it is shown and told, and decides as another policy."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.heard: list[Any] = []

    def plan(self, view: View) -> Plan:
        self.heard.append((*OF_VIEW(view), [*(view.kv.changed_hashes() or ())]))
        self.heard += ([request.id for request in part] for part in (view.decoding, view.prefilling))
        for request in (*view.waiting, *view.running):
            self.heard.append((*OF_REQUEST(request), request.num_ready))
            blocks = view.kv.num_held(request), view.kv.freed_by_preempting(request)
            cached = view.kv.num_shared(request), [*view.kv.block_hashes(request)]
            self.heard.append((*blocks, *cached, view.is_in_flight(request), view.is_waiting(request)))
        plan: Plan = self.policy.plan(view)
        return plan

    def __getattr__(self, name: str) -> Any:
        if name not in HOOKS:
            return getattr(self.policy, name)
        inner = getattr(self.policy, name, lambda _: None)

        def hook(told: Any) -> None:
            requests = [told] if isinstance(told, Request) else told
            self.heard.append(told if name == "on_step" else [OF_REQUEST(request) for request in requests])
            inner(told)

        return hook


MODES = [(1, False, None), (3, True, None), (1, False, Belady), (3, True, LRU)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "mode"), [*product(POLICIES, MODES)][::3])
def test_a_policy_sees_and_plans_the_same_again(name: str, mode: tuple[int, bool, type[Eviction] | None]) -> None:
    """Also where requests end unexpectedly, or are cancelled with nothing in flight, and where prompts begin alike.

    All that a policy can see is compared, whatever it reads: a mode needs no more than a third of the policies.
    """
    num_stages, asynchronous, eviction = mode

    def asked() -> list[Request]:
        return alike(timeout=0.4 if num_stages == 1 else None)

    cost = ProfileCost(H200, load_spec("yi-34b"), Topology(pipeline_stages=num_stages))
    first, again = Attentive(POLICIES[name]()), Attentive(POLICIES[name]())
    limits, options = replace(LIMITS, num_stages=num_stages), {"asynchronous": asynchronous}
    cache = eviction and eviction()
    recorded = record(make(first, SimExecutor(cost, 1e-4), limits, **options, prefix_cache=cache), asked())
    heard = ask(again, recorded, asked(), eviction and eviction())
    assert len(heard) == num_plans(recorded) > 30
    assert all(comparison.same for comparison in heard)
    assert again.heard == first.heard
    found = sum(tokens for comparison in heard for _, tokens in comparison.recorded.cached)
    assert (found > 0) == (eviction is not None)


@pytest.mark.parametrize(("waiting", "running", "order"), [(0.005, 0.006, [0, 1, 2]), (0.006, 0.005, [1, 0, 2])])
@pytest.mark.parametrize("eviction", [None, LRU])
def test_clients_that_leave_during_one_iteration_leave_in_the_same_order_again(
    waiting: float, running: float, order: list[int], eviction: type[Eviction] | None
) -> None:
    """The clients of request 0, which waits, and of request 1 leave during the second iteration, from 4.1 to 6.4 ms."""

    class WithoutTheFirst(Orca):
        def __init__(self) -> None:
            self.ended: list[int] = []

        def plan(self, view: View) -> Plan:
            plan = view.plan()
            for request in (*view.running, *view.waiting):
                if request.id:
                    plan.add(request)
            return plan.build()

        def on_finish(self, request: Request) -> None:
            self.ended.append(request.id)

    def asked() -> list[Request]:
        leaving = zip(range(3), (waiting, running, None), strict=True)
        return [
            Request.from_spec(RequestSpec(id_, 10, 9, timeout=timeout, prompt=[id_] * 10)) for id_, timeout in leaving
        ]

    first, again = WithoutTheFirst(), WithoutTheFirst()
    options = {"asynchronous": False, "prefix_cache": eviction and eviction()}
    ask(again, record(make(first, simulated(), **options), asked()), asked(), eviction and eviction())
    assert first.ended == again.ended == order


@pytest.mark.long
@pytest.mark.parametrize("eviction", [None, LRU])
def test_a_run_of_real_tokens_is_replayed_without_a_model(eviction: type[Eviction] | None, tmp_path: Path) -> None:
    """End-of-sequence tokens shorten requests by surprise. Without a prefix cache, where they came is all that is kept of tokens."""

    references = [*enumerate(greedy_references(LLAMA)[:12])]
    twice = [(id_ + 12, reference) for id_, reference in references]
    served = [one.request(id_, 16, (one.output[id_ % 12],)) for id_, one in [*references, *twice]]
    first, again = Attentive(PrefillFirst()), Attentive(PrefillFirst())
    with closing(make_executor(LLAMA, LIMITS, NUM_BLOCKS, BLOCK)) as executor:
        engine = make(first, executor, prefix_cache=eviction and eviction())
        engine.attach(Listed(served, {id_: id_ % 12 + id_ // 12 for id_ in range(24)}))
        with write_decisions(path := tmp_path / "file", [engine], []):
            engine.run()
    [file] = read_decisions(path)
    assert all(comparison.same for comparison in ask(again, file.recorded, file.requests, eviction and eviction()))
    assert again.heard == first.heard
    assert sum(request.finish_reason is FinishReason.STOP for request in served) > 6
    assert (sum(request.num_cached_tokens for request in served) > 0) == (eviction is not None)


def test_an_eviction_is_told_of_live_requests_when_they_arrive() -> None:
    """Requests are not announced, as on a server; the eviction that knows what comes decides the same again."""
    engine, events, served = make(Orca(), simulated(), prefix_cache=Belady()), list[Decision | StepEnd](), alike()
    assert isinstance(engine.arrivals, Listed)
    engine.arrivals.add(served)
    with record_decisions(engine, events.append):
        engine.run()
    heard = ask(Orca(), Recorded.of(engine, events), alike(), Belady())
    assert all(comparison.same for comparison in heard)
    assert len({comparison.recorded.submitted for comparison in heard}) > 10
    assert sum(request.num_cached_tokens for request in served) > 0


class ToldLRU(LRU):
    """Keeps all that it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        inner = super().__getattribute__(name)

        def hook(*told: Any) -> None:
            self.heard.append((name, *(getattr(part, "id", part) for part in told)))
            inner(*told)

        return hook if name.startswith("on_") else inner


def test_an_eviction_is_told_the_same_again() -> None:
    """The policy gives up the sessions of the requests that it preempts."""

    class GivesUp(SarathiServe):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            plan.give_up = {str(request.session): False for request in plan.preempt}
            return plan

    def asked() -> list[Request]:
        return [Request.from_spec(replace(spec_of(each), session=str(each.id))) for each in alike(timeout=0.4)]

    first, again, policy = ToldLRU(), ToldLRU(), GivesUp(Fixed(8))
    ask(policy, record(make(policy, simulated(), prefix_cache=first), asked()), asked(), again)
    assert again.heard == first.heard and "on_give_up" in {name for name, *_ in first.heard}


def test_a_replica_that_starts_again_finds_nothing_in_a_replay_either() -> None:
    """As an autoscaler stops and starts it: the same prompts before and after."""
    engine, events = make(Orca(), simulated(), prefix_cache=LRU()), list[Decision | StepEnd]()
    first, second = alike()[:8], [Request.from_spec(replace(spec_of(each), id=8 + each.id)) for each in alike()[:8]]
    with record_decisions(engine, events.append):
        for part in (first, second):
            engine.submit(part)
            engine.run()
            engine.restart()
    heard = ask(Orca(), Recorded.of(engine, events), [*first, *second], LRU())
    assert all(comparison.same for comparison in heard)
    assert [comparison.recorded.cleared for comparison in heard].count(True) == 1


def test_a_simulated_cache_names_blocks_by_the_prompts_of_the_file_too(tmp_path: Path) -> None:
    """Clients of a server send prompts, also to a simulation; workloads name blocks otherwise."""
    engine, served = make(Orca(), simulated(), prefix_cache=LRU()), alike()
    engine.submit(served)
    with write_decisions(path := tmp_path / "file", [engine], []):
        engine.run()
    [file] = read_decisions(path)
    assert all(comparison.same for comparison in ask(Orca(), file.recorded, file.requests, LRU()))
    assert sum(request.num_cached_tokens for request in served) > 0


@pytest.mark.parametrize("more", [4, -4])
def test_a_replay_that_finds_other_tokens_than_the_run_says_so(more: int) -> None:
    recorded = record(make(Orca(), simulated(), prefix_cache=LRU()), alike())
    place, event = next((place, event) for place, event in enumerate(recorded.events) if getattr(event, "cached", ()))
    assert isinstance(event, Decision)
    changed = event._replace(cached=tuple((id_, tokens + more) for id_, tokens in event.cached))
    events = [*recorded.events[:place], changed, *recorded.events[place + 1 :]]
    (id_, tokens), *_ = event.cached
    finds = f"request {id_} finds {tokens} cached tokens, and {tokens + more} when recorded"
    with pytest.raises(ReplayError, match=rf"^iteration {event.iteration}: {finds}; the eviction has changed since"):
        ask(Orca(), recorded._replace(events=events), alike(), LRU())


@pytest.mark.parametrize("eviction", [None, LRU])
@pytest.mark.parametrize("lost", ["a request", "every plan"])
def test_events_without_their_request_or_their_plan_are_refused(lost: str, eviction: type[Eviction] | None) -> None:
    """As of a file that has lost a line."""
    recorded = record(make(Orca(), simulated(), prefix_cache=eviction and eviction()), alike())
    ends = [event for event in recorded.events if isinstance(event, StepEnd)]
    chosen, events = (alike()[1:], recorded.events) if lost == "a request" else (alike(), ends)
    with pytest.raises(ReplayError, match=r"^iteration 0 has a request, or an end, that is recorded nowhere before"):
        ask(Orca(), recorded._replace(events=events), chosen, eviction and eviction())


def test_a_policy_that_fails_or_breaks_a_rule_is_heard_and_the_run_goes_on() -> None:
    class Moody(Orca):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            if view.iteration == 3:
                raise ZeroDivisionError("mood")
            if view.iteration == 5:
                plan.num_tokens[0] = 10_000
            return plan

    recorded = record(make(Orca(), simulated()), requests())
    heard = ask(Moody(), recorded, requests())
    problems = {followed.recorded.iteration: followed.problem for followed in heard if not followed.same}
    assert problems.keys() == {3, 5}
    assert problems[3] == "plan() raised ZeroDivisionError: mood"
    assert problems[5].startswith("policy Moody, iteration 5, request")
    assert len(heard) == num_plans(recorded)


class Told:
    """A policy that hears of every waiting request before each plan."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def plan(self, view: View) -> Plan:
        for request in view.waiting:
            self.policy.on_wait(request)
        plan: Plan = self.policy.plan(view)
        return plan


@pytest.mark.parametrize("eviction", [None, LRU])
@pytest.mark.parametrize("name", ["sjf", "spf", "mc_sf", "priority"])
def test_a_policy_with_a_queue_knows_who_waits_although_its_plans_are_not_carried_out(
    name: str, eviction: type[Eviction] | None
) -> None:
    """It admits and preempts others than the run did."""
    recorded = record(make(PrefillFirst(), simulated(), prefix_cache=eviction and eviction()), requests())
    made, told = (
        ask(policy, recorded, requests(), eviction and eviction())
        for policy in (POLICIES[name](), Told(POLICIES[name]()))
    )
    assert [comparison.decided for comparison in made] == [comparison.decided for comparison in told]
    assert not all(comparison.same for comparison in made)
