"""The policies of the first papers: chunks, limits, and what their schedules in `schedules.yaml` do not show."""

from types import SimpleNamespace
from typing import Any

import pytest
from schedules import make_engine
from unit_machine import golden

from cbatch import BatchShape, Limits, Plan, Policy, Request, View, WorkloadError
from cbatch.arrivals import Listed
from experiments.settings.compose import compose_run, policy_names
from policies.chunking import Filling, Fixed, TileAligned
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe
from policies.shared.step_times import shape_of

POLICIES = [RequestLevel, Orca, PrefillFirst, lambda: Sarathi(TileAligned(8)), lambda: SarathiServe(TileAligned(8))]


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_request_is_served_when_memory_holds_one(make: type[Policy], asynchronous: bool) -> None:
    requests = ", ".join(f"r{i} {5 + 7 * i % 11}/{1 + 5 * i % 7} @0" for i in range(20))
    served = golden(make(), requests, batch=3, tokens=100, memory=6, block=4, asynchronous=asynchronous)
    assert len(served.ends) == 20 and min(served.ends.values()) > 0 and not served.rejected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_policies_and_the_simulator_price_an_iteration_alike(asynchronous: bool) -> None:
    """Chunks of 4 beside decodes leave single tokens, which see the tokens before them and not their whole prompt."""
    shapes: list[BatchShape] = []

    class Shown(SarathiServe):
        def plan(self, view: View) -> Plan:
            if (plan := super().plan(view)).requests:
                shapes.append(shape_of(plan))
            return plan

    engine = make_engine(Shown(TileAligned(4)), Limits(4, 8, 40, tile=1), asynchronous=asynchronous)
    engine.submit([Request(0, 3, 9), Request(1, 9, 5), Request(2, 11, 3)])
    steps = engine.run().steps
    assert [shape.num_scores for shape in shapes] == [step.num_scores for step in steps]
    assert [shape.num_kv_reads for shape in shapes] == [step.num_kv_reads for step in steps]


def test_decodes_count_into_a_chunk_of_whole_tiles_and_not_into_a_fixed_one() -> None:
    """Three quarters of eight places are six decodes."""
    view: Any = SimpleNamespace(limits=SimpleNamespace(max_batch=8))
    assert [TileAligned(8).num_tokens(view, number) for number in (0, 7, 8, 9)] == [8, 1, 0, 0]
    assert [Fixed(8).num_tokens(view, number) for number in (0, 9)] == [8, 8]
    filling = Filling(16, 8, share=0.75)
    assert [filling.num_tokens(view, decodes) for decodes in (0, 5, 6, 8, 9)] == [16, 11, 2, 0, 0]
    assert (Filling(9).full, Filling(2).full) == (4, 1), "half of the chunk"


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_has_its_name_uses_the_whole_cache_and_refuses_what_no_iteration_has_room_for(name: str) -> None:
    make = compose_run(f"policy={name}", "chunk=8").policy
    assert repr(make).partition("(")[0] == name
    for asynchronous in (False, True):
        # the last token never enters the cache: 9 + 8 tokens need 16 of KV cache; others run and wait beside it
        engine = make_engine(make(), Limits(3, 20, 1000, tile=4), num_blocks=4, asynchronous=asynchronous)
        engine.submit([Request(0, 4, 4), Request(1, 9, 8), Request(2, 9, 8), Request(3, 4, 4)])
        assert len(engine.run().requests) == 4
    refused = {}
    for lengths in (
        (12, 1),
        (8, 6),
        (13, 1),
    ):  # the second is above 12 with its output, which no iteration computes at once
        engine = make_engine(make(), Limits(3, 12, 1000, tile=4), num_blocks=16)
        try:
            engine.attach(Listed([Request(0, *lengths), Request(1, 4, 4), Request(2, 4, 5)], {1: 1}))
        except WorkloadError as error:
            refused[lengths] = str(error)
        else:
            assert len(engine.run().requests) == 3
    whole = ("orca", "request_level", "vtc", "prefill_first", "mc_sf", "past_future", "ltr", "mlfq", "tgi")
    assert all("may compute 13 tokens at once, max_tokens=12; raise max_tokens" in line for line in refused.values())
    assert [*refused] == [(13, 1)] * (name in whole)
