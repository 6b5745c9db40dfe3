"""What a request was asked for is one record; its true output length ends it, and policies cannot see it."""

from dataclasses import FrozenInstanceError
from types import MappingProxyType, MethodType, NoneType

import pytest
from schedules import UnitCost

from cbatch import SLO, Limits, Plan, Request, RequestSpec, Sampling, Server, Status, View
from cbatch.facts import facts_of
from cbatch.kv import KVSize
from cbatch.request import spec_of
from cbatch.sim.executor import SimExecutor
from policies.evictions import LRU

FULL = RequestSpec(
    id=3,
    num_prompt_tokens=4,
    max_new_tokens=9,
    true_new_tokens=5,
    arrival_time=1.5,
    timeout=77.5,
    sampling=Sampling(0.5, seed=3),
    stop_tokens=(1,),
    stop_strings=("end",),
    client="me",
    session="chat",
    tier="batch",
    priority=-2,
    slo=SLO(0.2, 0.05, 4.0),
    predicted_new_tokens=7,
    prefix_hashes=(11, 12),
    hash_block=2,
    turn=1,
    last=True,
    pause=2.5,
    texts=((6, 0), (7, 3)),
    salt="mine",
)


def test_a_request_shows_what_was_asked_for_except_its_true_length_and_when_the_client_leaves() -> None:
    request = Request.from_spec(FULL)
    assert spec_of(request) is FULL
    for name in set(FULL.__dataclass_fields__) - {"true_new_tokens", "timeout"}:
        assert getattr(request, name) == getattr(FULL, name)
        with pytest.raises(AttributeError):
            setattr(request, name, None)
    assert (request.max_tokens, request.deadline) == (13, 5.5)
    assert Request(3, 4, 9).deadline is None
    hidden = [name for name in dir(request) if not name.startswith("_") and getattr(request, name) in (FULL, 5, 77.5)]
    assert hidden == []
    with pytest.raises(FrozenInstanceError):
        FULL.id = 4  # type: ignore[misc]


class Reader:
    """Reads every public attribute of the requests that it plans."""

    def __init__(self) -> None:
        self.kinds: set[type] = set()

    def plan(self, view: View) -> Plan:
        requests = [*view.waiting, *view.running]
        values = [getattr(request, name) for request in requests for name in dir(request) if not name.startswith("_")]
        self.kinds |= {type(value) for value in values if not isinstance(value, MethodType)}
        return Plan([(request, request.num_ready) for request in requests if request.num_ready])


def test_the_public_attributes_of_a_request_are_values_of_its_own() -> None:
    """With a prefix cache: no table and no hashes of the engine are among them."""
    server = Server(SimExecutor(UnitCost()), Limits(4, 16, 16), UnitCost(), KVSize(10, 2), prefix_cache=LRU())
    server.serve(reader := Reader(), [Request(0, 4, 3), Request(1, 4, 3, slo=SLO(1.0))])
    assert reader.kinds <= {int, float, str, bool, NoneType, tuple, list, MappingProxyType, Sampling, SLO, Status}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_prompt_tokens": 0}, "request 0: prompt and output need at least 1 token each, got 0 and 2"),
        ({"max_new_tokens": 0}, "request 0: prompt and output need at least 1 token each, got 3 and 0"),
        ({"true_new_tokens": 0}, "request 0: true_new_tokens=0 must be at least 1"),
        ({"arrival_time": -1.0}, "request 0: arrival must not be negative"),
        (
            {"arrival_time": 1.79e15},
            "request 0: arrival_time=1790000000000000.0 is not in seconds from the start of the run",
        ),
        ({"arrival_time": float("nan")}, "request 0: arrival_time=nan is not in seconds"),
        ({"timeout": 0.0}, "request 0: timeout=0.0 must be above 0 seconds"),
        ({"prompt": [1, 2]}, "request 0: prompt has 2 tokens, num_prompt_tokens says 3"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**{"id": 0, "num_prompt_tokens": 3, "max_new_tokens": 2, **fields})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="objectives must be above 0"):
        SLO(ttft=0.0)


def test_totals_by_hand() -> None:
    hidden, late = Request(0, 3, 4, true_new_tokens=2), Request(1, 5, 1, client="ann")
    last = Request(2, 2, 2, extra={"tier": 1}, prefix_hashes=(7,))
    found = facts_of([hidden, late, last])
    assert (found.longest, found.longest_prompt) == (hidden, late)
    told = (found.clients, list(found.extra), found.lengths_known, found.prefixes)
    assert told == ({None, "ann"}, ["tier"], False, True)
    assert not facts_of([hidden, late]).prefixes
    assert not facts_of([Request(0, 3, 4, stop_tokens=(7,))]).lengths_known, "a stop token may end it"
    alone = facts_of([last])
    assert (alone.clients, alone.lengths_known) == ({None}, True)
