"""Decisions followed without an engine: a policy sees the recorded views, and so repeats its plans at every one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contended import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, decisions_of, requests

from cbatch import SLO, Plan, Policy, Request, RequestSpec, View
from cbatch.replay.counterfactual import Comparison, Recorded
from cbatch.replay.decisions import Decided, Decision, Seen, StepEnd
from cbatch.replay.follow import follow
from cbatch.request import spec_of
from experiments.store.decisions_file import DecisionsWriter, read_decisions
from experiments.store.run_folder import DECISIONS
from experiments.workloads import TraceReplay


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_repeats_its_plans_at_the_recorded_views(name: str, asynchronous: bool) -> None:
    make: Callable[[], Policy] = POLICIES[name]
    events, found = decisions_of(make(), requests(), NUM_BLOCKS, asynchronous), list[Comparison]()
    recorded = Recorded(LIMITS, NUM_BLOCKS, BLOCK, 1, asynchronous, events)
    follow(recorded, requests(), make(), LinearCost(), found.append)
    assert len(found) == sum(isinstance(event, Decision) for event in events) > 30
    for comparison in found:
        assert comparison.same, (comparison.recorded, comparison.answer)


class Places:
    """Notes how many requests it could admit at each view."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def plan(self, view: View) -> Plan:
        self.seen.append(view.num_places)
        return Plan()


def test_another_hosts_request_holds_its_row_until_its_last_token_is_there() -> None:
    """Of three rows, fewer than the limits allow: request 0 has its only token sampled by iteration 0 and runs no more, but its row is free when that has ended."""
    policy = Places()
    events: list[Decision | StepEnd] = [
        Decision(0, Seen(0.0, 0, (0,), (), 18, 0), Decided(((0, 4),)), (0.0,)),
        Decision(1, Seen(1.0, 1, (1,), (), 17, 1), Decided(((1, 4),)), (1.0,)),
        StepEnd(0, 0.0, 2.0, (), (2.0,)),
        Decision(2, Seen(3.0, 1, (2,), ((1, 4, 1),), 16, 0), Decided(()), (3.0,)),
        Decision(3, Seen(4.0, 1, (2,), (), 18, 0), Decided(()), (4.0,)),
    ]
    asked = [Request(0, 4, 1), Request(1, 4, 5), Request(2, 4, 5)]
    follow(Recorded(LIMITS, 18, 4, 1, True, events, rows=3), asked, policy, LinearCost(), lambda _: None)
    assert policy.seen == [3, 2, 2, 3]


def test_recorded_requests_are_served_again_with_their_true_lengths(tmp_path: Path) -> None:
    """As vLLM's: its requests end by themselves, out of the order of their arrival, and one gets no token."""
    more: dict[str, Any] = {"client": "a", "session": "chat", "tier": "batch", "priority": -2, "stop_tokens": (1,)}
    more |= {"slo": SLO(1.0, 0.05, 4.0), "predicted_new_tokens": 7, "prefix_hashes": (11, 12), "arrival_iteration": 2}
    specs = [RequestSpec(id_, 5 + 2 * id_, 30, arrival_time=time) for id_, time in ((1, 2.5), (2, 4.0))]
    specs = [RequestSpec(0, 5, 30, arrival_time=2.0, **more), *specs]
    writer = DecisionsWriter(tmp_path / DECISIONS)
    writer.begin(Recorded(LIMITS, 9, 4, 1, True, (), (), 8))
    for spec in specs:
        writer.request(spec)
    for id_, length in ((2, 30), (1, 0), (0, 11)):
        writer.finish(id_, length)
    writer.close()
    file = read_decisions(tmp_path / DECISIONS)
    assert [spec_of(request) for request in file.requests] == specs, "all that was asked for"
    first, last = TraceReplay(path=str(tmp_path / DECISIONS)).requests(None)
    assert (first.client, first.slo, first.max_new_tokens, first.arrival_time) == ("a", specs[0].slo, 30, 0.0)
    assert (last.num_prompt_tokens, last.arrival_time) == (9, 2.0)
    assert [spec_of(request).true_new_tokens for request in (first, last)] == [11, 30]
