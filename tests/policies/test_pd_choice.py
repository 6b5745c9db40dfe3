"""What the P:D-aware chunk asks for, of lengths given by hand, and the steady state that answers, iteration by iteration."""

from dataclasses import dataclass, field

import pytest
from schedules import UnitCost

from cbatch import BatchShape, CostModel, FinishReason, Limits, Request
from policies.chunking import PDAware, pd_aware, steady_state
from policies.chunking.steady_state import best_total, steady_state_seconds

Asked = list[tuple[list[int], float]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The prompts and the output lengths that totals are to be chosen for."""
    asked = Asked()

    def best_total(cost: CostModel, limits: Limits, prompts: list[int], output: float) -> int:
        assert (cost, limits) == (Queue.cost, Queue.limits)
        asked.append((prompts, output))
        return 4 * len(asked)

    monkeypatch.setattr(pd_aware, "best_total", best_total)
    return asked


class Queue:
    """A view in which requests wait and none runs."""

    cost, limits, running = UnitCost(), Limits(3, 100, 100, tile=4), ()

    def __init__(self, *waiting: Request) -> None:
        self.waiting = waiting


def ended(prompt: int, output: int) -> Request:
    request = Request(0, prompt, 100)
    request.num_output_tokens = output
    request.finish_reason = FinishReason.LENGTH
    return request


def choose(selector: PDAware, *waiting: Request, num_decodes: int = 0) -> int:
    return selector.num_tokens(Queue(*waiting), num_decodes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "typical"),
    [
        ([5, 5, 5], [5]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]),
        # of each pair the longer one; a prompt of 900 counts as one among sixteen
        ([900, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [2, 4, 6, 8, 10, 12, 14, 900]),
        ([10, 30], [10, 10, 10, 10, 30, 30, 30, 30]),
    ],
)
def test_typical_prompts_are_the_medians_of_the_eighths(asked: Asked, prompts: list[int], typical: list[int]) -> None:
    selector = PDAware()
    for prompt in prompts:
        selector.observe(ended(prompt, 6))
    choose(selector)
    assert asked == [(typical, 6)]


def test_the_output_is_the_mean_of_ended_requests_or_follows_from_the_ratio(asked: Asked) -> None:
    for ratio in (None, 5.0):
        selector = PDAware(ratio)
        for prompt, output in ((10, 2), (20, 3), (60, 10)):
            selector.observe(ended(prompt, output))
        choose(selector)
    assert [output for _, output in asked] == [(2 + 3 + 10) / 3, (10 + 20 + 60) / 3 / 5]


def test_only_the_requests_in_the_window_count_and_those_that_were_not_served_never(asked: Asked) -> None:
    selector = PDAware(window=2)
    for prompt, output in ((50, 50), (10, 2), (10, 4)):
        selector.observe(ended(prompt, output))
    left = ended(70, 5)
    left.finish_reason = FinishReason.CANCELLED
    selector.observe(left)
    choose(selector)
    assert asked == [([10], 3)]


def test_before_the_first_end_it_takes_the_lengths_of_the_first_batch_as_predicted(asked: Asked) -> None:
    """3 places: the fourth request does not count. Where nothing is predicted the limit stands for the length."""
    choose(PDAware(), Request(0, 8, 90, predicted_new_tokens=3), Request(1, 8, 5), Request(2, 8, 7), Request(3, 99, 1))
    choose(PDAware())
    assert asked == [([8], (3 + 5 + 7) / 3), ([1], 1)]


def test_it_chooses_again_when_a_length_has_changed_by_more_than_the_tolerance(asked: Asked) -> None:
    selector = PDAware(window=1, tolerance=0.25)
    for prompt, output, choices in ((100, 20, 1), (100, 25, 1), (100, 15, 1), (100, 26, 2), (130, 26, 3), (98, 26, 3)):
        selector.observe(ended(prompt, output))
        choose(selector)
        assert len(asked) == choices, (prompt, output)


def test_decodes_count_into_the_total(asked: Asked) -> None:
    selector = PDAware()
    assert selector.total == 0  # not chosen yet
    assert [choose(selector, Request(0, 8, 8), num_decodes=number) for number in (0, 1, 4, 5)] == [4, 3, 0, 0]


# -- the steady state -------------------------------------------------------------------------------------------------


@dataclass
class Noted:
    """A second for an iteration with a chunk, three without; notes chunk, its context, decodes, their context in all."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def predict(self, shape: BatchShape) -> float:
        chunks = [number for chunk in shape.chunks for number in chunk]
        self.shapes.append((*chunks, shape.num_decodes, shape.decode_context))
        return 1.0 if shape.chunks else 3.0


@pytest.mark.parametrize(
    ("total", "prompt", "output", "seconds", "shapes"),
    [
        # the picture: two chunks of 2 beside two decodes, then 4 decodes; 6 iterations of one in three slots
        (4, 4, 5, 2.0, [(2, 2, 2, 13), (2, 0, 2, 13)]),
        # 8 decodes: a request lives 10 iterations, a third of them its own; 2 with a chunk, 4 / 3 without
        (4, 4, 9, 2 + 3 * 4 / 3, [(2, 2, 2, 17), (2, 0, 2, 17), (3, 26)]),
        (4, 4, 6, 2 + 3 * 1 / 3, [(2, 2, 2, 14), (2, 0, 2, 14), (3, 21)]),
        # a single decode for two chunks: half a one beside each, rounded to none; 3.5 tokens, then what is left, at least 1
        (4, 4, 2, 2.0, [(1, 3, 0, 0), (4, 0, 0, 0)]),
        # the whole prompt beside its two decodes; nothing is left to do without one
        (8, 6, 3, 1.0, [(6, 0, 2, 15)]),
        # three chunks of 2: the last after 4 tokens, the two before after 1 on average; four: after 6, and after 2
        (4, 6, 7, 3.0, [(2, 4, 2, 19), (2, 1, 2, 19)]),
        (4, 8, 9, 4.0, [(2, 6, 2, 25), (2, 2, 2, 25)]),
        # an output of one token has no decodes
        (4, 4, 1, 1.0, [(4, 0, 0, 0)]),
        # no room for more than a token of the prompt
        (3, 2, 9, 2 + 3 * 4 / 3, [(1, 1, 2, 13), (1, 0, 2, 13), (3, 20)]),
    ],
)
def test_seconds_of_a_request_in_the_steady_state(
    total: int, prompt: int, output: int, seconds: float, shapes: list[tuple[int, ...]]
) -> None:
    """Three slots. A decode sees the prompt and half of the output."""
    cost = Noted()
    assert steady_state_seconds(cost, total, 3, prompt, output) == pytest.approx(seconds)
    assert cost.shapes == shapes


class Linear:
    """Every iteration costs a second, and each token a little."""

    def __init__(self, per_token: float) -> None:
        self.per_token = per_token

    def predict(self, shape: BatchShape) -> float:
        return 1.0 + self.per_token * shape.num_tokens


@pytest.mark.parametrize(
    ("limits", "prompts", "output", "total"),
    [
        # the fewest iterations: the smallest total that holds the whole prompt beside two decodes
        (Limits(3, 100, 100, tile=4), [16], 3, 20),
        (Limits(3, 20, 100, tile=4), [16], 3, 20),
        (Limits(3, 19, 100, tile=4), [16], 3, 12),  # not above max_tokens: two iterations, which 12 are enough for
        (Limits(3, 3, 100, tile=4), [16], 3, 3),  # no multiple of the tile fits
        (Limits(9, 100, 100, tile=4), [4], 1, 12),  # not below the batch
        (Limits(8, 100, 100, tile=4), [4], 1, 8),
        (Limits(9, 8, 100, tile=4), [4], 1, 8),
    ],
)
def test_the_best_total_is_a_multiple_of_the_tile(limits: Limits, prompts: list[int], output: int, total: int) -> None:
    assert best_total(Linear(0.0), limits, prompts, output) == total


def test_the_best_total_counts_each_prompt_with_its_share_of_the_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 8 and 24 and outputs of 9 on average: 1 + 8 * 8 / 16 = 5 and 1 + 8 * 24 / 16 = 13.

    Totals reach over the longest prompt, its decodes and a tile. 16 is best for both prompts together, 12 for the slower one.
    """
    asked: dict[int, list[tuple[float, float]]] = {}

    def seconds(cost: CostModel, total: int, batch: int, prompt: float, output: float) -> float:
        assert batch == 3
        asked.setdefault(total, []).append((prompt, output))
        return {12: 5.0, 16: 1.0 if prompt == 8 else 8.0}.get(total, 100.0)

    monkeypatch.setattr(steady_state, "steady_state_seconds", seconds)
    assert best_total(UnitCost(), Limits(3, 40, 100, tile=4), [8, 24], 9) == 16
    assert asked == {total: [(8, 5), (24, 13)] for total in range(4, 29, 4)}
