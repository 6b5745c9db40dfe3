"""Published policies: what they tell predictors, and parts that `schedules.yaml` cannot show."""

from random import Random
from typing import Any

import numpy as np
import pytest
from contended import POLICIES
from unit_machine import golden, running, view_of

from cbatch import FinishReason, Request
from policies.chunking import Fixed
from policies.length_order import LengthOrder
from policies.past_future import PastFuture
from policies.predictors import Oracle, Predictor
from policies.shared.future_memory import draw_left
from policies.vllm_v1 import reclaimed


class Listening(Oracle):
    def __init__(self) -> None:
        self.observed: list[int] = []

    def observe(self, request: Request) -> None:
        self.observed.append(request.id)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_tells_its_predictor_of_every_end_and_forgets_the_request(name: str) -> None:
    """Its chunk selector too. Under a cache that holds two or three of the six requests at a time."""
    policy: Any = POLICIES[name]()
    ended: list[int] = []
    if chunks := hasattr(policy, "chunking"):
        policy.chunking.observe = lambda request: ended.append(request.id)
    if predicts := hasattr(policy, "predictor"):
        policy.predictor = Listening()
    found = golden(policy, "A 4/5 @0, B 6/2 @0, C 3/4 @1, D 5/3 @2, E 1/6 @2, F 2/1 @9", batch=4, memory=16)
    assert all(found.ends.values())
    if predicts:
        assert sorted(policy.predictor.observed) == [0, 1, 2, 3, 4, 5]
    assert sorted(ended) == ([0, 1, 2, 3, 4, 5] if chunks else [])
    kept = [value for value in vars(policy).values() if isinstance(value, dict | set)]
    kept += [level for value in kept if isinstance(value, dict) for level in value.values() if isinstance(level, dict)]
    assert not [entry for each in kept for entry in each if isinstance(entry, Request)]


def test_the_cost_of_a_victim() -> None:
    """3 blocks for 11 tokens to recompute, of a request that has 6 of 8 output tokens to go."""
    assert reclaimed(running(0, 10, 8, 2), 3) == pytest.approx(3 / 11 * 6 / 8)
    assert reclaimed(running(0, 2, 8), 3) == 3, "one token to recompute"


@pytest.mark.parametrize(("number", "first"), [(128, 127), (129, 0)])
def test_with_many_waiting_requests_hrrn_is_first_come_first_served(number: int, first: int) -> None:
    """The last to arrive has the shortest prompt; prompts under way come first."""
    policy = LengthOrder(Fixed(100), Predictor(), "hrrn")
    waiting = [Request(id_, number - id_, 1) for id_ in range(number)]
    for request in waiting:
        policy.on_arrival(request)
    policy._computed = 100
    under_way = Request(999, 5, 1)
    found = list(policy.prompts(view_of(prefilling=[under_way], waiting=waiting)))
    assert found[0] is under_way and found[1].id == first and len(found) == number + 1


def test_past_future_draws_what_is_left_from_longer_outputs() -> None:
    """10 tokens generated, ended requests of 4, 12 and 20, limit 30: what is left is between 0 and 20, half of it below 10."""
    drawn = draw_left(Random(1), [10] * 4000, [30] * 4000, [4, 12, 20])
    assert min(drawn) >= 0 and max(drawn) <= 20
    # the support is 10, 12, 20, 30, each third equally likely: left 0 to 2, 2 to 10, 10 to 20
    shares = [np.mean([low <= left < high for left in drawn]) for low, high in ((0, 2), (2, 10), (10, 20))]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.03)


def test_past_future_remembers_a_window_of_ends() -> None:
    policy = PastFuture(window=2)
    for tokens, reason in ((7, "length"), (9, "stop"), (3, "length"), (1, "cancelled"), (2, "rejected")):
        ended = Request(0, 1, 99)
        ended.num_output_tokens, ended.finish_reason = tokens, FinishReason(reason)
        policy.on_finish(ended)
    assert policy._ended.ascending == [3, 9]


@pytest.mark.parametrize(
    ("requests", "limit", "asked"),
    [
        # after four iterations ten blocks are full and each has generated four tokens; in the fifth A preempts B
        ("A 2/6 @0, B 2/6 @0", {"memory": 10}, [[0], [0, 0], [5, 4]]),
        # where no request finds a place nothing is drawn: draws would change what is drawn later
        ("A 1/4 @0, B 1/1 @0", {"batch": 1}, [[0], [0, 0], [0]]),
    ],
)
def test_a_request_counts_with_what_it_has_generated(
    requests: str, limit: dict[str, Any], asked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[int]] = []
    monkeypatch.setattr(
        "policies.past_future.draw_left", lambda _, generated, *rest: drawn.append(generated) or generated
    )
    golden(PastFuture(draws=1), requests, **limit)
    assert drawn[:3] == asked
