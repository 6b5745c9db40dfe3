"""Plans and schedules with a prefix cache, on examples that can be followed by hand."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from contended import LinearCost
from every_policy import EVERY_POLICY
from small_cluster import make_cost
from test_leaps import draw_requests, tell
from test_prefix_cache import Hashing, text_of
from unit_machine import asked, golden

from cbatch import (
    BatchShape,
    CachedBlock,
    Engine,
    Eviction,
    Limits,
    Plan,
    Refusal,
    Request,
    Server,
    Step,
    View,
    WorkloadError,
)
from cbatch.cost import NO_COST
from cbatch.kv import KVSize
from cbatch.model.topology import Topology
from cbatch.sim.executor import SimExecutor
from cbatch.sim.stages import Span
from policies.evictions import LRU


class InOrder:
    """Decodes first, at the cost of the newest; then prompts in order of arrival, each with blocks for all of it."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(preempt_newest=True)
        for request in (*view.prefilling, *view.waiting):
            if plan.plan.preempt or not plan.add(request, reserve=request.num_tokens):
                break
        return plan.build()


def prompts(**texts: str) -> dict[str, list[int]]:
    return {name: [ord(letter) for letter in text] for name, text in texts.items()}


def test_a_block_is_found_from_the_next_iteration_on() -> None:
    """P [abcdef] and Q [abcdeg] in one iteration find nothing; R [abcdeg] an iteration later finds two blocks of two."""
    asked, texts = "P 6/1 @0, Q 6/1 @0, R 6/1 @1", prompts(P="abcdef", Q="abcdeg", R="abcdeg")
    ran = golden(InOrder(), asked, tokens=20, block=2, prefix_cache=LRU(), prompt=texts)
    assert (ran.schedule, ran.found["R"]) == ("P6 Q6 | R2", (4, 0))
    assert golden(InOrder(), asked, tokens=20, block=2, prompt=texts).schedule == "P6 Q6 | R6"


def shapes_of(asked: str, **texts: str) -> list[BatchShape]:
    """Those that a cost model is asked about, with blocks of two."""
    shapes = list[BatchShape]()

    def seconds(shape: BatchShape) -> float:
        shapes.append(shape)
        return 1.0

    golden(InOrder(), asked, block=2, seconds=seconds, prefix_cache=LRU(), prompt=prompts(**texts))
    return shapes


def test_what_is_found_is_context_to_a_cost_model() -> None:
    """Q's two tokens behind the four found, and R's last one, which has the shape of a decode."""
    shapes = shapes_of("P 6/1 @0, Q 6/1 @1, R 5/1 @2", P="abcdef", Q="abcdeg", R="abcde")
    assert [shape[:3] for shape in shapes] == [(((6, 0),), 0, 0), (((2, 4),), 0, 0), ((), 1, 5)]


def test_a_cost_model_sees_what_several_decodes_read() -> None:
    """P, Q and R hold `abcd`, which is shared by two and then three decodes; S shares nothing."""
    shapes = shapes_of("P 6/5 @0, Q 6/3 @1, S 3/2 @1, R 5/2 @2", P="abcdef", Q="abcdeg", R="abcdh", S="xyz")
    assert [(len(shape.chunks), shape.num_decodes, shape.num_shared) for shape in shapes] == [
        *((1, 0, 0), (2, 1, 0), (0, 4, 8), (0, 3, 8), (0, 1, 0))
    ]


def test_only_decodes_of_one_batch_share_reads() -> None:
    """P, Q and R hold `abcd`. In a pipeline of two stages, the batch of P and Q reads one copy twice, R's batch shares nothing."""
    shapes = list[BatchShape]()

    class Shapes(SimExecutor):
        def launch(self, step: Step) -> Span:
            shapes.append(step.shape())
            return super().launch(step)

    texts = prompts(W="abcde", P="abcdex", Q="abcdey", R="abcdez")
    requests = asked("W 5/1 @0, P 6/4 @1, Q 6/4 @1, R 6/4 @1", prompt=texts)
    limits, cost = Limits(2, 4, 100, tile=1, num_stages=2), make_cost(Topology(1, 2))
    server = Server(Shapes(cost), limits, cost, KVSize(40, 2), prefix_cache=LRU())
    server.serve(InOrder(), list(requests.values()))
    assert [(len(shape.chunks), shape.num_decodes, shape.num_shared) for shape in shapes] == [
        *((1, 0, 0), (0, 1, 0), (2, 0, 0), (1, 0, 0)),
        *((0, 2, 4), (0, 1, 0)) * 3,
    ]


def test_a_preempted_request_finds_its_own_blocks() -> None:
    ran = golden(InOrder(), "A 2/2 @0, B 2/2 @0", tokens=9, memory=4, prefix_cache=LRU())
    assert (ran.schedule, ran.found, ran.recomputed) == (
        "A2 B2 | A1 pre B | B2",
        {"A": (0, 0), "B": (0, 1)},
        {"A": 0, "B": 1},
    )
    assert golden(InOrder(), "A 2/2 @0, B 2/2 @0", tokens=9, memory=4).schedule == "A2 B2 | A1 pre B | B3"


def test_a_preempted_request_finds_what_others_have_computed_meanwhile() -> None:
    """B [abc] lost one token, and finds both of A's [ab]."""
    ran = golden(
        InOrder(),
        "A 2/5 @0, B 3/3 @0",
        tokens=3,
        memory=3,
        block=2,
        prefix_cache=LRU(),
        prompt=prompts(A="ab", B="abc"),
    )
    assert ran.schedule == "A2 B1 | A1 pre B | A1 B1 | A1 pre B | A1 | B2 | B1"
    assert ran.recomputed["B"] == 1, "of the second preemption alone"


def test_an_eviction_is_told_who_released_a_block_and_when() -> None:
    """A ends at 3 with 4 + 3 tokens, the last of which has no block; B takes the two blank blocks and then A's, from the last on."""
    seen = list[tuple[float, ...]]()

    class Seen(Eviction):
        def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[int]:
            seen.extend((block.start, block.holder_tokens, block.released_at, now) for block in blocks)
            return super().keys(blocks, now)

    golden(InOrder(), "A 4/3 @0, B 8/1 @5", memory=8, prefix_cache=Seen())
    assert seen == [(start, 7, 3.0, 5.0) for start in (5, 4, 3, 2, 1, 0)]


@pytest.mark.parametrize(("block", "number"), [(1, 4), (2, 3), (3, 5), (8, 2)])
def test_of_equal_prompts_in_turn_all_but_the_first_compute_a_block_at_most(block: int, number: int) -> None:
    asked = ", ".join(f"R{index} 6/1 @{index}" for index in range(number))
    texts = {f"R{index}": "abcdef" for index in range(number)}
    ran = golden(InOrder(), asked, block=block, prefix_cache=LRU(), prompt=prompts(**texts))
    left = 6 - 5 // block * block
    assert ran.schedule == " | ".join(f"R{index}{left if index else 6}" for index in range(number))


@pytest.mark.parametrize(("block", "found"), [(1, 5), (2, 4), (4, 4), (8, 0)])
def test_a_turn_finds_the_turn_before_and_its_answer_but_for_the_last_token(block: int, found: int) -> None:
    """Turn 1 has 4 + 2 tokens, the last of which never entered the cache; turn 2 has these and 3 more."""
    limits = Limits(4, 100, 100, tile=1)
    server = Server(Hashing(NO_COST, 1.0), limits, NO_COST, KVSize(40, block), False, prefix_cache=LRU())
    first = Request(0, 4, 2, prompt=[3, 4, 5, 6])
    second = Request(1, 9, 1, prompt=[*text_of(first), 7, 8, 9], arrival_time=5.0)
    server.serve(InOrder(), [first, second])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, found)


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_cache_without_hits_changes_nothing(name: str) -> None:
    told = []
    for cache in (None, LRU()):
        limits, size = Limits(4, 200, 130, tile=8, max_running=6), KVSize(2000, 3)
        server = Server(SimExecutor(LinearCost(), 1e-4), limits, LinearCost(), size, prefix_cache=cache)
        requests = draw_requests(random.Random(7))
        told.append(tell(server.serve(EVERY_POLICY[name](8), requests)))
        assert not any(request.num_preemptions for request in requests.known) or name in ("mlfq", "ltr")
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "content", [{"prompt": [1, 2, 3, 4]}, {"prefix_hashes": (7, 8, 9, 10), "hash_block": 1}, {"texts": ((5, 0),)}]
)
def test_a_salt_keeps_requests_apart(content: dict[str, Any]) -> None:
    fields = {name: dict.fromkeys("ABC", value) for name, value in content.items()}
    salts = {"A": "mine", "B": "yours", "C": "mine"}
    ran = golden(InOrder(), "A 4/1 @0, B 4/1 @1, C 4/1 @2", prefix_cache=LRU(), salt=salts, **fields)
    assert ran.schedule == "A4 | B4 | C1"


def test_hashes_stand_for_whole_blocks() -> None:
    """Ids of 4 tokens in blocks of 2; C ends within the third id, of which it finds 2 tokens, and D behind its first token."""
    hashes = {"A": (7, 8), "B": (7, 8, 9), "C": (7, 8, 9), "D": (7, 8, 9)}
    ran = golden(
        InOrder(),
        "A 8/1 @0, B 12/1 @1, C 11/1 @2, D 9/3 @3",
        block=2,
        prefix_cache=LRU(),
        prefix_hashes=hashes,
        hash_block=dict.fromkeys("ABCD", 4),
    )
    assert ran.found == {"A": (0, 0), "B": (8, 0), "C": (10, 0), "D": (8, 0)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefix_hashes": (1,), "hash_block": 3}, "3 tokens .workload.prefix, .*not a multiple of block_size=2"),
        ({"prefix_hashes": (1,)}, "not stand for a whole number of tokens.* workload.length_scale"),
        ({"prefix_hashes": (1, 1), "hash_block": 2}, "prefix_hashes repeat"),
        ({"prefix_hashes": (-1,), "hash_block": 2}, "are negative"),
    ],
)
def test_hashes_that_cannot_be_used(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=f"request 0: .*{message}"):
        engine_of([Request(0, 4, 1, **fields)], 8, block=2)


def engine_of(requests: list[Request], num_blocks: int, block: int = 1) -> Engine:
    limits = Limits(4, 100, 100, tile=1)
    server = Server(SimExecutor(NO_COST, 1.0), limits, NO_COST, KVSize(num_blocks, block), False, prefix_cache=LRU())
    return server.engine(InOrder(), requests)


def take_arrivals(engine: Engine) -> None:
    """Makes the submitted requests wait, as the next turn would."""
    for request in engine.arrivals.due(now := engine.now(), engine.iteration):
        engine.arrive(request, now)
    engine._take_arrivals()


def test_what_a_builder_counts_on() -> None:
    """A [abcd] runs and holds 5 of 8 blocks; B [abcde] shares 4 of them, and C [xyz] nothing."""
    a, b, c = (Request(i, len(text), 4, prompt=prompts(_=text)["_"]) for i, text in enumerate(("abcd", "abcde", "xyz")))
    engine = engine_of([a], 8)
    for _ in range(2):
        engine.step()
    engine.submit([b, c])
    take_arrivals(engine)
    view = engine.view
    assert (view.kv.num_free, b.num_computed, b.num_ready, view.kv.num_shared(b), view.kv.num_lacking(b, 5)) == (
        3,
        4,
        1,
        4,
        1,
    )
    plan = view.plan()
    assert (plan.add(b), plan.free_blocks) == (1, 2)
    plan.preempt(a)
    assert plan.free_blocks == 3, "of A's 5 blocks B goes on to hold 4"
    assert (plan.add(c), plan.free_blocks) == (3, 0)
    engine.policy.plan = lambda view: plan.build()  # type: ignore[method-assign]
    engine.step()
    assert (view.kv.num_free, a.num_computed) == (0, 4), "A finds what B holds"


def test_a_departing_newcomer_gives_back_what_it_was_to_take() -> None:
    a, b = (Request(i, len(text), 3, prompt=prompts(_=text)["_"]) for i, text in enumerate(("abcd", "abcdef")))
    engine = engine_of([a], 8)
    engine.step()
    engine.submit([b])
    take_arrivals(engine)
    plan = engine.view.plan()
    assert (plan.free_blocks, plan.add(b), plan.free_blocks) == (4, 2, 2)
    plan.reject(b, "why")
    assert plan.free_blocks == 4


def test_after_a_preemption_nothing_counts_as_shared() -> None:
    """A and B hold [abc]; C could share its blocks, but for the plan that preempts A."""
    texts = ("abc", "abcd", "abcde")
    a, b, c = (Request(i, len(text), 3, prompt=prompts(_=text)["_"]) for i, text in enumerate(texts))
    engine = engine_of([a], 7)
    engine.step()
    engine.submit([b])
    engine.step()
    engine.submit([c])
    take_arrivals(engine)
    plan = engine.view.plan()
    assert (plan.free_blocks, engine.view.kv.num_shared(c)) == (2, 4)
    plan.preempt(a)
    assert (plan.free_blocks, plan.add(c), plan.refusal) == (3, 0, Refusal.BLOCKS)
