"""Who arrives when: requests recorded before, made as they arrive, or known only when another one has ended."""

from collections.abc import Callable, Sequence
from math import inf

import pytest
from schedules import make_engine

from cbatch import Engine, FinishReason, Limits, Request, WorkloadError
from cbatch.arrivals import Listed, Streamed
from cbatch.cluster import Cluster, RoundRobin
from policies.orca import Orca

LIMITS = Limits(max_batch=2, max_tokens=20, max_request_tokens=100)


def ids(requests: Sequence[Request]) -> list[int]:
    return [request.id for request in requests]


def test_recorded_requests_arrive_by_time_and_iteration() -> None:
    arrivals = Listed([Request(0, 4, 1, arrival_time=2.0), Request(1, 4, 1)], {1: 3, 2: 5})
    arrivals.add([Request(2, 4, 1), Request(3, 4, 1)])
    assert arrivals.next() == 0.0 and ids(arrivals.due(1.0, 0)) == [3]
    assert ids(arrivals.due(1.0, 2)) == [] and ids(arrivals.due(1.0, 3)) == [1]
    assert ids(arrivals.due(1.0, None)) == [2], "no iteration would come"
    assert arrivals.next() == 2.0 and ids(arrivals.due(1.0, None)) == [] and ids(arrivals.due(2.0, 9)) == [0]
    assert arrivals.next() == inf and arrivals.num_unfinished == 4
    with pytest.raises(WorkloadError, match="give all requests one of the two"):
        _ = arrivals.facts


def test_a_stream_makes_one_request_ahead_and_checks_it() -> None:
    made: list[int] = []

    def requests():  # type: ignore[no-untyped-def]
        for id_ in range(3):
            made.append(id_)
            yield Request(id_, 4, 1, arrival_time=float(id_))

    checked: list[Request] = []
    arrivals = Streamed(requests)
    assert arrivals.facts.number == 3 and made == [0, 1, 2]
    made.clear()
    arrivals.check = checked.append
    assert arrivals.num_unfinished == 3 and arrivals.next() == 0.0 and arrivals.num_unfinished == 3
    assert ids(arrivals.due(1.0, 0)) == [0, 1] and made == ids(checked) == [0, 1, 2]
    with pytest.raises(WorkloadError, match="request 1 "):
        Streamed(lambda: [Request(0, 4, 1, arrival_time=1.0), Request(1, 4, 1)]).due(1.0, 0)


@pytest.mark.parametrize("make", [Listed, lambda requests: Streamed(lambda: requests)])
def test_an_engine_sees_a_request_once_the_server_has_had_it(make: Callable[[list[Request]], Listed]) -> None:
    arrivals = make([Request(0, 4, 1, arrival_time=1.0)])
    arrivals.server_seconds = 0.25
    assert arrivals.next() == 1.25 and ids(arrivals.due(1.2, 0)) == [] and ids(arrivals.due(1.25, 0)) == [0]
    arrivals = make([Request(0, 4, 1, arrival_time=0.9964241312966027)])
    arrivals.server_seconds = 0.00836  # the sum is rounded, and less than this much above the arrival
    assert ids(arrivals.due(arrivals.next(), 0)) == [0], "it is due when it is next: a host waits for no other time"


@pytest.mark.parametrize(
    "submit",
    [
        lambda engine, requests: engine.submit(requests),
        lambda engine, requests: [engine.submit([request]) for request in requests],
        lambda engine, requests: Cluster([engine], RoundRobin()).attach(Listed(requests)),
        lambda engine, requests: Streamed(lambda: requests).due(0.0, 0),
    ],
    ids=["together", "one by one", "replicas", "stream"],
)
def test_requests_with_the_same_id_are_refused_by_name(submit: Callable[[Engine, list[Request]], object]) -> None:
    """They would share their tokens in the figures: each gap between tokens half as long as it is."""
    once = Request(7, 4, 2)
    for requests in ([Request(0, 4, 2), once, Request(7, 6, 2)], [once, once], [Request(0, 4, 2), Request(0, 4, 2)]):
        with pytest.raises(WorkloadError, match=f"request {requests[-1].id} is submitted twice"):
            submit(make_engine(Orca(), LIMITS), requests)


@pytest.mark.parametrize("stream", [False, True], ids=["recorded", "stream"])
def test_a_request_that_has_not_arrived_is_cancelled_and_strangers_are_refused(stream: bool) -> None:
    """The policy never hears of it."""
    policy, requests = Orca(), [Request(id_, 4, 2, arrival_time=float(id_)) for id_ in range(3)]
    heard: list[int] = []
    policy.on_finish = lambda request: heard.append(request.id)  # type: ignore[attr-defined]
    engine = make_engine(policy, LIMITS)
    engine.attach(Streamed(lambda: requests) if stream else Listed(requests))
    engine.step()
    engine.cancel(requests[1])
    other = make_engine(Orca(), LIMITS)
    other.submit([Request(7, 4, 2)])
    other.step()
    for stranger in (Request(9, 4, 2), *other.state.running):
        with pytest.raises(
            WorkloadError, match=f"request {stranger.id} cannot be cancelled: it was not submitted here"
        ):
            engine.cancel(stranger)
    assert [(one.id, one.finish_reason) for one in engine.run().requests] == [
        (1, FinishReason.CANCELLED),
        (0, FinishReason.LENGTH),
        (2, FinishReason.LENGTH),
    ]
    assert heard == [0, 2]


class Session(Listed):
    """Each request but the last is followed by another, a second after its end."""

    def ended(self, request: Request) -> None:
        super().ended(request)
        if request.id < 2:
            assert request.finished_at is not None
            self.add([Request(request.id + 1, 4, 2, arrival_time=request.finished_at + 1)])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_may_follow_the_end_of_another(asynchronous: bool) -> None:
    """Two tokens take two seconds, in iterations of one."""
    engine = make_engine(Orca(), LIMITS, asynchronous=asynchronous)
    engine.arrivals = Session()
    engine.submit([Request(0, 4, 2)])
    assert [(one.arrival_time, one.finished_at) for one in engine.run().requests] == [(0, 2), (3, 5), (6, 8)]
