"""Workloads: the same fields make the same requests, distributions have the stated parameters, bad settings are refused."""

import heapq
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import message
from places import ROOT

from cbatch import Request
from cbatch.request import spec_of
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
    TraceReplay,
    UniformLengths,
    Workload,
    ZipfLengths,
)
from experiments.workloads.base import SamplingKeys
from experiments.workloads.lengths import split
from experiments.workloads.seeds import Purpose, generator
from experiments.workloads.trace import Fit, ScaledFit, Trace


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


# -- lengths that fit a model -----------------------------------------------------------------------------------------


def a_trace() -> Trace:
    return Trace(
        source="t.csv",
        prompt_tokens=np.array([100, 5, 40]),
        output_tokens=np.array([10, 60, 2]),
        arrival_time=np.array([0.0, 1.0, 3.0]),
        line=np.array([2, 3, 4]),
        fields={"client": np.array(["a", "b", "c"])},
    )


def columns(trace: Trace) -> list[tuple[int, int]]:
    return list(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def test_scaling_keeps_at_least_one_token() -> None:
    assert columns(ScaledFit(length_scale=0.1).fit(a_trace())) == [(10, 1), (1, 6), (4, 1)]
    assert columns(ScaledFit(length_scale=0.1, max_length=9, too_long="drop").fit(a_trace())) == [(1, 6), (4, 1)]
    assert columns(ScaledFit(length_scale=1e30).fit(a_trace()))[0] == (2**31 - 1, 2**31 - 1)


def test_a_recorded_run_is_scaled_clipped_and_limited_as_a_whole(tmp_path: Path) -> None:
    """Its lines state the limit of each output: limits and true lengths follow the lengths, and the workload's limit wins."""
    path, stated = tmp_path / "decisions.jsonl", {"arrival_time": 0.0, "arrival_iteration": 0}
    lengths = {"num_prompt_tokens": 100, "max_new_tokens": 90, "true_new_tokens": 20, "predicted_new_tokens": None}
    longer = {"num_prompt_tokens": 10, "max_new_tokens": 300, "true_new_tokens": 200, "predicted_new_tokens": 40}
    requests = [{"request": {"id": number, **stated, **each}} for number, each in enumerate((lengths, longer))]
    ends = [{"finish": {"id": number, "num_output_tokens": tokens}} for number, tokens in enumerate((20, 200))]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"run": {}}, *requests, *ends]))

    def replayed(positions: int = 1000, **keys: Any) -> list[tuple[int, int, int | None, int | None]]:
        specs = map(spec_of, TraceReplay(path=str(path), **keys).within(positions).requests(None))
        return [
            (spec.num_prompt_tokens, spec.max_new_tokens, spec.true_new_tokens, spec.predicted_new_tokens)
            for spec in specs
        ]

    assert replayed() == [(100, 90, 20, None), (10, 300, 200, 40)]
    assert replayed(length_scale=0.1) == [(10, 9, 2, None), (1, 30, 20, 4)]
    assert replayed(length_scale=0.01) == [(1, 1, 1, None), (1, 3, 2, 1)]
    assert replayed(max_length=110, too_long="clip") == [(20, 90, 20, None), (1, 109, 200, 40)]
    assert replayed(max_new_tokens=30) == [(100, 30, 20, None), (10, 30, 200, 40)]
    limited = {"too_long": "clip", "max_new_tokens": 30}
    assert (
        replayed(60, **limited) == replayed(1000, **limited, max_length=60) == [(30, 30, 20, None), (10, 30, 200, 40)]
    )
    assert replayed(60, **limited, max_length=50) == [(20, 30, 20, None), (10, 30, 200, 40)]


def test_requests_that_are_too_long_are_clipped_dropped_or_refused() -> None:
    assert columns(Fit(max_length=50, too_long="clip").fit(a_trace())) == [(40, 10), (1, 49), (40, 2)]
    dropped = Fit(max_length=70, too_long="drop").fit(a_trace())
    assert columns(dropped) == [(5, 60), (40, 2)]
    assert dropped.arrival_time is not None
    assert dropped.arrival_time.tolist() == [0.0, 2.0]
    assert dropped.fields["client"].tolist() == ["b", "c"]
    assert columns(Fit(max_length=70, too_long="drop").fit(a_trace(), 1)) == [(5, 60)]
    assert message(lambda: Fit(max_length=70).fit(a_trace())) == (
        "t.csv, line 2: 100 prompt + 10 output tokens exceed max_length=70 "
        "(at most the model's positions); raise it, or set too_long to clip or drop"
    )
    assert message(lambda: Fit(max_length=70).fit(replace(a_trace(), line=None))).startswith("t.csv, row 1: 100 prompt")
    assert columns(Fit(max_length=110).fit(a_trace())) == columns(a_trace()), "the longest has 110"
    hashes = np.array([[1, 2, 3, 4], [5], [6, 7]], object)
    clipped = Fit(max_length=50, too_long="clip").fit(replace(a_trace(), fields={"prefix_hashes": hashes}))
    assert list(clipped.fields["prefix_hashes"]) == [[1, 2], [5], [6, 7]], "of 40 of 100 tokens, 1 of 5, and all"
    assert hashes[0] == [1, 2, 3, 4], "the trace itself is left"
    hashed = replace(a_trace(), fields={"prefix_hashes": hashes, "hash_block": np.array([30, 5, 25])})
    clipped = Fit(max_length=40, too_long="clip").fit(hashed)
    assert list(clipped.fields["prefix_hashes"]) == [[1], [5], [6, 7]], "of 30, 1 and 38 tokens"
    assert ScaledFit(length_scale=0.2).fit(hashed).fields["hash_block"].tolist() == [6, 1, 5]
    assert ScaledFit(length_scale=0.1).fit(hashed).fields["hash_block"].tolist() == [3, 0, 0], "unknown: 0.5 and 2.5"
    stated = replace(a_trace(), fields={"max_new_tokens": np.array([45, None, 49], object)})
    assert columns(Fit(max_length=50, too_long="clip").fit(stated)) == [(5, 10), (1, 49), (1, 2)]
    assert columns(Fit(max_length=145, too_long="drop", new_tokens=80).fit(stated)) == [(100, 10), (5, 60), (40, 2)]
    assert columns(Fit(max_length=89, too_long="drop", new_tokens=84).fit(stated)) == [(5, 60), (40, 2)]
    assert message(lambda: Fit(max_length=20, too_long="drop").fit(a_trace())) == (
        "t.csv: every request exceeds max_length=20 (at most the model's positions); raise it, or set too_long=clip"
    )


# -- prompt files -----------------------------------------------------------------------------------------------------


def prompt_file(tmp_path: Path, *lines: object) -> PromptFile:
    path = tmp_path / "p.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return PromptFile(path=str(path), max_new_tokens=7)


def test_a_prompt_file_gives_text_token_ids_and_settings(tmp_path: Path) -> None:
    workload = prompt_file(
        tmp_path,
        {"prompt": "ab\u2028c"},  # a line separator to Unicode, but not to JSON lines
        {
            "token_ids": [1, 2],
            "max_new_tokens": 3,
            "arrival_time": 1.5,
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.5,
            "priority": -2,
            "client": "me",
            "stop": "x",
        },
        {"messages": [{"role": "user", "content": "a"}], "arrival_time": 2.0, "stop": ["ab", "c"]},
    )
    first, second, third = workload.requests(Letters(size=9000))
    assert (first.prompt, first.max_new_tokens, first.arrival_time) == ([97, 98, 8232, 99], 7, 0.0)
    assert (second.prompt, second.max_new_tokens, second.arrival_time) == ([1, 2], 3, 1.5)
    assert (second.sampling.temperature, second.sampling.top_k, second.sampling.top_p) == (0.5, 4, 0.5)
    assert (second.priority, second.client) == (-2, "me")
    assert (third.prompt, third.stop_strings) == ([*map(ord, "user>a")], ("ab", "c"))
    assert (first.stop_strings, second.stop_strings) == ((), ("x",))
    assert first.sampling.seed != second.sampling.seed
    assert [r.id for r in replace(workload, num_requests=1).requests(Letters(size=9000))] == [0]
    assert "line 1: a simulation has no tokenizer for prompt text" in message(lambda: workload.requests(None))
    (simulated,) = prompt_file(tmp_path, {"token_ids": [1, 2, 3]}).requests(None)
    assert (simulated.num_prompt_tokens, simulated.prompt) == (3, None)


LENGTHS = [(10, 5), (90, 20), (200, 3), (60, 30)]
FITTED = {"drop": [(10, 5), (60, 30)], "clip": [(10, 5), (80, 20), (97, 3), (60, 30)], "error": LENGTHS}
"""By `too_long`, for a model of 100 positions; the engine refuses what is left too long."""


@pytest.mark.parametrize("too_long", FITTED)
def test_too_long_of_prompts_and_of_a_mix_sees_the_models_positions(too_long: Any, tmp_path: Path) -> None:
    lines = [{"token_ids": [*range(prompt)], "max_new_tokens": output} for prompt, output in LENGTHS]
    prompts = replace(prompt_file(tmp_path, *lines), too_long=too_long).within(100)
    for vocabulary in (None, Letters(size=200)):
        made = prompts.requests(vocabulary)
        assert [(request.num_prompt_tokens, request.max_new_tokens) for request in made] == FITTED[too_long]
    assert [request.prompt for request in made] == [[*range(prompt)] for prompt, _ in FITTED[too_long]]
    path = tmp_path / "table.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{p},{o}\n" for p, o in LENGTHS))
    table = TraceLengths(path=str(path), too_long=too_long, max_length=300)
    mix = MixedLengths(parts={"all": {"share": 1, "lengths": table}})
    made = OpenLoop(num_requests=len(FITTED[too_long]), arrivals=AllAtOnce(), lengths=mix).within(100).requests(None)
    assert [(request.num_prompt_tokens, request.max_new_tokens) for request in made] == FITTED[too_long]


BAD_PROMPTS: list[tuple[object, str]] = [
    ({"promt": "x"}, "promt: is not supported; did you mean prompt?"),
    ({"prompt": "x", "token_ids": [1]}, "give one of prompt, messages and token_ids"),
    ({}, "give one of prompt, messages and token_ids"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
    ({"prompt": "x", "stop": ["a", ""]}, "stop"),
    ({"prompt": ""}, "the prompt has no tokens"),
    ({"prompt": 3}, "prompt=3: Input should be a valid string"),
    ({"token_ids": [1, 128]}, "token id 128 is not in the model's vocabulary"),
    ({"prompt": "x", "arrival_time": 1}, "arrival_time 1 comes after 2"),
    ('{"prompt": "x", "arrival_time": NaN}', "arrival_time=nan: "),
    *(
        ({"prompt": "x", **bad}, "{}={}: give ".format(*bad.copy().popitem()))
        for bad in (*({"max_new_tokens": 0}, {"arrival_time": -1}, {"temperature": None}, {"top_p": 0}),)
    ),
    *(({"token_ids": ids}, f"token_ids={ids}: give ") for ids in ([], [True])),
    ("[1]", "'[1]' is not a JSON object"),
    ("x", "'x' is not JSON ("),
]


@pytest.mark.parametrize(("line", "problem"), BAD_PROMPTS)
def test_bad_prompt_lines(tmp_path: Path, line: object, problem: str) -> None:
    first = {"token_ids": [1], "arrival_time": 2 if "comes after" in problem else 0}
    workload = prompt_file(tmp_path, first, line)
    assert message(lambda: workload.requests(Letters())).startswith(f"{tmp_path}/p.jsonl, line 2: {problem}")


# -- bad settings -----------------------------------------------------------------------------------------------------


def closed(**changes: Any) -> ClosedBatch:
    return ClosedBatch(**{"length": 10, "pd_ratio": 1, "batch": 2, **changes})


RATIO: dict[str, Any] = {"pd_ratio": 1}
RANGE = {"min_length": 4, "max_length": 8, **RATIO}
BAD_SETTINGS: list[
    tuple[Callable[..., object], str, dict[str, list[Any]]]
] = [  # what is built, its section, bad values
    (closed, "", {"seed": [-1, 0.5], "num_requests": [0], "length": [1], "batch": [True]}),
    (closed, "", {"pd_ratio": [0, math.nan, "1:2", 10, 0.1], "stagger": [-1, "odd", math.inf]}),
    (closed, "", {"max_new_tokens": [0, "all"], "tiers": [3], "prediction": [0.3], "pad_outputs": [0]}),
    (lambda **keys: closed(sampling=keys), "sampling.", {"temperature": [-1], "top_k": [-1], "top_p": [0]}),
    (partial(GammaArrivals, rate=1), "arrivals.", {"rate": [0, math.nan], "cv": [0]}),
    (partial(FixedLengths, length=4, **RATIO), "lengths.", {"length": [1], "pd_ratio": [4]}),
    (partial(FixedLengths, length=4), "lengths.", {"pd_ratio": [[], 9, 0]}),
    (partial(UniformLengths, **RANGE), "lengths.", {"min_length": [1], "max_length": [2.5, 3], "pd_ratio": [0]}),
    (partial(ZipfLengths, theta=0.4, **RANGE), "lengths.", {"theta": [-1]}),
    (partial(TraceLengths, path="t.csv"), "lengths.", {"order": ["sorted"]}),
    (partial(PromptFile, path="p"), "", {"max_new_tokens": [0]}),
    (partial(TraceReplay, path="t.csv"), "", {"start": [-1], "speed": [0], "max_length": [1], "too_long": ["cut"]}),
]


@pytest.mark.parametrize(("make", "section", "bad"), BAD_SETTINGS)
def test_bad_settings_are_named_with_a_remedy(
    make: Callable[..., object], section: str, bad: dict[str, list[Any]]
) -> None:
    for key, value in ((key, value) for key, values in bad.items() for value in values):
        refusal = message(lambda key=key, value=value: make(**{key: value}))  # type: ignore[misc]
        assert refusal.startswith(f"workload.{section}{key}={value}: ") and (
            "give " in refusal or "Input should be" in refusal
        )


# -- configuration ----------------------------------------------------------------------------------------------------

WORKLOADS = ROOT / "experiments" / "conf" / "workload"
CONFIGS = [
    *(path.stem for path in WORKLOADS.glob("*.yaml")),
    *(f"traces/{path.stem}" for path in WORKLOADS.glob("traces/*.yaml")),
]


def composed(*overrides: str) -> Workload:
    with initialize_config_dir(str(ROOT / "experiments" / "conf"), version_base=None):
        config = compose(overrides=["+seed=3", "+batch=4", *overrides])
    workload: Workload = instantiate(config.workload, _convert_="all")
    return workload


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_config_builds_its_workload(name: str) -> None:
    paths = {"sharegpt": ["lengths.path"], "arxiv": ["lengths.path"], "servegen": ["path", "dataset"]}
    traces = (
        "agents",
        "azure_code",
        "azure_conv",
        "mooncake",
        "prompts",
        "recorded",
        "recorded_sessions",
        "trace",
        "vtc_real",
    )
    keys = paths.get(name, ["path"] if name in traces else [])
    folder = ["+traces=some"] if name.startswith(("landscape_", "traces/")) else []
    workload = composed(f"+workload={name}", *folder, *(f"workload.{key}=some.file" for key in keys))
    assert workload.seed == 3
    assert workload.ignore_eos == (name != "prompts")
