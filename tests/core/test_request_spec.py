"""What a request was asked for is one record; its true output length ends it, and policies cannot see it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError

import pytest
from contended import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, simulated

from cbatch import SLO, Engine, Plan, Policy, Request, RequestSpec, Sampling, View
from cbatch.request import spec_of
from experiments.workloads.drawn import totals_of

FULL = RequestSpec(
    id=3,
    num_prompt_tokens=4,
    max_new_tokens=9,
    true_new_tokens=5,
    arrival_time=1.5,
    arrival_iteration=2,
    sampling=Sampling(0.5, seed=3),
    stop_tokens=(1,),
    client="me",
    session="chat",
    tier="batch",
    priority=-2,
    slo=SLO(0.2, 0.05, 4.0),
    predicted_new_tokens=7,
    prefix_hashes=(11, 12),
)


def test_a_request_shows_what_was_asked_for_except_its_true_length() -> None:
    request = Request.from_spec(FULL)
    assert spec_of(request) is FULL
    for name in set(FULL.__dataclass_fields__) - {"true_new_tokens"}:
        assert getattr(request, name) == getattr(FULL, name)
        with pytest.raises(AttributeError):
            setattr(request, name, None)
    assert (request.max_tokens, request.deadline) == (13, 5.5)
    assert Request(3, 4, 9).deadline is None
    hidden = [name for name in dir(request) if not name.startswith("_") and getattr(request, name) in (FULL, 5)]
    assert hidden == []
    with pytest.raises(FrozenInstanceError):
        FULL.id = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_prompt_tokens": 0}, "request 0: prompt and output need at least 1 token each, got 0 and 2"),
        ({"max_new_tokens": 0}, "request 0: prompt and output need at least 1 token each, got 3 and 0"),
        ({"true_new_tokens": 0}, "request 0: true_new_tokens=0 must be at least 1"),
        ({"arrival_time": -1.0}, "request 0: arrival must not be negative"),
        ({"arrival_iteration": -1}, "request 0: arrival must not be negative"),
        ({"prompt": [1, 2]}, "request 0: prompt has 2 tokens, num_prompt_tokens says 3"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**{"id": 0, "num_prompt_tokens": 3, "max_new_tokens": 2, **fields})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="objectives must be above 0"):
        SLO(ttft=0.0)


def test_totals_by_hand() -> None:
    hidden, late = Request(0, 3, 4, true_new_tokens=2), Request(1, 5, 1, client="ann", arrival_iteration=3)
    last = Request(2, 2, 2, extra={"tier": 1})
    found = totals_of([hidden, late, last])
    assert (found.longest, found.longest_prompt, found.new_tokens) == (hidden, 5, 4 + 1 + 2)
    told = (found.clients, list(found.extra), found.lengths_known, found.by_iteration)
    assert told == ({None, "ann"}, ["tier"], False, True)
    alone = totals_of([last])
    assert (alone.clients, alone.lengths_known, alone.by_iteration) == ({None}, True, False)


@contextmanager
def length_guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the reads of any request's true length within, but for those of predictors, which stand for a trained model."""
    reads: list[int] = []
    slot = RequestSpec.__dict__["true_new_tokens"]

    def read(spec: RequestSpec) -> int | None:
        if sys._getframe(1).f_globals["__name__"] != "policies.predictors":
            reads.append(spec.id)
        return slot.__get__(spec)  # type: ignore[no-any-return]

    with monkeypatch.context() as context:
        context.setattr(RequestSpec, "true_new_tokens", property(read))
        yield reads


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_of_this_repository_reads_the_true_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched:
        def __init__(self, policy: Policy) -> None:
            self.policy = policy

        def plan(self, view: View) -> Plan:
            with length_guarded(monkeypatch) as reads:
                plan = self.policy.plan(view)
            assert reads == []
            return plan

        def __getattr__(self, name: str) -> object:
            return getattr(self.policy, name)

    engine = Engine(
        Watched(POLICIES[name]()), simulated(), LIMITS, LinearCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK
    )
    requests = [Request(id_, 3 + id_ % 20, 8, true_new_tokens=1 + id_ % 7) for id_ in range(30)]
    engine.submit(requests)
    engine.run()
    assert [request.num_output_tokens for request in requests] == [1 + id_ % 7 for id_ in range(30)]
    with length_guarded(monkeypatch) as reads:
        assert spec_of(requests[4]).true_new_tokens == 5
    assert reads == [4]
