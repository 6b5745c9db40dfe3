"""Published policies of deadlines where memory, batch or a setting is at its limit, as in `test_landscape_edges`."""

from types import SimpleNamespace
from typing import Any

import pytest
from unit_machine import golden, running, view_of

from cbatch import SLO, ConfigError, Limits, Plan, Request, StepRecord
from policies.chunking import Fixed, Slack
from policies.predictors import Oracle
from policies.qoserve import QoServe
from policies.shared.deadlines import deadline
from policies.slai import Slai

# -- slai -------------------------------------------------------------------------------------------------------------------


def test_at_most_128_decodes_come_before_the_prompts() -> None:
    """Of 130 tokens the prompt, of 9, gets the two that 128 of the 129 decodes leave."""
    decodes = ", ".join(f"d{number} 1/2 @0" for number in range(129))
    found = golden(Slai(130, tbt=0.5, offset=1), f"{decodes}, P 9/1 @0.5", batch=200)
    assert found.schedule.split(" | ")[1].split()[-2:] == ["d1271", "P2"]


def test_prompts_under_way_come_in_the_order_of_their_last_chunk() -> None:
    """B and A had their last chunks in iterations 5 and 3."""
    policy = Slai(4)
    a, b = Request(0, 9, 1), Request(1, 9, 1)
    policy._served = {a: 3, b: 5}
    served: list[Request] = []
    plan = SimpleNamespace(num_tokens=0, plan=Plan(), build=Plan, add=lambda request, *_, **__: served.append(request))
    view = view_of(
        prefilling=[b, a],
        decoding=[],
        now=0.0,
        plan=lambda: plan,
        running=[a, b],
        kv=SimpleNamespace(num_free=9, num_blocks=9),
        ready_decodes=lambda at_most: ([], 0),
    )
    policy.plan(view)
    assert served == [a, b]


def test_times_are_seconds_and_not_iterations() -> None:
    """Iterations of ten seconds: A decodes every other time, ten seconds after its last token, before B's prompt."""
    found = golden(Slai(4, tbt=10, offset=0), "A 2/3 @0, B 12/1 @10", tokens=4, seconds=lambda shape: 10.0)
    assert found.schedule == "A2 | B4 | A1 B3 | B4 | A1 B1"


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
    kv, none = (
        SimpleNamespace(num_free=free, num_blocks=100),
        {"prefilling": [], "ready_decodes": lambda most: ([], [])},
    )
    view = view_of(decoding=[decode], kv=kv, now=7.0, plan=lambda: nothing, **none)
    policy.plan(view)
    assert policy._last.times == {decode: pytest.approx(7 + 100 - offset * 1.5)}
    own = running(1, 5, 9, 1, slo=SLO(tbt=30.0))
    view.decoding, view.now = [decode, own], 8.0  # type: ignore[assignment, misc]
    policy.plan(view)
    assert policy._last.times[own] == pytest.approx(8 + 30 - offset * 1.5)
    assert policy._last.times[decode] == pytest.approx(7 + 100 - offset * 1.5), "until it has its next token"
    fixed = Slai(tbt=100.0, offset=0.0)
    fixed.plan(view)
    assert fixed._last.times[decode] == 108.0


def test_slai_needs_an_objective_above_0() -> None:
    with pytest.raises(ConfigError, match="tbt=0"):
        Slai(tbt=0)


# -- qoserve ------------------------------------------------------------------------------------------------------------------


def test_the_throughput_of_prompts_is_smoothed() -> None:
    """8,500 at first. 1,700 tokens in 0.1 s are 17,000 per second, of which half a percent counts."""
    policy = QoServe(Fixed(4), Oracle())
    policy.on_step(step(1.0, 1.1, 1700))
    assert policy._times.prompt_rate == pytest.approx(0.995 * 8500 + 0.005 * 17000)
    known = policy._times.prompt_rate
    policy.on_step(step(1.0, 1.2))  # no prompt; it ends at 1.2
    assert policy._times.prompt_rate == known
    policy.on_step(step(1.1, 1.3, 1700))  # launched early: it took from 1.2 to 1.3
    assert policy._times.prompt_rate == pytest.approx(0.995 * known + 0.005 * 17000)
    policy.on_step(step(1.0, 1.3, 1700))  # no time at all
    assert policy._times.prompt_rate == pytest.approx(0.995 * known + 0.005 * 17000)


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


def test_qoserve_checks_its_chunks() -> None:
    with pytest.raises(Exception, match="chunk"):
        QoServe(Fixed(50), Oracle()).check(Limits(8, 40, 100))


# -- slack --------------------------------------------------------------------------------------------------------------------

SIZES = [128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2552]
"""Those of the authors' code."""


def chunk(left: float, decodes: int = 1, most: int = 4000, free: int = 99_999) -> int:
    """The chunk where the first of the decodes is due in `left` seconds; a token takes 1 ms, and a fifth is added for safety."""
    due = [running(id_, 5, 9, 1, slo=SLO(ttft=1e-9, tbt=left + 7.0 * id_)) for id_ in range(decodes)]
    selector = Slack()
    view = view_of(
        decoding=due,
        now=100.0,
        limits=Limits(64, most, 10_000),
        kv=SimpleNamespace(num_free=free // 10 if free % 10 == 0 else free, block_size=10 if free % 10 == 0 else 1),
        cost=SimpleNamespace(predict=lambda shape: 1e-3 * shape.num_tokens),
    )
    return selector.num_tokens(view, decodes)


@pytest.mark.parametrize(("size", "smaller"), list(zip(SIZES[1:], SIZES, strict=False)))
def test_the_largest_size_that_ends_in_time(size: int, smaller: int) -> None:
    assert (chunk(1.2e-3 * size + 1e-6), chunk(1.2e-3 * size - 1e-6)) == (size - 1, smaller - 1)


def test_the_smallest_size_is_taken_even_if_it_is_late_and_the_largest_without_decodes() -> None:
    assert chunk(1e-9) == 127
    assert chunk(9.0, decodes=0) == 2552 and chunk(9.0, decodes=0, most=2047) == 1792
    assert chunk(9.0, decodes=0, most=100) == 100, "no size fits into an iteration"
    assert chunk(1e-9, decodes=40) == 128 - 40, "the first that is due counts"


def test_an_iteration_may_end_just_in_time() -> None:
    """A decode is due in 1.5 s; iterations of up to 256 tokens are predicted to take 1.25 s, and a fifth is added."""
    view: Any = view_of(
        decoding=[running(0, 5, 9, 1, slo=SLO(ttft=1e-9, tbt=1.5))],
        now=4.0,
        limits=Limits(64, 4000, 10_000),
        kv=SimpleNamespace(num_free=99_999, block_size=1),
        cost=SimpleNamespace(predict=lambda shape: 1.25 if shape.num_tokens <= 256 else 9.0),
    )
    assert Slack().num_tokens(view, 1) == 255


def test_with_less_than_32000_tokens_free_an_iteration_has_at_most_512() -> None:
    assert (chunk(9.0, free=31_999), chunk(9.0, free=32_000)) == (511, 2551)


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
    view: Any = view_of(
        decoding=[request],
        now=12.0,
        limits=Limits(64, 4000, 10_000),
        kv=SimpleNamespace(num_free=99_999, block_size=1),
        cost=SimpleNamespace(predict=lambda shape: 0.0),
    )
    selector.num_tokens(view, 1)
    view.now, request.total = 12.5, request.total + 2
    for left, size in ((due - 12.5, 2552), (due - 12.5 - 1e-6, 128)):
        view.cost = SimpleNamespace(predict=lambda shape, needed=due - 12.5 - 5e-7, left=left: needed / 1.2)
        view.now = due - left
        assert selector.num_tokens(view, 1) == size - 1
    selector.observe(request)
    assert not [kept for kept in vars(selector).values() if kept]
