"""Speculation by hand: a model that generates token 10 + p at position p, and a drafter that proposes what a test states."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedules import UnitCost

from cbatch import (
    Engine,
    Executor,
    FinishReason,
    Limits,
    Plan,
    PlanError,
    Request,
    RequestSpec,
    Status,
    StepResult,
    View,
)
from cbatch.drafts import NO_DRAFT, Drafter, NgramDrafter
from cbatch.errors import ConfigError
from cbatch.executor import Step
from cbatch.plan import Refusal
from cbatch.request import Ints

Launched = tuple[Step, Ints, Ints | None]

PROMPT = [10, 11, 12, 13]
NEXT = [15, 16, 17, 18]
"""What follows the first token, 14."""


class Counting(Executor):
    """Samples 10 + p at position p, in each row. guesses: the drafts of each iteration, in turn; none are missing drafts."""

    num_stages, needs_tokens, drafter = 1, True, Drafter()

    def __init__(self, *guesses: Sequence[int]) -> None:
        self._guesses = [*guesses]
        self._rejected: dict[int, dict[Request, int]] = {}  # of each iteration in flight

    def launch(self, step: Step) -> Launched:
        """Finds the true positions as a device does: from what the iterations in flight reject."""
        newest = step.start + step.num_tokens - 1
        newest -= [sum(rejected.get(request, 0) for rejected in self._rejected.values()) for request in step.requests]
        if step.drafts is None:
            return step, 11 + newest, None
        newest -= step.drafts
        accepted = [
            self.num_accepted(position, drafts)
            for position, drafts in zip(newest.tolist(), step.drafts.tolist(), strict=True)
        ]
        rejected = step.drafts - accepted
        self._rejected[step.index] = dict(zip(step.requests, rejected.tolist(), strict=True))
        split = step.split()
        assert split.within is not None
        return step, 11 + newest.repeat(1 + step.drafts) + split.within, np.array(accepted)

    def num_accepted(self, newest: int, drafts: int) -> int:
        guess = self._guesses.pop(0) if drafts and self._guesses else []
        right = [token == 11 + newest + place for place, token in enumerate(guess[:drafts])]
        return [*right, False].index(False)

    def wait(self, in_flight: Launched) -> StepResult:
        step, tokens, accepted = in_flight
        self._rejected.pop(step.index, None)
        return StepResult(tokens.astype(np.int32), 0.0, 0.0, accepted=accepted)

    def ends_at(self, in_flight: Launched) -> float:
        return 0.0

    def now(self) -> float:
        return 0.0


class Greedy:
    """Asks for four drafts of each decode."""

    def __init__(self) -> None:
        self.asked = True

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(drafts=4 if self.asked else 0)
        for request in view.waiting:
            plan.add(request)
        return plan.build()


def make(
    *guesses: Sequence[int], policy: Any = None, blocks: int = 20, asynchronous: bool = False, **fields: Any
) -> tuple[Engine, Request]:
    """Returns an engine that has generated the first token of its request, and the request."""
    limits = Limits(4, 20, 40, max_drafts=5)
    engine = Engine(
        policy or Greedy(),
        Counting(*guesses),
        limits,
        UnitCost(),
        num_blocks=blocks,
        block_size=2,
        asynchronous=asynchronous,
    )
    spec = RequestSpec(7, 4, fields.pop("max_new_tokens", 20), prompt=PROMPT, **fields)
    engine.submit([request := Request.from_spec(spec)])
    engine.step()
    if asynchronous:
        absorb(engine)
    assert request.num_known == request.num_tokens == 5
    return engine, request


def counters(request: Request) -> tuple[int, int, int, int]:
    return request.num_known, request.num_tokens, request.num_computed, request.num_ready


def in_flight(engine: Engine) -> Any:
    """Launches the next iteration."""
    engine._in_flight.append(launched := engine._launch_next())
    assert launched is not None
    return launched.step


def absorb(engine: Engine) -> None:
    engine._complete(engine._in_flight.popleft())


@pytest.mark.parametrize(
    ("guess", "received"),
    [(NEXT, [*NEXT, 19]), ([15, 99, 17], [15, 16]), ([99, 16, 17], [15]), ([15], [15, 16]), ([], [15])],
)
def test_a_draft_is_received_if_all_before_it_are_right(guess: list[int], received: list[int]) -> None:
    """In flight, counters hold the upper bound, with which the request is ready; blocks taken for rejected drafts stay."""
    engine, request = make(guess)
    in_flight(engine)
    assert counters(request) == (5, 10, 9, 1)
    held = engine.view.kv.num_held(request)
    assert held == 5
    absorb(engine)
    known = 5 + len(received)
    assert counters(request) == (known, known, known - 1, 1)
    assert engine.view.kv.num_held(request) == held
    step, table = engine.record.steps[-1], engine.state.table
    assert table.tokens is not None and table.tokens[request._row, :known].tolist() == [*PROMPT, 14, *received]
    assert (step.num_drafted, step.num_drafts, step.num_accepted) == (1, 4, len(received) - 1)
    assert (step.num_sampled, step.num_decode_tokens, step.num_prefill_tokens) == (len(received), 5, 0)
    assert engine.record.receivers[-1].tolist() == [7] * len(received)
    engine.run()
    assert request.output == [*range(14, 34)] and table.num_drafting == 0


def test_a_request_is_planned_again_while_its_drafts_are_in_flight() -> None:
    """One of four drafts is accepted, then two of four more; the second step starts at most 3 positions too far."""
    engine, request = make([15, 99], [17, 18, 99], asynchronous=True)
    in_flight(engine)
    step = in_flight(engine)
    assert [column.tolist() for column in (step.start, step.behind, step.carry, step.sampled)] == [[9], [4], [0], [0]]
    assert counters(request) == (5, 15, 14, 1)
    absorb(engine)
    assert counters(request) == (7, 12, 11, 1)
    absorb(engine)
    assert counters(request) == (10, 10, 9, 1)
    engine.run()
    assert request.output == [*range(14, 34)]
    assert [step.num_accepted for step in engine.record.steps[1:3]] == [1, 2]


def test_a_request_leaves_once_its_last_token_is_certainly_in_flight() -> None:
    engine, request = make(NEXT, max_new_tokens=7)
    in_flight(engine)
    in_flight(engine)
    absorb(engine)
    assert (request.num_known, request.num_tokens, request.num_ready) == (10, 11, 0)
    assert request not in engine.view.running and engine._launch_next() is None
    absorb(engine)
    assert (request.output, request.finish_reason) == ([*range(14, 21)], FinishReason.LENGTH)


def test_a_request_that_may_have_ended_is_not_ready() -> None:
    """At most 7 tokens: 1 is known, 5 and 1 are in flight. After 4 of these are rejected the request goes on, and does not end at its limit."""
    engine, request = make([99], max_new_tokens=7)
    in_flight(engine)
    assert (in_flight(engine).drafts.tolist(), request.num_tokens) == ([0], 11)
    assert request.num_ready == 0 and request in engine.view.running and engine._launch_next() is None
    absorb(engine)
    assert counters(request) == (6, 7, 6, 1)
    absorb(engine)
    assert request.num_known == 7 and request.finish_reason is None
    engine.run()
    assert (request.output, request.finish_reason) == ([*range(14, 21)], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("fields", "output", "reason"),
    [
        ({"max_new_tokens": 3}, [14, 15, 16], FinishReason.LENGTH),
        ({"max_new_tokens": 2}, [14, 15], FinishReason.LENGTH),
        ({"stop_tokens": (16,)}, [14, 15, 16], FinishReason.STOP),
        ({"stop_tokens": (15, 16)}, [14, 15], FinishReason.STOP),
        ({"true_new_tokens": 4}, [14, 15, 16, 17], FinishReason.STOP),
    ],
)
def test_a_request_ends_among_its_drafts(fields: dict[str, Any], output: list[int], reason: FinishReason) -> None:
    """At its limit there are fewer drafts: with one token left, none."""
    engine, request = make(NEXT, **fields)
    step = in_flight(engine)
    drafts = 0 if step.drafts is None else step.drafts.item()
    assert drafts == min(4, fields.get("max_new_tokens", 20) - 2)
    absorb(engine)
    assert (request.output, request.finish_reason) == (output, reason)
    assert engine.state.pool.num_used == 0 and engine.record.tokens()[0].tolist() == [7] * len(output)


def test_a_stop_string_sees_accepted_tokens_only_up_to_its_end() -> None:
    engine, request = make([15, 16, 99], stop_strings=("x",))
    seen: list[int] = []
    engine.state.ends_text = lambda _, token: bool(seen.append(token)) or token == 16
    engine.run()
    assert seen == [15, 16] and request.output == [14, 15, 16]


def test_a_preempted_request_keeps_what_is_accepted_in_flight() -> None:
    """It cannot be admitted again before; then it recomputes its accepted tokens too."""
    engine, request = make([15, 16, 99])
    in_flight(engine)
    engine.state.preempt(request)
    assert (request.num_computed, request.num_ready, request.num_lost_tokens) == (0, 0, 5)
    plan = engine.view.plan()
    assert plan.add(request) == 0 and plan.refusal is Refusal.NOT_READY
    absorb(engine)
    assert counters(request) == (8, 8, 0, 8)
    assert request.num_lost_tokens == 7, "of 8 known tokens, the newest one had no keys and values yet"
    engine.run()
    assert request.output == [*range(14, 34)]
    assert request.num_recomputed_tokens == 7


def test_a_preempted_request_ends_by_what_is_accepted_in_flight() -> None:
    """Its last token is known with the outcome, and no token is in flight: it leaves the waiting requests once."""
    engine, request = make(NEXT, max_new_tokens=6)
    in_flight(engine)
    engine.state.preempt(request)
    absorb(engine)
    assert (request.output, request.finish_reason) == ([14, *NEXT, 19], FinishReason.LENGTH)
    assert not engine.view.waiting and engine.state.pool.num_used == 0


def test_a_cancelled_request_gets_no_token_of_its_drafts() -> None:
    engine, request = make(NEXT)
    in_flight(engine)
    engine.cancel(request)
    absorb(engine)
    assert request.output == [14] and engine.state.table.num_drafting == engine.state.pool.num_used == 0


def test_a_request_that_stopped_gets_no_token_of_the_next_iteration_in_flight() -> None:
    engine, request = make(NEXT, NEXT, stop_tokens=(16,))
    in_flight(engine)
    in_flight(engine)
    absorb(engine)
    assert engine.state.pool.num_used == engine.state.pool.num_retiring > 0
    absorb(engine)
    assert (request.output, engine.state.num_overshoot_tokens) == ([14, 15, 16], 1)
    counts = [(step.num_drafted, step.num_drafts, step.num_accepted) for step in engine.record.steps[1:]]
    assert counts == [(1, 4, 1), (0, 4, 0)]  # the second one lowers no acceptance length
    assert engine.state.table.num_drafting == engine.state.pool.num_used == 0


@pytest.mark.parametrize(("absorbed", "output", "sent"), [(0, [14], 2), (1, [14, 15], 2), (2, [14, 15, 16, 17], 3)])
def test_a_moved_request_takes_its_known_tokens_along(absorbed: int, output: list[int], sent: int) -> None:
    """Full blocks of two tokens are sent up to the first token whose keys are still being written, or not written yet."""
    engine, request = make([99], [16, 99])
    in_flight(engine)
    in_flight(engine)
    for _ in range(absorbed):
        absorb(engine)
    moved = engine.give(request)
    assert (request.status, request.output, len(moved.blocks)) == (Status.MOVING, output, sent)
    for _ in range(2 - absorbed):
        absorb(engine)
    assert request.num_known == 4 + len(output) and engine.state.table.num_drafting == 0


def test_blocks_and_tokens_limit_drafts_but_no_decode() -> None:
    """The tokens of three decodes leave one of 10 blocks: the first request has 2 drafts in it, the last request 1 in its own block."""
    engine, request = make(blocks=10, max_new_tokens=10)
    others = [Request(id_, 4, 10, prompt=PROMPT) for id_ in (8, 9)]
    engine.policy.asked = False  # type: ignore[attr-defined]
    engine.submit(others)
    engine.step()
    plan = engine.view.plan()
    assert (plan.add_decodes(drafts={others[1]: 5, request: 4}), plan.free_blocks) == (3, 0)
    assert [count for _, count in plan.plan] == [1 + 2, 1, 1 + 1]
    assert plan.draft(request, 2) == 0


def test_a_request_with_a_token_in_flight_gets_drafts() -> None:
    engine, request = make()
    engine.policy.asked = False  # type: ignore[attr-defined]
    in_flight(engine)
    assert engine.view.plan().draft(request, 2) == 3 and engine.view.plan().draft(request, 0) == 1


@pytest.mark.parametrize("number", [-2, 1.5, "2"])
def test_drafts_are_whole_numbers_of_at_least_0(number: Any) -> None:
    engine, request = make()
    in_flight(engine)
    for ask in (
        lambda plan: plan.draft(request, number),
        lambda plan: plan.add_decodes(drafts=number),
        lambda plan: plan.add_decodes(drafts={request: number}),
        lambda plan: plan.add_decodes(drafts=lambda _: number),
    ):
        with pytest.raises(PlanError, match=re.escape(f"={number!r})")):
            ask(engine.view.plan())
    assert engine.view.plan().add_decodes(drafts=np.int64(2)) == 1


@pytest.mark.parametrize(("new", "most"), [(20, 5), (4, 2), (2, 0)])
def test_a_plan_has_no_more_drafts_than_can_be_received(new: int, most: int) -> None:
    class Written(Greedy):
        def plan(self, view: View) -> Plan:
            return Plan([(request, most + 2) for request in view.decoding]) if view.decoding else super().plan(view)

    engine, _ = make(policy=Written(), max_new_tokens=new)
    with pytest.raises(
        PlanError, match=f"request 7: illegal plan .{most + 2} planned, 1 ready, with at most {most} of 5 drafts"
    ):
        engine.step()


def test_survivals_are_moving_means_and_begin_with_those_of_the_run() -> None:
    """Three drafts: the first was accepted, the second was not, and nothing is known of the third."""
    engine, request = make([15, 99, 17])
    assert engine.view.drafts.survivals(request) == [1.0] * 5
    engine.step()
    first, second = 1.0, 1 - 1 / 8
    assert engine.view.drafts.survivals(request) == pytest.approx([first, *[first * second] * 4])
    other = Request(8, 4, 20, prompt=PROMPT)
    assert engine.view.drafts.survivals(other) == pytest.approx([1.0, *[0.5] * 4])


def reference(tokens: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for place in range(len(tokens) - n):
            if tokens[place : place + n] == tokens[len(tokens) - n :]:
                return tokens[place + n : place + n + k]
    return []


@given(
    st.lists(st.sampled_from([0, 1, 256, 65536]), max_size=30), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3)
)
def test_the_longest_end_that_came_before_is_continued(tokens: list[int], k: int, min_n: int, more: int) -> None:
    """Also where bytes of one token look like those of another."""
    proposed = NgramDrafter(5, min_n, min_n + more).propose(np.array(tokens, np.int32), k)
    assert proposed.tolist() == reference(tokens, k, min_n, min_n + more)


@given(st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 3))
def test_drafts_of_many_requests_are_those_of_each(texts: list[list[int]], min_n: int, more: int) -> None:
    """What follows a text is not read."""
    drafter, filled = NgramDrafter(5, min_n, min_n + more), torch.randint(0, 3, (len(texts), 32), dtype=torch.int32)
    for row, text in enumerate(texts):
        filled[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    proposed = drafter.propose_each(filled, lengths, 4)
    assert proposed.dtype is torch.int32
    expected = [reference(text, 4, min_n, min_n + more) for text in texts]
    assert proposed.tolist() == [[*drafts, *[NO_DRAFT] * (4 - len(drafts))] for drafts in expected]


def test_the_earliest_occurrence_counts() -> None:
    """As vLLM's search does: [1, 2] came three times, and [9, 1, 2] never."""
    tokens = np.array([1, 2, 3, 4, 1, 2, 5, 6, 9, 1, 2], np.int32)
    assert NgramDrafter(3, 2, 3).propose(tokens, 3).tolist() == [3, 4, 1]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (3, 0, 1), (3, 2, 1)])
def test_sizes_of_a_drafter_are_checked(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        NgramDrafter(*sizes)
