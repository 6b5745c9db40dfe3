"""The P:D-aware chunk against an exhaustive sweep, stated and estimated, and when the ratio drifts."""

import numpy as np
import pytest

from cbatch import BatchShape, Engine, Limits, Request
from cbatch.sim.executor import SimExecutor
from policies.chunking import ChunkSelector, PDAware, TileAligned
from policies.chunking.steady_state import best_total, steady_state_seconds
from policies.sarathi import Sarathi

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


@pytest.mark.long
@pytest.mark.parametrize("pd_ratio", [2, 14, 50])
def test_its_throughput_is_within_2_percent_of_the_best_of_a_sweep(pd_ratio: float) -> None:
    lengths = [split(pd_ratio)] * 120
    swept = {total: throughput(TileAligned(total), lengths) for total in range(TILE, LENGTH + 1, TILE)}
    for selector in (PDAware(pd_ratio), PDAware()):
        assert throughput(selector, lengths) >= 0.98 * max(swept.values()), (selector.total, swept)


def test_an_infinite_tolerance_keeps_the_first_choice() -> None:
    """Prompts of 100 tokens, then of 900, between which another selector chooses again; the run does not stall without a first choice."""
    lengths = [(100, 50)] * 40 + [(900, 50)] * 40
    for tolerance, expected in ((float("inf"), best_for_lengths(100)), (0.05, best_for_lengths(900))):
        throughput(selector := PDAware(tolerance=tolerance), lengths)
        assert selector.total == expected


def best_for_lengths(prompt: int) -> int:
    return best_total(TiledCost(), Limits(BATCH, 4096, 4096, tile=TILE), [prompt], 50)


@pytest.mark.long
@pytest.mark.parametrize(("prompt", "output"), [(2000, 60), (300, 300)])
def test_requests_of_all_lengths_are_served_within_3_percent_of_the_sweep(prompt: int, output: int) -> None:
    random = np.random.default_rng(0)
    prompts = np.clip(random.lognormal(np.log(prompt), 0.7, 120), 4, 3000).astype(int)
    outputs = np.clip(random.lognormal(np.log(output), 0.7, 120), 1, 1000).astype(int)
    lengths = list(zip(prompts.tolist(), outputs.tolist(), strict=True))
    swept = max(throughput(TileAligned(total), lengths) for total in (128, 256, 512, 1024, 2048))
    assert throughput(PDAware(), lengths) >= 0.97 * swept


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
