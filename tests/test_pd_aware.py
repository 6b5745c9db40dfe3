"""The P:D-aware chunk against an exhaustive sweep, stated and estimated, and when the ratio drifts."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from schedules import make_engine

from cbatch import BatchShape, ConfigError, CostModel, Engine, Limits, Request
from cbatch.sim.executor import SimExecutor
from policies.chunking import ChunkSelector, PDAware, TileAligned, pd_aware
from policies.chunking.steady_state import best_total, steady_state_seconds
from policies.longest_first import LongestFirst
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

LENGTH, BATCH, TILE = 1024, 18, 128


class TiledCost:
    """An A6000-like GPU: whole tiles of 128 tokens, a floor for reading the weights, attention by context."""

    def predict(self, shape: BatchShape) -> float:
        tiles = -(-shape.num_tokens // TILE)
        scores = sum(tokens * (context + tokens / 2) for tokens, context in shape.chunks)
        return max(0.044, 0.015 + 0.0275 * tiles) + 1e-6 * shape.decode_context + 2e-8 * scores


def throughput(selector: ChunkSelector, lengths: list[tuple[int, int]]) -> float:
    """Tokens a second from the end of the first request to that of the last but one batch: fill and drain left out."""
    limits = Limits(BATCH, 4096, 4096, tile=TILE)
    cost = TiledCost()
    engine = Engine(Sarathi(selector), SimExecutor(cost), limits, cost, num_blocks=10**5, block_size=16)
    engine.submit(Request(index, prompt, output) for index, (prompt, output) in enumerate(lengths))
    ended = engine.run().requests
    window = ended[BATCH : len(ended) - BATCH]
    tokens = sum(request.max_tokens for request in window)
    return tokens / (window[-1].finished_at - ended[BATCH - 1].finished_at)  # type: ignore[operator]


def split(pd_ratio: float) -> tuple[int, int]:
    output = max(round(LENGTH / (1 + pd_ratio)), 1)
    return LENGTH - output, output


def best_for(pd_ratio: float) -> int:
    prompt, output = split(pd_ratio)
    return best_total(TiledCost(), Limits(BATCH, 4096, 4096, tile=TILE), [prompt], output)


@pytest.mark.parametrize("pd_ratio", [2, 5, 14, 28, 50])
@pytest.mark.parametrize("stated", [True, False])
def test_its_throughput_is_within_2_percent_of_the_best_of_a_sweep(pd_ratio: float, stated: bool) -> None:
    lengths = [split(pd_ratio)] * 120
    swept = {total: throughput(TileAligned(total), lengths) for total in range(TILE, LENGTH + 1, TILE)}
    selector = PDAware(pd_ratio if stated else None)
    assert throughput(selector, lengths) >= 0.98 * max(swept.values()), (selector.total, swept)


@pytest.mark.parametrize(("prompt", "output"), [(1000, 200), (2000, 60), (300, 300), (900, 64)])
def test_requests_of_all_lengths_are_served_within_3_percent_of_the_sweep(prompt: int, output: int) -> None:
    random = np.random.default_rng(0)
    prompts = np.clip(random.lognormal(np.log(prompt), 0.7, 200), 4, 3000).astype(int)
    outputs = np.clip(random.lognormal(np.log(output), 0.7, 200), 1, 1000).astype(int)
    lengths = list(zip(prompts.tolist(), outputs.tolist(), strict=True))
    swept = max(throughput(TileAligned(total), lengths) for total in (128, 256, 384, 512, 768, 1024, 2048))
    assert throughput(PDAware(), lengths) >= 0.97 * swept


def test_a_total_that_suits_the_mean_prompt_alone_is_not_chosen() -> None:
    """Two tiles hold the mean prompt, but leave half of all prompts a second chunk that is nearly empty."""
    limits = Limits(4, 4096, 4096, tile=TILE)
    total = best_total(TiledCost(), limits, [250.0], 2)
    assert total == 256
    prompts = [130.0, 250.0, 260.0, 360.0]
    seconds = {
        total: sum(steady_state_seconds(TiledCost(), total, 4, prompt, 1 + prompt / 250) for prompt in prompts)
        for total in range(TILE, 1025, TILE)
    }
    assert best_total(TiledCost(), limits, prompts, 2) == min(seconds, key=lambda total: seconds[total]) != 256


def test_the_gain_of_chunk_256_over_the_baseline_peaks_at_the_ratio_of_the_paper() -> None:
    """With a total of 256 and B = 18 the peak lies at P:D = C / (B - 1) - 1 = 14 (SARATHI, fig. 9)."""

    def gain(pd_ratio: float) -> float:
        prompt, output = split(pd_ratio)
        alone = TiledCost().predict(BatchShape(((prompt, 0),)))
        decodes = TiledCost().predict(BatchShape((), BATCH, round(BATCH * (prompt + output / 2))))
        baseline = alone + output / BATCH * decodes
        return baseline / steady_state_seconds(TiledCost(), 256, BATCH, prompt, output)

    assert abs(max(range(2, 60), key=gain) - 14) <= 2


def test_it_follows_a_drift_of_the_ratio() -> None:
    selector = PDAware(window=32)
    throughput(selector, [split(2)] * 100)
    before = selector.total
    throughput(selector, [split(50)] * 100)
    assert before == best_for(2)
    assert selector.total == best_for(50)
    assert before != selector.total


def test_tiny_limits_still_leave_room_for_a_chunk() -> None:
    engine = make_engine(Sarathi(PDAware()), Limits(2, 4, 100, tile=4))
    engine.submit(Request(index, 9, 3) for index in range(4))
    assert len(engine.run().requests) == 4


# -- what it asks of the steady state ---------------------------------------------------------------------------------


@dataclass
class Asked:
    """Stands for `best_total`: keeps the prompts and the output length that a total is to be chosen for."""

    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)

    def __call__(self, cost: CostModel, limits: Limits, prompts: list[int], output: float) -> int:
        self.prompts.append(prompts)
        self.outputs.append(output)
        return 4 * len(self.outputs)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(pd_aware, "best_total", asked)
    return asked


class Queue:
    """A view in which requests wait and none runs."""

    cost, limits, running = TiledCost(), Limits(3, 100, 100, tile=4), ()

    def __init__(self, *waiting: Request) -> None:
        self.waiting = waiting


def ended(prompt: int, output: int) -> Request:
    request = Request(0, prompt, 100)
    request.num_output_tokens = output
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
    assert (asked.prompts, asked.outputs) == ([typical], [6])


def test_the_output_is_the_mean_of_ended_requests_or_follows_from_the_ratio(asked: Asked) -> None:
    for ratio in (None, 5.0):
        selector = PDAware(ratio)
        for prompt, output in ((10, 2), (20, 3), (60, 10)):
            selector.observe(ended(prompt, output))
        choose(selector)
    assert asked.outputs == [(2 + 3 + 10) / 3, (10 + 20 + 60) / 3 / 5]


def test_only_the_requests_in_the_window_count_and_those_without_output_never(asked: Asked) -> None:
    selector = PDAware(window=2)
    for prompt, output in ((50, 50), (10, 2), (10, 4), (70, 0)):
        selector.observe(ended(prompt, output))
    choose(selector)
    assert (asked.prompts, asked.outputs) == ([[10]], [3])


def test_before_the_first_end_it_takes_the_lengths_of_the_first_batch_as_predicted(asked: Asked) -> None:
    """3 places: the fourth request does not count. Where nothing is predicted the limit stands for the length."""
    choose(PDAware(), Request(0, 8, 90, predicted_new_tokens=3), Request(1, 8, 5), Request(2, 8, 7), Request(3, 99, 1))
    assert (asked.prompts, asked.outputs) == ([[8]], [(3 + 5 + 7) / 3])
    choose(PDAware())
    assert (asked.prompts[1], asked.outputs[1]) == ([1], 1)


def test_it_chooses_again_when_a_length_has_changed_by_more_than_the_tolerance(asked: Asked) -> None:
    selector = PDAware(window=1, tolerance=0.25)
    for prompt, output, choices in ((100, 20, 1), (100, 25, 1), (100, 15, 1), (100, 26, 2), (130, 26, 3), (98, 26, 3)):
        selector.observe(ended(prompt, output))
        choose(selector)
        assert len(asked.outputs) == choices, (prompt, output)


@pytest.mark.parametrize("policy", [Sarathi, SarathiServe, LongestFirst])
def test_policies_tell_it_of_requests_that_have_ended(policy: type[Sarathi | SarathiServe], asked: Asked) -> None:
    selector = PDAware()
    policy(selector).on_finish(ended(12, 5))
    choose(selector)
    assert (asked.prompts, asked.outputs) == ([[12]], [5])


def test_decodes_count_into_the_total(asked: Asked) -> None:
    selector = PDAware()
    assert [choose(selector, Request(0, 8, 8), num_decodes=number) for number in (0, 1, 4, 5)] == [4, 3, 0, 0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PDAware(0), "chunking.pd_ratio=0 must be above 0"),
        (lambda: PDAware(window=0), "chunking.window=0 and chunking.tolerance=0.05: need >= 1 and >= 0"),
        (lambda: PDAware(tolerance=-0.1), "chunking.window=32 and chunking.tolerance=-0.1"),
        (lambda: PDAware().check(Limits(2, 127, 100, tile=128)), "max_tokens=127 has no room for a tile of 128 tokens"),
        (lambda: PDAware().check(Limits(6, 5, 100, tile=4)), "max_tokens=5 has no room .* beside 5 decodes"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_the_least_that_works_is_taken() -> None:
    PDAware(0.01, window=1, tolerance=0).check(Limits(6, 6, 100, tile=4))
    PDAware().check(Limits(2, 128, 100, tile=128))
