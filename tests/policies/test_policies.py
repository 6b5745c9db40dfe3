"""Golden schedules: small enough to check by hand against the paper. `2:4` = request 2 computes 4 tokens; `-1` = preempted."""

from collections.abc import Callable
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from schedules import make_engine, schedule

from cbatch import ConfigError, Limits, Policy, Request
from policies.chunking import Filling, Fixed, TileAligned
from policies.longest_first import LongestFirst
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe


def golden(text: str) -> str:
    return dedent(text).strip()


def test_orca_reserves_the_maximum_length() -> None:
    """5 blocks of 4: request 0 holds 3 (9 tokens) from the start, so that request 1 with 2 blocks fits and 2 does not."""
    found, record = schedule(Orca(), [(6, 3), (4, 2), (5, 4)], num_blocks=5)
    assert found == golden("""
        0:6 1:4
        0:1 1:1
        0:1
        2:5
        2:1
        2:1
        2:1
    """)
    assert record.steps[0].kv_blocks_used == 5


@pytest.mark.parametrize("make", [lambda: PrefillFirst(watermark=0.0), lambda: SarathiServe(TileAligned(16))])
def test_the_newest_is_preempted_and_recomputed(make: Callable[[], Policy]) -> None:
    """4 blocks of 4. At 8 tokens each both requests need a third block: request 1 gives way and starts over with 9."""
    found, record = schedule(make(), [(7, 4), (7, 4)], num_blocks=4)
    assert found == golden("""
        0:7 1:7
        0:1 1:1
        0:1 -1
        0:1
        1:9
        1:1
    """)
    preempted = {request.id: (request.num_preemptions, request.num_recomputed_tokens) for request in record.requests}
    assert preempted == {0: (0, 0), 1: (1, 8)}
    assert {request.id: request.admitted_at for request in record.requests} == {0: 0.0, 1: 0.0}  # the first time


@pytest.mark.parametrize(("watermark", "prompt", "waits"), [(0.5, 16, False), (0.5, 17, True), (0.0, 17, False)])
def test_prefill_first_leaves_the_watermark_free_for_the_growth_of_those_that_run(
    watermark: float, prompt: int, waits: bool
) -> None:
    """10 blocks of 4, of which request 0 holds one. Half of them shall stay free: 4 may be taken, not 5."""
    requests = [Request(0, 4, 4), Request(1, prompt, 1, arrival_iteration=1)]
    found, _ = schedule(PrefillFirst(watermark), requests, num_blocks=10)
    assert found.splitlines() == ["0:4", *["0:1"] * 3 * waits, f"1:{prompt}", *["0:1"] * 3 * (not waits)]


@pytest.mark.parametrize(("prompt", "second"), [(392, "1:392"), (393, "0:1")])
def test_prefill_first_leaves_one_percent_unless_told_otherwise(prompt: int, second: str) -> None:
    """100 blocks of 4, of which request 0 holds one: 98 may be taken, not 99."""
    requests = [Request(0, 4, 4), Request(1, prompt, 1, arrival_iteration=1)]
    assert schedule(PrefillFirst(), requests, num_blocks=100, max_tokens=1000)[0].splitlines()[1] == second


def test_sarathi_serve_allocates_a_prompt_at_its_admission() -> None:
    """5 blocks of 4: request 0 holds the 4 of its prompt from the first chunk on, so that request 1 with 2 has to wait."""
    found, record = schedule(SarathiServe(TileAligned(12)), [(16, 2), (8, 1)], num_blocks=5)
    assert found.splitlines() == ["0:12", "0:4", "0:1", "1:8"]
    assert [step.kv_blocks_used for step in record.steps] == [4, 4, 5, 2]


def test_sarathi_reserves_the_maximum_length_with_the_first_chunk() -> None:
    """7 blocks of 4: request 0 may grow to 18 tokens, 5 blocks; request 1, which takes 3, comes when it has ended."""
    found, record = schedule(Sarathi(Fixed(4)), [(16, 2), (8, 1)], num_blocks=7)
    assert found.splitlines() == [*["0:4"] * 4, "0:1", "1:4", "1:4"]
    assert [step.kv_blocks_used for step in record.steps] == [5, 5, 5, 5, 5, 3, 3]


@pytest.mark.parametrize(
    ("per_prompt_token", "order"),
    [
        (False, [0, 1, 2, 3]),  # 8, 4, 4, 3 tokens of output; of equals, the one that came first
        (True, [2, 1, 3, 0]),  # 2, 1, 0.75, 0.5 for each token of the prompt
    ],
)
def test_longest_first_ranks_by_output_or_by_output_per_prompt_token(per_prompt_token: bool, order: list[int]) -> None:
    lengths = [(16, 8), (4, 4), (2, 4), (4, 3)]
    settings = {"per_prompt_token": True} if per_prompt_token else {}
    _, record = schedule(LongestFirst(TileAligned(16), **settings), lengths, batch=1)
    assert [request.id for request in record.requests] == order


def test_longest_first_lets_a_longer_output_overtake_and_equal_ones_not() -> None:
    """All of 4 prompt tokens, one at a time; 3, the longest, arrives last, and 1, which has the same length as 2, after it."""
    outputs, arrivals = (1, 3, 3, 5), (0.0, 0.7, 0.5, 0.9)
    requests = [Request(id_, 4, outputs[id_], arrival_time=arrivals[id_]) for id_ in range(4)]
    _, record = schedule(LongestFirst(TileAligned(16)), requests, batch=1)
    assert [request.id for request in record.requests] == [0, 3, 2, 1]


@pytest.mark.parametrize("watermark", [-0.01, 1.0, 1.5])
def test_a_watermark_is_a_share_below_1(watermark: float) -> None:
    PrefillFirst(0.0)
    with pytest.raises(ConfigError, match=r"policy.watermark=.*: give a share from 0 to below 1"):
        PrefillFirst(watermark)


@pytest.mark.parametrize("per_prompt_token", [False, True])
def test_longest_first_takes_the_predicted_length_where_there_is_one(per_prompt_token: bool) -> None:
    requests = [Request(0, 4, 9, predicted_new_tokens=2), Request(1, 4, 3), Request(2, 4, 2, predicted_new_tokens=8)]
    _, record = schedule(LongestFirst(TileAligned(16), per_prompt_token), requests, batch=1)
    assert [request.id for request in record.requests] == [2, 1, 0]


def test_longest_first_completes_a_prompt_that_it_has_begun() -> None:
    """Request 1 has the longer output, but arrives when request 0 has half of its prompt."""
    found, _ = schedule(LongestFirst(TileAligned(8)), [(16, 2), Request(1, 7, 3, arrival_iteration=1)])
    assert found.splitlines() == ["0:8", "0:8", "0:1 1:7", "1:1", "1:1"]


POLICIES = [RequestLevel, Orca, PrefillFirst, lambda: Sarathi(TileAligned(8)), lambda: SarathiServe(TileAligned(8))]


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_request_is_served_when_memory_holds_one(make: type[Policy], asynchronous: bool) -> None:
    lengths = [(5 + 7 * i % 11, 1 + 5 * i % 7) for i in range(20)]
    _, record = schedule(make(), lengths, num_blocks=6, asynchronous=asynchronous)
    assert sorted(request.id for request in record.requests) == list(range(20))


@pytest.mark.parametrize(
    ("selector", "limits", "says"),
    [
        (lambda: Fixed(0), Limits(4, 100, 100), "chunk=0"),
        (lambda: Fixed(-3), Limits(4, 100, 100), "chunk=-3"),
        (lambda: Fixed(True), Limits(4, 100, 100), "chunk=True"),
        (lambda: Fixed(2.5), Limits(4, 100, 100), "chunk=2.5"),  # type: ignore[arg-type]
        (lambda: Fixed(200), Limits(4, 100, 100), "exceeds max_tokens=100"),
        (lambda: TileAligned(128), Limits(4, 100, 100, tile=64), "exceeds max_tokens=100"),
        (lambda: TileAligned(100), Limits(4, 1000, 100, tile=64), "use chunk=128"),
        (lambda: TileAligned(10), Limits(4, 1000, 100, tile=64), "use chunk=64"),
        (lambda: TileAligned(64), Limits(65, 1000, 100, tile=64), "no room for a prompt beside 64 decodes"),
        (lambda: Filling(100, 64), Limits(4, 1000, 100, tile=64), "use chunk=128"),
        (lambda: Filling(128, 129), Limits(4, 1000, 100, tile=64), "chunking.full=129 must be .* from 1 to chunk=128"),
        (lambda: Filling(128, 0), Limits(4, 1000, 100, tile=64), "chunking.full=0"),
        (lambda: Filling(128, True), Limits(4, 1000, 100, tile=64), "chunking.full=True must be a whole number"),
        (lambda: Filling(128, 2.5), Limits(4, 1000, 100, tile=64), "chunking.full=2.5 must be a whole number"),  # type: ignore[arg-type]
        (
            lambda: Filling(128, 96),
            Limits(4, 1000, 100, tile=64),
            "chunking.full=96 must be a multiple of the tile of 64",
        ),
        (lambda: Filling(128, 64), Limits(65, 1000, 100, tile=64), "chunking.full=64 must be .* at least batch=65"),
        (lambda: Filling(128, 64, 0), Limits(4, 1000, 100, tile=64), "chunking.share=0"),
        (lambda: Filling(128, 64, 1.1), Limits(4, 1000, 100, tile=64), "chunking.share=1.1"),
    ],
)
def test_a_chunk_that_cannot_work_is_refused_before_anything_runs(selector, limits, says) -> None:  # type: ignore[no-untyped-def]
    for policy in (Sarathi, SarathiServe, LongestFirst):
        with pytest.raises(ConfigError, match=says):
            make_engine(policy(selector()), limits)


def test_the_smallest_and_the_largest_chunk_that_work_are_taken() -> None:
    for selector in (Fixed(1), Fixed(100), TileAligned(64), Filling(64, 64, 1), Filling(64, 64, 0.01)):
        selector.check(Limits(64, 100, 100, tile=64))


def test_decodes_count_into_a_tile_aligned_chunk_and_not_into_a_fixed_one() -> None:
    view: Any = None  # they look at the number of decodes alone
    assert [TileAligned(8).num_tokens(view, number) for number in (0, 7, 8, 9)] == [8, 1, 0, 0]
    assert [Fixed(8).num_tokens(view, number) for number in (0, 9)] == [8, 8]


def test_three_quarters_of_eight_places_are_six_decodes() -> None:
    view: Any = SimpleNamespace(limits=SimpleNamespace(max_batch=8))
    filling = Filling(16, 8, share=0.75)
    assert [filling.num_tokens(view, decodes) for decodes in (0, 5, 6, 8, 9)] == [16, 11, 2, 0, 0]
    assert (Filling(9).full, Filling(2).full) == (4, 1), "half of the chunk"


def test_a_prompt_longer_than_an_iteration_is_refused_by_whole_prompt_policies() -> None:
    engine = make_engine(Orca(), Limits(3, 8, 1000))
    engine.submit([Request(0, 9, 1)])
    with pytest.raises(ConfigError, match="max_tokens=8"):
        engine.run()
