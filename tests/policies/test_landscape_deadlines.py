"""Policies of deadlines: what is due when, what is late, and the chunk that ends in time."""

from types import SimpleNamespace
from typing import Any

import pytest
from unit_machine import golden, running, view_of

from cbatch import SLO, Limits, Plan, Request, StepRecord
from policies.chunking import Fixed, Slack
from policies.predictors import Oracle
from policies.qoserve import QoServe
from policies.shared.deadlines import deadline
from policies.slai import Slai

# -- slai -------------------------------------------------------------------------------------------------------------------


def test_at_most_128_decodes_come_before_the_prompts() -> None:
    """128 of the 129 decodes leave 2 of 130 tokens to the prompt of 9."""
    decodes = ", ".join(f"d{number} 1/2 @0" for number in range(129))
    found = golden(Slai(130, tbt=0.5, offset=1), f"{decodes}, P 9/1 @0.5", batch=200)
    assert found.schedule.split(" | ")[1].split()[-2:] == ["d1271", "P2"]


def test_prompts_under_way_come_in_the_order_of_their_last_chunk() -> None:
    """B and A had their last chunks in iterations 5 and 3."""
    policy, served = Slai(4), list[Request]()
    a, b = Request(0, 9, 1), Request(1, 9, 1)
    policy._served = {a: 3, b: 5}
    plan = SimpleNamespace(num_tokens=0, plan=Plan(), build=Plan, add=lambda request, *_, **__: served.append(request))
    kv = SimpleNamespace(num_free=9, num_blocks=9)
    lists: dict[str, Any] = {"prefilling": [b, a], "decoding": [], "running": [a, b]}
    policy.plan(view_of(now=0.0, plan=lambda: plan, kv=kv, ready_decodes=lambda at_most: ([], 0), **lists))
    assert served == [a, b]


def step(launched: float, received: float, prefill: int = 0) -> StepRecord:
    values = dict.fromkeys(StepRecord._fields, 0) | {"launched_at": launched, "received_at": received, "note": ""}
    return StepRecord(**{**values, "num_prefill_tokens": prefill})


@pytest.mark.parametrize(("free", "offset"), [(5, 5.0), (4, 10.0)])
def test_the_last_schedulable_time_is_five_mean_iterations_early_or_ten_from_96_percent_of_the_cache(
    free: int, offset: float
) -> None:
    """Iterations of 2 s and, as it was launched before the first had ended, of 1 s: 1.5 s on average."""
    policy, decode = Slai(tbt=100.0), running(0, 5, 9, 1)
    for record in (step(0.0, 2.0), step(1.0, 3.0)):
        policy.on_step(record)
    nothing = SimpleNamespace(plan=SimpleNamespace(preempt=()), num_tokens=0, build=lambda: None)
    kv = SimpleNamespace(num_free=free, num_blocks=100)
    none: dict[str, Any] = {"prefilling": [], "ready_decodes": lambda most: ([], [])}
    view: Any = view_of(decoding=[decode], kv=kv, now=7.0, plan=lambda: nothing, **none)
    policy.plan(view)
    assert policy._last.times == {decode: pytest.approx(7 + 100 - offset * 1.5)}
    own = running(1, 5, 9, 1, slo=SLO(tbt=30.0))
    view.decoding, view.now = [decode, own], 8.0
    policy.plan(view)
    assert policy._last.times[own] == pytest.approx(8 + 30 - offset * 1.5)
    assert policy._last.times[decode] == pytest.approx(7 + 100 - offset * 1.5), "until it has its next token"
    fixed = Slai(tbt=100.0, offset=0.0)
    fixed.plan(view)
    assert fixed._last.times[decode] == 108.0


# -- qoserve ------------------------------------------------------------------------------------------------------------------


def interactive(id_: int, arrival: float, prompt: int) -> Request:
    return Request(id_, prompt, 10, arrival_time=arrival, slo=SLO(ttft=6))


@pytest.mark.parametrize(("order", "expected"), [("hybrid", "I3 I2 I1 N1"), ("edf", "I2 I3 I1 N1")])
def test_qoserve_ranks_by_deadline_and_tokens_left(order: str, expected: str) -> None:
    """Hybrid: I1 9.8 + 6 + 8 = 23.8, I2 9 + 6 + 1.6 = 16.6, I3 9.2 + 6 + 0.8 = 16.0, N1 600 + 5.6 = 605.6."""
    prompts = (interactive(0, 9.8, 1000), interactive(1, 9.0, 200), interactive(2, 9.2, 100))
    requests = dict(zip(("I1", "I2", "I3"), prompts, strict=True)) | {"N1": Request(3, 500, 200, slo=SLO(total=600))}
    policy = QoServe(Slack(), Oracle(), order)
    assert " ".join(sorted(requests, key=lambda name: policy.urgency(requests[name]))) == expected
    if order == "hybrid":
        urgencies = {name: policy.urgency(request)[1] for name, request in requests.items()}
        assert urgencies == pytest.approx({"I1": 23.8, "I2": 16.6, "I3": 16.0, "N1": 605.6})


def test_qoserve_relegates_what_cannot_be_in_time() -> None:
    """8 tokens per second: 16 tokens take 2 s, and B's first token is due 1 s after its arrival; A and C come first."""
    policy = QoServe(Fixed(8), Oracle(), "edf")
    policy._times.prompt_rate = 8.0
    slos = {"A": SLO(ttft=9), "B": SLO(ttft=1), "C": SLO(ttft=9)}
    assert golden(policy, "A 8/1 @0, B 16/1 @0, C 8/1 @0", slo=slos).schedule == "A8 | C8 | B8 | B8"
    kept = QoServe(Fixed(8), Oracle(), "edf", relegate=False)
    assert golden(kept, "A 8/1 @0, B 16/1 @0, C 8/1 @0", slo=slos).schedule == "B8 | B8 | A8 | C8"


def test_the_throughput_of_prompts_is_smoothed() -> None:
    """8,500 at first. 1,700 tokens in 0.1 s are 17,000 per second, of which half a percent counts."""
    policy, rate = QoServe(Fixed(4), Oracle()), 0.995 * 8500 + 0.005 * 17000
    again = 0.995 * rate + 0.005 * 17000
    for record, expected in (
        (step(1.0, 1.1, 1700), rate),
        (step(1.0, 1.2), rate),  # no prompt; it ends at 1.2
        (step(1.1, 1.3, 1700), again),  # launched early: it took from 1.2 to 1.3
        (step(1.0, 1.3, 1700), again),  # no time at all
    ):
        policy.on_step(record)
        assert policy._times.prompt_rate == pytest.approx(expected)


@pytest.mark.parametrize(
    ("slo", "misses"),
    [
        (SLO(ttft=3.0), False),  # due at 10: 8 + 16 tokens at 8 per second are exactly in time
        (SLO(ttft=2.9), True),
        (SLO(total=15.0), False),  # due at 22, and 30 tokens of output take 12 s
        (SLO(total=14.9), True),
        (SLO(), False),  # due at 1807
    ],
)
def test_a_prompt_is_late_that_cannot_end_before_its_deadline(slo: SLO, misses: bool) -> None:
    policy, request = QoServe(Fixed(4), Oracle()), Request(0, 16, 30, arrival_time=7.0, slo=slo)
    policy._times.prompt_rate = 8.0
    waits = view_of(now=8.0, is_waiting=lambda request: True)
    assert policy._misses(request, waits) is misses
    assert deadline(request) == 7 + (slo.ttft or slo.total or 1800)
    assert not policy._misses(request, view_of(now=8.0, is_waiting=lambda request: False))
    policy._relegated.add(request)
    assert not policy._misses(request, waits), "once is enough"


# -- slack --------------------------------------------------------------------------------------------------------------------

SIZES = [128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2552]
"""Those of the authors' code."""


def slack_view(due: list[Any], now: float, seconds: Any, most: int = 4000, blocks: int = 99_999, block: int = 1) -> Any:
    kv, cost = SimpleNamespace(num_free=blocks, block_size=block), SimpleNamespace(predict=seconds)
    return view_of(decoding=due, now=now, limits=Limits(64, most, 10_000), kv=kv, cost=cost)


def chunk(left: float, decodes: int = 1, most: int = 4000, blocks: int = 99_999, block: int = 1) -> int:
    """The chunk where the first of the decodes is due in `left` seconds; a token takes 1 ms, and a fifth is added for safety."""
    due = [running(id_, 5, 9, 1, slo=SLO(ttft=1e-9, tbt=left + 7.0 * id_)) for id_ in range(decodes)]
    view = slack_view(due, 100.0, lambda shape: 1e-3 * shape.num_tokens, most, blocks, block)
    return Slack().num_tokens(view, decodes)


@pytest.mark.parametrize(("size", "smaller"), list(zip(SIZES[1:], SIZES, strict=False)))
def test_the_largest_size_that_ends_in_time(size: int, smaller: int) -> None:
    assert (chunk(1.2e-3 * size + 1e-6), chunk(1.2e-3 * size - 1e-6)) == (size - 1, smaller - 1)


def test_chunks_at_their_limits() -> None:
    assert chunk(1e-9) == 127, "late"
    assert chunk(9.0, decodes=0) == 2552 and chunk(9.0, decodes=0, most=2047) == 1792
    assert chunk(9.0, decodes=0, most=100) == 100, "no size fits into an iteration"
    assert chunk(1e-9, decodes=40) == 128 - 40, "the first that is due counts"
    assert (chunk(9.0, blocks=31_999), chunk(9.0, blocks=3200, block=10)) == (511, 2551), "less than 32,000 tokens free"
    due = [running(0, 5, 9, 1, slo=SLO(ttft=1e-9, tbt=1.5))]
    just = slack_view(due, 4.0, lambda shape: 1.25 if shape.num_tokens <= 256 else 9.0)
    assert Slack().num_tokens(just, 1) == 255, "1.25 s and a fifth are the 1.5 s that are left"


@pytest.mark.parametrize(
    ("slo", "due"),
    [
        (SLO(), 12.0 + 3 * 0.4),  # from its first token
        (SLO(ttft=1.0), 12.0 + 3 * 0.05),  # due at 11, late
        (SLO(ttft=4.0), 14.0 + 3 * 0.05),  # early: the objective counts
        (SLO(ttft=4.0, tbt=0.1), 14.0 + 3 * 0.1),
        (SLO(tbt=0.1), 12.0 + 3 * 0.1),
    ],
)
def test_when_the_next_token_is_due(slo: SLO, due: float) -> None:
    """It arrived at 10 s; of its tokens the first was there at 12 s, the third at 12.5 s."""
    selector, request = Slack(), running(0, 5, 9, 1, arrival_time=10.0, slo=slo)
    view = slack_view([request], 12.0, lambda shape: 0.0)
    selector.num_tokens(view, 1)
    view.now, request.total = 12.5, request.total + 2
    for left, size in ((due - 12.5, 2552), (due - 12.5 - 1e-6, 128)):
        view.cost = SimpleNamespace(predict=lambda shape, needed=due - 12.5 - 5e-7, left=left: needed / 1.2)
        view.now = due - left
        assert selector.num_tokens(view, 1) == size - 1
    selector.observe(request)
    assert not [kept for kept in vars(selector).values() if kept]
