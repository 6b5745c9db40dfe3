"""Host memory for evicted KV blocks in simulation: what is copied when, what it costs, and what is found."""

from dataclasses import replace
from typing import Any

import pytest
from schedules import UnitCost
from small_cluster import LINKS, SPEC, profile

from cbatch import CostFunction, Engine, KVSize, Limits, Request, RunRecord, Server
from cbatch.errors import ProfileError
from cbatch.model.topology import Topology
from cbatch.sim import ProfileCost, SimExecutor
from experiments.workloads import AllAtOnce, Chat, FixedLengths
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.orca import Orca
from policies.sarathi_serve import SarathiServe

SECOND = CostFunction(lambda shape: 1.0)


class Forgetful(LRU):
    """Keeps nothing in host memory."""

    def keeps(self, block: object, now: float) -> bool:
        return False


def serve_by_hand(eviction: LRU) -> tuple[RunRecord, SimExecutor]:
    """Four blocks of a token, an iteration a second, 0.25 s to copy a block out and 0.5 s to copy it back; see the test."""
    executor = SimExecutor(
        CostFunction(UnitCost().predict, lambda num_out, num_back, size: 0.25 * num_out + 0.5 * num_back)
    )
    server = Server(executor, Limits(1, 8, 8), UnitCost(), KVSize(4, 1, 10), asynchronous=False, prefix_cache=eviction)
    prompts = {0.0: [1, 2, 3], 1.0: [4, 5, 6, 8], 3.0: [1, 2, 3, 9], 7.0: [4, 5, 6, 8]}
    requests = [
        Request(id_, len(prompt), 1, prompt=prompt, arrival_time=at) for id_, (at, prompt) in enumerate(prompts.items())
    ]
    return server.serve(Orca(), requests), executor


def test_copies_are_priced_and_waited_for() -> None:
    """The second request evicts 3 blocks; the third 4, and reads 3; the fourth only the one that the host lacks, and reads 3."""
    record, executor = serve_by_hand(LRU())
    copies = [(each.num_out, each.num_back, each.started, each.ended, each.waited) for each in record.blocks]
    assert copies == [(3, 0, 1.0, 1.75, 0.75), (4, 3, 3.0, 5.5, 2.5), (1, 3, 7.0, 8.75, 1.75)]
    assert [(step.started, step.ended) for step in record.steps] == [(0.0, 1.0), (1.75, 2.75), (5.5, 6.5), (8.75, 9.75)]
    found = [(each.num_cached_tokens, each.num_host_tokens) for each in record.requests]
    assert found == [(0, 0), (0, 0), (3, 3), (3, 3)]
    [account] = executor.accounts()
    assert (account.compute, account.copies, account.no_work, account.span) == (4.0, 5.0, 0.75, 9.75)


def test_an_eviction_may_keep_nothing_in_host_memory() -> None:
    record, _ = serve_by_hand(Forgetful())
    assert record.blocks == [] and sum(each.num_cached_tokens for each in record.requests) == 0


def chats(kv: KVSize, cost: Any, *, asynchronous: bool = True, stages: int = 1) -> Engine:
    """Sixteen chats of four turns, of which at most four turns run at a time."""
    lengths = FixedLengths(length=24, pd_ratio=2)
    workload = Chat(num_requests=64, turns=(4, 4), sessions=16, system=8, pause=3.0, arrivals=AllAtOnce(), lengths=lengths, seed=1)  # fmt: skip
    server = Server(
        SimExecutor(cost), Limits(4, 256, 512, num_stages=stages), cost, kv, asynchronous, prefix_cache=LRU()
    )
    engine = server.engine(SarathiServe(Fixed(64)), workload.source(None))
    engine.run()
    return engine


def test_a_large_host_finds_what_an_infinite_cache_finds() -> None:
    """Copies take no time here, so both runs have the same iterations; without host memory the small cache finds less."""
    infinite, small, without = (chats(KVSize(*size), SECOND) for size in ((10_000, 4), (160, 4, 10_000), (160, 4)))
    found = [
        {each.id: each.num_cached_tokens for each in engine.record.requests} for engine in (infinite, small, without)
    ]
    assert found[0] == found[1] and infinite.record.tokens()[1].tolist() == small.record.tokens()[1].tolist()
    assert sum(found[2].values()) < 0.8 * sum(found[0].values())
    assert sum(each.num_host_tokens for each in small.record.requests) > 0.2 * sum(found[0].values())


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_any_copies_take_the_time_of_the_link(asynchronous: bool, stages: int) -> None:
    """A token has 2 x 8 layers x 2 heads x 16 numbers of 2 bytes: 4,096 bytes in a block of 4, over the stages."""
    cost = ProfileCost(profile(), SPEC, Topology(1, stages))
    engine = chats(KVSize(160, 4, 60), cost, asynchronous=asynchronous, stages=stages)
    steps, host = engine.record.steps, engine.state.pool.host  # type: ignore[attr-defined]
    assert {step.iteration for step in steps} > {each.iteration for each in engine.record.blocks}
    size, ended = 4096 / stages, [0.0]
    for each in engine.record.blocks:
        step, before = steps[each.iteration], steps[each.iteration - 1]
        assert each.started == max(step.launched_at, ended[-1])
        seconds = each.num_out * (1e-6 + size / 1e9) + each.num_back * (2e-6 + size / 2e9)
        assert each.ended - each.started == pytest.approx(seconds)
        assert step.started >= each.ended
        if stages == 1:
            could_begin = max(step.launched_at, before.ended)
            assert step.started == max(could_begin, each.ended)
            assert each.waited == pytest.approx(step.started - could_begin)
        ended.append(each.ended)
    assert host.num_out == sum(each.num_out for each in engine.record.blocks) > host.num_slots
    assert host.num_back == sum(each.num_back for each in engine.record.blocks) > 0
    waited = sum(each.waited for each in engine.record.blocks)
    assert engine.seconds_copying == pytest.approx(waited) and (waited > 0 or asynchronous)
    accounts = engine.executor.accounts()
    assert accounts[0].copies == pytest.approx(waited)


def test_a_profile_without_times_of_copies_is_named() -> None:
    cost = ProfileCost(profile(replace(LINKS, from_host=None)), SPEC)
    with pytest.raises(
        ProfileError, match=r"hardware=made-up has no times of copies.*; add links.from_host, with bytes"
    ):
        cost.copy_seconds(1, 0, 4)


def test_a_preempted_request_returns_from_host_memory() -> None:
    """Six prompts of 10 tokens grow to 30 each in 90 blocks of one token; swapped out, none of their tokens is computed again."""
    recomputed = []
    for on_host in (0, 1000):
        server = Server(SimExecutor(SECOND), Limits(6, 64, 64), SECOND, KVSize(90, 1, on_host), prefix_cache=LRU())
        requests = [Request(id_, 10, 20) for id_ in range(6)]
        server.serve(SarathiServe(Fixed(64)), requests)
        assert sum(each.num_preemptions for each in requests) > 2
        recomputed.append(sum(each.num_recomputed_tokens for each in requests))
        assert sum(each.num_lost_tokens for each in requests) == recomputed[-1] + sum(
            each.num_cached_again for each in requests
        )
    assert recomputed[0] > 0 == recomputed[1]
