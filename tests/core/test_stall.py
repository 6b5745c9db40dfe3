"""A policy that never ends is noticed; waiting for arrivals, however far, is no stall."""

import pytest
from schedules import UnitCost, make_engine

from cbatch import CbatchError, ConfigError, Engine, Limits, Plan, PolicyError, Request, RunRecord, Server, View
from cbatch.arrivals import Listed
from cbatch.errors import StallError
from cbatch.host import Host
from cbatch.kv import KVSize
from cbatch.sim.executor import SimExecutor
from cbatch.stall import Patience
from policies.chunking import Fixed
from policies.orca import Orca
from policies.sarathi_serve import SarathiServe

LIMITS = Limits(max_batch=2, max_tokens=10, max_request_tokens=100)


class Polling:
    """Asks to be woken again and again."""

    def __init__(self, every: float) -> None:
        self.every = every

    def plan(self, view: View) -> Plan:
        return Plan(wake_at=view.now + self.every)


class Churning:
    """Computes a prompt's first token, preempts the request and begins again: no token is ever generated."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        for request in view.running:
            plan.preempt(request)
        for request in view.waiting:
            plan.add(request, 1)
        return plan.build()


def serve(
    policy: object, *requests: Request, patience: Patience, asynchronous: bool = False, num_blocks: int = 100
) -> RunRecord:
    server = Server(SimExecutor(UnitCost()), LIMITS, UnitCost(), KVSize(num_blocks, 4), asynchronous, patience)
    return server.serve(policy, requests)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            Polling(1.0),
            "policy Polling, iteration 0: no token for 21 s with 2 waiting and 0 running requests (request 0 first); ",
        ),
        (
            Polling(0.25),
            "policy Polling, iteration 0: 50 empty plans in a row with 2 waiting and 0 running requests (request 0 first); ",
        ),
        (
            Churning(),
            "policy Churning, iteration 21: no token for 21 s with 0 waiting and 2 running requests (request 0 first); ",
        ),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_policy_that_never_ends_is_stopped(policy: object, message: str, asynchronous: bool) -> None:
    requests = Request(0, 4, 2), Request(1, 4, 2)
    with pytest.raises(StallError) as caught:
        serve(policy, *requests, patience=Patience(20, 50), asynchronous=asynchronous)
    if not asynchronous:  # otherwise the iteration's number differs by the one in flight
        assert str(caught.value).startswith(message)
    assert "compute their tokens, or raise patience." in str(caught.value)


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        ("plan", "iteration 2"),
        ("on_arrival", "iteration 0, request 7"),
        ("on_wait", "iteration 0, request 7"),
        ("on_tokens", "iteration 1"),
        ("on_step", "iteration 1"),
        ("on_finish", "iteration 3, request 7"),
        ("num_at_once", "iteration 0, request 7"),
    ],
)
def test_an_error_in_a_hook_names_policy_hook_and_request(hook: str, where: str) -> None:
    """One request whose three tokens take three iterations; a hook is called after the first, and after the last."""

    class Fails(Orca):
        pass

    def fail(self: Fails, about: object) -> object:
        if hook == "plan" and about.iteration < 2:  # type: ignore[attr-defined]
            return Orca.plan(self, about)  # type: ignore[arg-type]
        raise KeyError("lost")

    fail.__name__ = hook
    setattr(Fails, hook, fail)
    with pytest.raises(PolicyError) as caught:
        serve(Fails(), Request(7, 4, 3), patience=Patience(20, 50))
    assert str(caught.value).startswith(f"policy Fails, {where}: {hook}() raised KeyError: 'lost' (test_stall.py:")


def test_a_number_at_once_is_a_whole_number() -> None:
    class Words(Orca):
        def num_at_once(self, request: Request) -> str:  # type: ignore[override]
            return "many"

    with pytest.raises(
        PolicyError, match=r"policy Words, iteration 0, request 7: num_at_once\(\) raised TypeError: 'str'"
    ):
        serve(Words(), Request(7, 4, 3), patience=Patience(20, 50))


class Chunks:
    """Begins every prompt and reserves nothing; asks again after `then` seconds if it has nothing to compute."""

    def __init__(self, then: float | None = None) -> None:
        self.then = then

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        for request in [*view.running, *view.waiting]:
            plan.add(request, 4)
        return plan.build(wake_at=self.then and view.now + self.then)


@pytest.mark.parametrize(("then", "says"), [(None, "no arrival to come"), (1.0, "no token for 21 s with")])
def test_a_deadlock_over_the_kv_cache_is_called_one(then: float | None, says: str) -> None:
    """Three blocks: each of two prompts takes one, the first one another; then it decodes and needs the third as well."""
    with pytest.raises(PolicyError) as caught:
        serve(Chunks(then), Request(0, 8, 3), Request(1, 8, 3), patience=Patience(20), num_blocks=3)
    assert says in str(caught.value)
    cause = "; the running ones hold 3 of 3 KV blocks, and each needs one more: preempt one of them, or set blocks"
    assert cause in str(caught.value) and "reserve=request.max_tokens)" in str(caught.value)


def test_empty_plans_are_counted_between_iterations_only() -> None:
    """A prompt in chunks of one token, with 3 empty plans before each: 4 s per iteration."""

    class Slow:
        turn = 0

        def plan(self, view: View) -> Plan:
            self.turn += 1
            if self.turn % 4:
                return Plan(wake_at=view.now + 1)
            plan = view.plan()
            for request in [*view.running, *view.waiting]:
                plan.add(request, 1)
            return plan.build()

    assert serve(Slow(), Request(0, 20, 3), patience=Patience(78, 3)).steps[-1].ended == 88.0
    for patience, says in ((Patience(77, 3), "no token for 78 s"), (Patience(78, 2), "2 empty plans in a row")):
        with pytest.raises(StallError, match=says):
            serve(Slow(), Request(0, 20, 3), patience=patience)


def test_waiting_for_a_far_arrival_is_no_stall() -> None:
    """A wake time is ignored beside requests to compute and while no request is there."""

    class Eager(Orca):
        num_plans = 0

        def plan(self, view: View) -> Plan:
            self.num_plans += 1
            plan = super().plan(view)
            plan.wake_at = view.now + 1e-3
            return plan

    policy, far = Eager(), [Request(id_, 4, 2, arrival_time=1e6 * id_) for id_ in range(2)]
    assert len(serve(policy, *far, patience=Patience(10, 10)).requests) == 2
    assert policy.num_plans == 5  # two iterations, the wait, two iterations


def test_overshoot_at_the_end_of_a_run_is_no_stall() -> None:
    """Iterations in flight that compute tokens of a request that has ended, long after its last token."""
    engine: Engine = make_engine(Orca(), LIMITS, asynchronous=True)
    engine._stall_watch._patience = Patience(0.5, 1)
    engine.submit([Request(0, 4, 5, true_new_tokens=2)])
    engine.run()
    assert engine.state.num_overshoot_tokens == 1


@pytest.mark.parametrize(("field", "value"), [("seconds", 0), ("seconds", float("nan")), ("empty_plans", -1)])
def test_patience_is_above_zero(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"patience.{field}={value} must be above 0") as caught:
        Patience(**{field: value})
    assert isinstance(caught.value, CbatchError)


class Door(Listed):
    """Expects no client; one comes just after the engine has waited for 100 s."""

    def next(self) -> float:
        return min(super().next(), 1e6)

    def wait(self, host: Host, time: float) -> None:
        host.sleep_until(100.0)


def test_waiting_for_an_unexpected_client_is_no_stall() -> None:
    server = Server(SimExecutor(UnitCost()), LIMITS, UnitCost(), KVSize(100, 4), False, Patience(20, 50))
    engine = server.engine(SarathiServe(Fixed(4)))
    engine.arrivals = door = Door()
    door.num_unfinished = 1

    def come(engine: Engine) -> None:
        if engine.executor.now() == 100:
            door.num_unfinished = 0
            door.add([Request(0, 9, 2, arrival_time=100)])

    assert [request.num_output_tokens for request in engine.run(come).requests] == [2]
