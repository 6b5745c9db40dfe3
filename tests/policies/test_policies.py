"""The policies of the first papers: chunks, limits, and what their schedules in `schedules.yaml` do not show."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from schedules import make_engine
from unit_machine import golden

from cbatch import ConfigError, Limits, Policy, Request
from policies.chunking import ChunkSelector, Filling, Fixed, PDAware, TileAligned
from policies.longest_first import LongestFirst
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

POLICIES = [RequestLevel, Orca, PrefillFirst, lambda: Sarathi(TileAligned(8)), lambda: SarathiServe(TileAligned(8))]


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_request_is_served_when_memory_holds_one(make: type[Policy], asynchronous: bool) -> None:
    requests = ", ".join(f"r{i} {5 + 7 * i % 11}/{1 + 5 * i % 7} @0" for i in range(20))
    served = golden(make(), requests, batch=3, tokens=100, memory=6, block=4, asynchronous=asynchronous)
    assert len(served.ends) == 20 and min(served.ends.values()) > 0 and not served.rejected


@pytest.mark.parametrize("watermark", [-0.01, 1.0, 1.5])
def test_a_watermark_is_a_share_below_1(watermark: float) -> None:
    PrefillFirst(0.0)
    with pytest.raises(ConfigError, match=r"policy.watermark=.*: give a share from 0 to below 1"):
        PrefillFirst(watermark)


TIGHT, WIDE, FULL = Limits(4, 100, 100, tile=64), Limits(4, 1000, 100, tile=64), Limits(65, 1000, 100, tile=64)


@pytest.mark.parametrize(
    ("make", "limits", "says"),
    [
        (lambda: Fixed(0), TIGHT, "chunk=0"),
        (lambda: Fixed(-3), TIGHT, "chunk=-3"),
        (lambda: Fixed(True), TIGHT, "chunk=True"),
        (lambda: Fixed(2.5), TIGHT, "chunk=2.5"),  # type: ignore[arg-type]
        (lambda: Fixed(200), TIGHT, "exceeds max_tokens=100"),
        (lambda: TileAligned(128), TIGHT, "exceeds max_tokens=100"),
        (lambda: TileAligned(100), WIDE, "use chunk=128"),
        (lambda: TileAligned(10), WIDE, "use chunk=64"),
        (lambda: TileAligned(64), FULL, "no room for a prompt beside 64 decodes"),
        (lambda: Filling(100, 64), WIDE, "use chunk=128"),
        (lambda: Filling(128, 129), WIDE, "chunking.full=129 must be .* from 1 to chunk=128"),
        (lambda: Filling(128, 0), WIDE, "chunking.full=0"),
        (lambda: Filling(128, True), WIDE, "chunking.full=True must be a whole number"),
        (lambda: Filling(128, 2.5), WIDE, "chunking.full=2.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: Filling(128, 96), WIDE, "chunking.full=96 must be a multiple of the tile of 64"),
        (lambda: Filling(128, 64), FULL, "chunking.full=64 must be .* at least batch=65"),
        (lambda: Filling(128, 64, 0), WIDE, "chunking.share=0"),
        (lambda: Filling(128, 64, 1.1), WIDE, "chunking.share=1.1"),
        (lambda: PDAware(0), WIDE, "chunking.pd_ratio=0 must be above 0"),
        (lambda: PDAware(window=0), WIDE, "chunking.window=0 and chunking.tolerance=0.05: need >= 1 and >= 0"),
        (lambda: PDAware(tolerance=-0.1), WIDE, "chunking.window=32 and chunking.tolerance=-0.1"),
        (PDAware, Limits(2, 127, 100, tile=128), "max_tokens=127 has no room for a tile of 128 tokens"),
        (PDAware, Limits(6, 5, 100, tile=4), "max_tokens=5 has no room .* beside 5 decodes"),
    ],
)
def test_a_chunk_that_cannot_work_is_refused_before_anything_runs(
    make: Callable[[], ChunkSelector], limits: Limits, says: str
) -> None:
    for policy in (Sarathi, SarathiServe, LongestFirst):
        with pytest.raises(ConfigError, match=says):
            make_engine(policy(make()), limits)


def test_the_smallest_and_the_largest_chunk_that_work_are_taken() -> None:
    for selector in (Fixed(1), Fixed(100), TileAligned(64), Filling(64, 64, 1), Filling(64, 64, 0.01)):
        selector.check(Limits(64, 100, 100, tile=64))
    PDAware(0.01, window=1, tolerance=0).check(Limits(6, 6, 100, tile=4))
    PDAware().check(Limits(2, 128, 100, tile=128))


def test_decodes_count_into_a_chunk_of_whole_tiles_and_not_into_a_fixed_one() -> None:
    """Three quarters of eight places are six decodes."""
    view: Any = SimpleNamespace(limits=SimpleNamespace(max_batch=8))
    assert [TileAligned(8).num_tokens(view, number) for number in (0, 7, 8, 9)] == [8, 1, 0, 0]
    assert [Fixed(8).num_tokens(view, number) for number in (0, 9)] == [8, 8]
    filling = Filling(16, 8, share=0.75)
    assert [filling.num_tokens(view, decodes) for decodes in (0, 5, 6, 8, 9)] == [16, 11, 2, 0, 0]
    assert (Filling(9).full, Filling(2).full) == (4, 1), "half of the chunk"


def test_a_prompt_longer_than_an_iteration_is_refused_by_whole_prompt_policies() -> None:
    engine = make_engine(Orca(), Limits(3, 8, 1000))
    engine.submit([Request(0, 9, 1)])
    with pytest.raises(ConfigError, match="max_tokens=8"):
        engine.run()
