"""The policies of the first papers: chunks, limits, and what their schedules in `schedules.yaml` do not show."""

from types import SimpleNamespace
from typing import Any

import pytest
from schedules import make_engine
from unit_machine import golden

from cbatch import ConfigError, Limits, Policy, Request
from policies.chunking import Filling, Fixed, TileAligned
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
