"""Workloads: the same fields make the same requests, distributions have the stated parameters, bad settings are refused."""

import heapq
import json
import math
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import message

from cbatch import Request
from experiments.workloads import (
    AllAtOnce,
    ClosedBatch,
    DailyArrivals,
    FixedLengths,
    GammaArrivals,
    MixedLengths,
    OpenLoop,
    PromptFile,
    TraceLengths,
    UniformLengths,
    ZipfLengths,
)
from experiments.workloads.base import SamplingKeys
from experiments.workloads.lengths import split
from experiments.workloads.seeds import Purpose, generator


@dataclass(frozen=True)
class Letters:
    """A vocabulary: a letter is a token."""

    size: int = 128
    stop_tokens: tuple[int, ...] = (4,)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"{message['role']}>{message['content']}" for message in messages))


facts = attrgetter(
    *("id", "num_prompt_tokens", "max_new_tokens", "arrival_time", "prompt", "sampling"),
    *("stop_tokens", "priority", "client"),
)
"""Returns all that a workload without annotations says of a request."""


def open_loop(seed: int = 0, num: int = 50, rate: float = 2.0, cv: float = 1.0) -> OpenLoop:
    lengths = UniformLengths(min_length=8, max_length=64, pd_ratio=3)
    return OpenLoop(seed=seed, num_requests=num, arrivals=GammaArrivals(rate=rate, cv=cv), lengths=lengths)


def mixed(long_share: float, seed: int = 0, num: int = 2000) -> list[Request]:
    lengths = {
        "short": {"share": 1 - long_share, "lengths": UniformLengths(min_length=8, max_length=64, pd_ratio=3)},
        "long": {"share": long_share, "lengths": FixedLengths(length=1000, pd_ratio=9)},
    }
    workload = OpenLoop(seed=seed, num_requests=num, arrivals=AllAtOnce(), lengths=MixedLengths(parts=lengths))
    return workload.requests(None)


def test_a_share_of_the_requests_is_long() -> None:
    """5% of 2,000 are long, within four standard deviations of 9.7. Each kind has its own seed; fewer requests are a prefix of more."""
    requests = mixed(0.05)
    long = [request for request in requests if request.num_prompt_tokens == 900]
    assert len(long) == pytest.approx(100, abs=39)
    assert {request.max_new_tokens for request in long} == {100}
    assert all(request.max_tokens <= 64 for request in requests if request not in long)
    assert [facts(request) for request in mixed(0.05, num=300)] == [facts(request) for request in requests[:300]]
    few, many = ([r.max_tokens for r in mixed(share) if r.max_tokens <= 64] for share in (0.05, 0.5))
    assert few[: len(many)] == many, "the short requests are the same, whatever the share of long ones"


# -- the same fields, the same requests -------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**40), num=st.integers(1, 40), more=st.integers(0, 20), real=st.booleans())
def test_requests_are_those_of_the_seed_and_a_prefix_of_more(seed: int, num: int, more: int, real: bool) -> None:
    vocabulary = Letters() if real else None
    few, many = open_loop(seed, num), open_loop(seed, num + more)
    expected = [facts(request) for request in few.requests(vocabulary)]
    assert [facts(request) for request in few.requests(vocabulary)] == expected
    assert [facts(request) for request in many.requests(vocabulary)][:num] == expected
    assert [request.id for request in few.requests(vocabulary)] == list(range(num))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**40), length=st.integers(3, 60))
def test_a_prompt_depends_on_seed_and_id_alone(seed: int, length: int) -> None:
    shared = OpenLoop(seed=seed, num_requests=5, arrivals=AllAtOnce(), lengths=FixedLengths(length=60, pd_ratio=1))
    other = ClosedBatch(seed=seed, num_requests=9, length=length, pd_ratio=1, batch=2)
    for one, two in zip(shared.requests(Letters()), other.requests(Letters()), strict=False):
        assert one.prompt is not None
        assert two.prompt is not None
        num = min(len(one.prompt), len(two.prompt))
        assert one.prompt[:num] == two.prompt[:num]
        assert one.sampling == two.sampling
    sampled = replace(shared, sampling=SamplingKeys(temperature=0.7, top_k=5, top_p=0.9)).requests(Letters())
    assert len({request.sampling.seed for request in sampled}) == len({tuple(r.prompt or ()) for r in sampled}) == 5
    assert {(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p) for r in sampled} == {(0.7, 5, 0.9)}


def test_arrivals_and_lengths_have_streams_of_their_own() -> None:
    base = open_loop()
    faster = open_loop(rate=8.0).requests(None)
    bursty = open_loop(cv=3.0).requests(None)
    times = [request.arrival_time for request in base.requests(None)]
    assert [request.arrival_time * 4 for request in faster] == pytest.approx(times)
    assert [r.max_tokens for r in bursty] == [r.max_tokens for r in base.requests(None)]
    fixed = replace(base, lengths=FixedLengths(length=10, pd_ratio=1), rate_scale=3.0).requests(None)
    assert [3 * request.arrival_time for request in fixed] == pytest.approx(times)


@pytest.mark.parametrize("column", ["arrival_time", "max_tokens", "predicted_new_tokens", "tier", "prompt", "sampling"])
def test_another_seed_draws_another_value_of_every_column(column: str) -> None:
    """The first arrival is always at 0; with two tiers, every other request may keep its tier; of prompts, the common part is compared."""
    lengths = ZipfLengths(min_length=8, max_length=5000, pd_ratio=3, theta=0.4)
    tiers, prediction = {"gold": {"share": 0.5}, "free": {"share": 0.5}}, {"error": 0.5}
    one = replace(open_loop(), lengths=lengths, tiers=tiers, prediction=prediction)
    first, second = (
        [getattr(request, column) for request in replace(one, seed=seed).requests(Letters())] for seed in (0, 1)
    )
    if column == "prompt":
        first, second = ([prompt[:6] for prompt in prompts] for prompts in (first, second))
    assert sum(one == two for one, two in zip(first, second, strict=True)) <= (40 if column == "tier" else 5)


def test_stop_tokens_are_honoured_only_on_request_and_only_where_there_are_tokens(tmp_path: Path) -> None:
    plain = open_loop(num=3)
    stopping = replace(plain, ignore_eos=False)
    assert {request.stop_tokens for request in plain.requests(Letters())} == {()}
    assert {request.stop_tokens for request in stopping.requests(Letters())} == {(4,)}
    assert {request.stop_tokens for request in stopping.requests(None)} == {()}
    assert {request.stop_tokens for request in stopping.requests(Letters(stop_tokens=()))} == {()}
    (prompt,) = prompt_file(tmp_path, {"prompt": "a"}).requests(Letters())
    assert prompt.stop_tokens == (4,), "by default"
    assert replace(prompt_file(tmp_path, {"prompt": "a"}), ignore_eos=True).requests(Letters())[0].stop_tokens == ()


# -- closed batch -----------------------------------------------------------------------------------------------------


@given(length=st.integers(2, 5000), share=st.floats(0, 1))
def test_prompt_and_output_sum_to_the_length_in_about_the_ratio(length: int, share: float) -> None:
    pd_ratio = (length - 1) ** (2 * share - 1)  # from 1 / (L - 1) to L - 1
    prompt_tokens, output_tokens = split(np.array([length]), pd_ratio)
    assert prompt_tokens + output_tokens == length
    assert prompt_tokens >= 1
    assert output_tokens >= 1
    assert abs(output_tokens[0] - length / (1 + pd_ratio)) <= 0.5 + 1e-9


def test_staggers_by_hand() -> None:
    def arrivals(stagger: Any) -> list[int]:
        workload = ClosedBatch(length=12, pd_ratio=1, batch=3, num_requests=5, stagger=stagger)  # P = D = 6
        return [workload.source(None).iterations.get(id_, 0) for id_ in range(5)]

    assert arrivals(0) == [0, 0, 0, 0, 0]
    assert arrivals("even") == [0, 2, 4, 4, 4]  # as drawn in closed.py
    assert arrivals(3) == [0, 3, 6, 6, 6]
    assert arrivals(0.5) == [0, 1, 1, 1, 1]
    requests = ClosedBatch(length=1024, pd_ratio=14, batch=2).requests(None)
    assert {(request.num_prompt_tokens, request.max_new_tokens) for request in requests} == {(956, 68)}
    assert len(requests) == 16


@settings(max_examples=30)
@given(batch=st.integers(1, 40), num_output=st.integers(1, 120))
def test_an_even_stagger_stays_even_for_ever(batch: int, num_output: int) -> None:
    """B slots; a request takes the first free one and holds it for D iterations: starts are D / B apart."""
    workload = ClosedBatch(length=2 * num_output, pd_ratio=1, batch=batch, stagger="even", num_requests=6 * batch)
    free_at = [0] * batch
    starts = []
    arrivals = workload.source(None)
    for request in arrivals.known:
        starts.append(max(arrivals.iterations.get(request.id, 0), heapq.heappop(free_at)))
        heapq.heappush(free_at, starts[-1] + request.max_new_tokens)
    assert starts == [math.floor(i * num_output / batch + 0.5) for i in range(6 * batch)]


# -- open loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0.25, 1.0, 4.0])
def test_gamma_intervals_have_the_rate_and_the_variation(cv: float) -> None:
    times = GammaArrivals(rate=5.0, cv=cv).times(generator(3, Purpose.ARRIVALS), 200_001)
    intervals = np.diff(times)
    assert times[0] == 0
    assert intervals.min() >= 0
    assert intervals.mean() == pytest.approx(0.2, rel=0.02 * max(1, cv))
    assert intervals.std() / intervals.mean() == pytest.approx(cv, rel=0.03)


def test_daily_arrivals_follow_the_cosine() -> None:
    """Eighths of a day: the mean of 1 - 0.8 cos over each, by its integral; a law of large numbers over 20 days of 5,000."""
    times = DailyArrivals(rate=50, period=100, swing=0.8).times(np.random.default_rng(0), 100_000)
    assert times[0] == 0 and (np.diff(times) >= 0).all() and times[-1] == pytest.approx(2000, rel=0.02)
    counts, _ = np.histogram(times % 100, 8, (0, 100))
    edges = np.linspace(0, 2 * np.pi, 9)
    shares = np.diff(edges - 0.8 * np.sin(edges)) / (2 * np.pi)
    assert counts / 100_000 == pytest.approx(shares, abs=0.003)


def test_drifting_lengths_take_the_ratios_in_turn_and_uniform_lengths_reach_both_ends() -> None:
    prompt, output = FixedLengths(length=60, pd_ratio=[5, 1, 2]).draw(generator(0, Purpose.LENGTHS), 7)
    assert output.tolist() == [10, 10, 10, 30, 30, 20, 20]
    assert (prompt + output == 60).all()
    prompt, output = UniformLengths(min_length=8, max_length=12, pd_ratio=1).draw(generator(0, Purpose.LENGTHS), 2000)
    assert set((prompt + output).tolist()) == {8, 9, 10, 11, 12}


def test_zipf_lengths_follow_the_law() -> None:
    """SARATHI Fig 12: the k-th shortest of 1K .. 4K with probability proportional to k^-0.4, P:D = 10."""
    lengths = ZipfLengths(theta=0.4, min_length=1024, max_length=4096, pd_ratio=10)
    prompt, output = lengths.draw(generator(0, Purpose.LENGTHS), 200_000)
    total = prompt + output
    weights = np.arange(1, 4096 - 1024 + 2) ** -0.4
    cumulative = np.cumsum(weights) / weights.sum()
    assert total.min() >= 1024
    assert total.max() <= 4096
    for length in (1100, 1500, 2048, 3000):
        assert np.mean(total <= length) == pytest.approx(cumulative[length - 1024], abs=0.005)
    assert (prompt / output).mean() == pytest.approx(10, rel=0.01)


def test_trace_lengths_in_order_and_at_random(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{10 * i},{i}\n" for i in range(1, 6)))
    lengths = TraceLengths(path=str(path))
    random = generator(0, Purpose.LENGTHS)
    assert [column.tolist() for column in lengths.draw(random, 3)] == [[10, 20, 30], [1, 2, 3]]
    prompt, output = replace(lengths, order="random").draw(random, 1000)
    assert set(prompt.tolist()) == {10, 20, 30, 40, 50}
    assert (prompt == 10 * output).all()
    assert message(lambda: lengths.draw(random, 6)) == (
        f"{path}: has 5 rows, workload.num_requests=6; ask for fewer, or set workload.lengths.order=random"
    )
    dropping = replace(lengths, max_length=50, too_long="drop", order="random")
    assert set(dropping.draw(random, 100)[0].tolist()) == {10, 20, 30, 40}


# -- prompt files -----------------------------------------------------------------------------------------------------


def prompt_file(tmp_path: Path, *lines: object) -> PromptFile:
    path = tmp_path / "p.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return PromptFile(path=str(path), max_new_tokens=7)
