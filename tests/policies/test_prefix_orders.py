"""Orders by what the prefix cache holds, on worked examples of SGLang's rules and of DLPM."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from math import inf
from random import Random
from typing import Any

import pytest
from test_prefix_cache import MODES, AnyOrder, serve
from test_prefix_plans import take_arrivals
from unit_machine import golden

from cbatch import Engine, Limits, Plan, Request, Server, View
from cbatch.cost import NO_COST
from cbatch.kv import KVSize
from cbatch.sim.executor import SimExecutor
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.prefix_order import PrefixOrder
from policies.sarathi_serve import SarathiServe
from policies.shared.kept_orders import FewestUncached, KeptOrder
from policies.shared.prefix_tree import DepthFirst


class Told:
    """Serves what waits, or shows its order. Each text is a prompt; a letter is a token."""

    def __init__(self) -> None:
        limits = Limits(64, 1000, 500, tile=1)
        server = Server(SimExecutor(NO_COST, 1.0), limits, NO_COST, KVSize(2000, 1), False, prefix_cache=LRU())
        self.engine: Engine = server.engine(self)
        self.names: dict[Request, str] = {}

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        for request in view.waiting:
            plan.add(request)
        return plan.build()

    def cache(self, *texts: str) -> "Told":
        """Whole texts: a prompt finds all but its last token."""
        self.ask({f"cached {text}": text + "!" for text in texts})
        self.engine.run()
        return self

    def ask(self, texts: dict[str, str]) -> list[Request]:
        number = len(self.names)
        made = [
            Request(number + i, len(text), 1, prompt=[ord(token) for token in text])
            for i, text in enumerate(texts.values())
        ]
        self.names |= dict(zip(made, texts, strict=True))
        self.engine.submit(made)
        take_arrivals(self.engine)
        return made

    def order(self, order: str, in_batch: bool | None = None) -> str:
        policy = PrefixOrder(Fixed(4), order, in_batch)
        for request in self.engine.view.waiting:
            policy.on_arrival(request)
            policy.on_wait(request)
        policy._computed = 1  # else all response ratios would be 0
        ranked = policy._kept.in_order(self.engine.view)
        return " ".join(self.names[request] for request in ranked)


T = "".join(map(chr, range(1000, 1050)))
SIX = {
    "r1": "S" * 40 + "a" * 20,
    "r2": "S" * 40 + "b" * 60,
    "r3": T[:35] + "z" * 5,
    "r4": T + "w" * 5,
    "r5": "S" * 40 + "c" * 10,
    "r6": "q" * 10,
}


def test_the_longest_match_first_and_repeated_prefixes_last() -> None:
    told = Told().cache(T)
    assert [request.num_computed for request in told.ask(SIX)] == [0, 0, 35, 50, 0, 0]
    assert told.order("lpm") == "r4 r3 r1 r6 r2 r5"
    assert told.order("spf", in_batch=True) == "r3 r4 r6 r1 r5 r2"
    assert told.order("spf") == "r3 r4 r6 r5 r1 r2"


def test_lpm_keeps_repeated_prefixes_in_the_order_of_the_queue() -> None:
    """A2 and B2 share 32 uncached or cached tokens with A1 and B1, and come last: A2 first, though B2 has the longer match."""
    told = Told().cache("A" * 10, "B" * 20)
    told.ask({f"{letter}{number}": letter * 40 + str(number) for number in (1, 2) for letter in "AB"})
    assert told.order("lpm") == "B1 A1 A2 B2"
    assert told.order("spf", in_batch=True) == "B1 A1 B2 A2"


def test_requests_that_were_put_last_are_first_once_their_prefix_is_cached() -> None:
    told = Told().cache(T, SIX["r1"])
    told.ask({name: SIX[name] for name in ("r6", "r2", "r5")})
    assert told.order("lpm") == "r2 r5 r6"


def test_depth_first_through_the_branch_for_which_most_wait() -> None:
    told = Told().cache("P" * 10 + "1" * 5, "P" * 10 + "2" * 5, "Q" * 8)
    told.ask({"q1": "Q" * 8 + "a", "p1": "P" * 10 + "1" * 5 + "b", "x": "xx", "p2": "P" * 10 + "2" * 5 + "c"})
    told.ask({"p3": "P" * 10 + "2" * 5 + "d", "p4": "P" * 10 + "e"})
    assert told.order("dfs_weight") == "p2 p3 p1 p4 q1 x"
    assert told.order("lpm") == "p1 p2 p3 p4 q1 x"
    told = Told().cache("P" * 8, "Q" * 8)
    told.ask({name: name[0].upper() * 8 + name for name in ("p1", "q1", "q2", "p2")})
    assert told.order("dfs_weight") == "p1 p2 q1 q2", "of equal branches, that of the oldest request"


def test_a_request_that_has_left_no_longer_counts_for_its_branch() -> None:
    told, policy = Told().cache("P" * 8, "Q" * 8), PrefixOrder(Fixed(4), "dfs_weight")
    asked = told.ask({name: name[0].upper() * 8 + name for name in ("q", "p1", "p2")})
    for request in asked:
        policy.on_arrival(request)
        policy.on_wait(request)
    told.engine.cancel(asked[-1])
    policy.on_finish(asked[-1])
    assert [told.names[request] for request in policy._kept.in_order(told.engine.view)] == ["q", "p1"]


@pytest.mark.parametrize("order", ["lpm", "dfs_weight", "spf", "hrrn"])
def test_a_preempted_request_returns_to_the_order(order: str) -> None:
    """12 blocks are too few for two requests of 9 tokens: the second loses 6 and finds 3 of them again, so 2 * 9 + 3 are computed."""
    policy, limits = PrefixOrder(Fixed(8), order), Limits(2, 16, 16, tile=1)
    requests = [Request(id_, 4, 6, prompt=[10 * id_ + place for place in range(4)]) for id_ in range(2)]
    server = Server(SimExecutor(NO_COST, 1.0), limits, NO_COST, KVSize(12, 1), False, prefix_cache=LRU())
    server.engine(policy, requests).run()
    assert [(request.num_output_tokens, request.num_lost_tokens) for request in requests] == [(6, 0), (6, 6)]
    assert requests[1].num_cached_again == 3 and policy._computed == 2 * 9 + 3


def test_beyond_128_waiting_lpm_and_hrrn_are_first_come_first_served() -> None:
    told = Told().cache(T)
    told.ask({f"x{number}": "x" * 300 for number in range(127)} | {"match": T})
    for later in ({}, {"y": "y"}):
        told.ask(later)
        places = [told.order(order).split().index("match") for order in ("lpm", "hrrn", "spf", "dfs_weight")]
        assert places == ([127, 127, 0, 0] if later else [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("cached", "shared", "is_last"), [(0, 31, False), (0, 32, True), (32, 40, True), (33, 40, False)]
)
def test_which_repeated_prefixes_lpm_puts_last(cached: int, shared: int, is_last: bool) -> None:
    """Those of requests with at most 32 cached tokens that share at least 32 tokens with an earlier such request."""
    told = Told().cache("A" * cached)
    told.ask({"first": "A" * shared + "1", "second": "A" * shared + "2", "other": "b"})
    assert told.order("lpm") == ("first other second" if is_last else "first second other")


def test_the_response_ratio_is_of_uncached_tokens() -> None:
    """1,000 tokens have been computed. X came at 200 and lacks 400, Y at 800 and 50, Z at 0 and 900."""
    policy, told = PrefixOrder(Fixed(4), "hrrn"), Told()
    for name, length, before in (("X", 400, 200), ("Y", 50, 800), ("Z", 400, 0)):
        [request] = told.ask({name: name * length})
        policy._computed = before
        policy.on_arrival(request)
    policy._computed = 1000
    assert [told.names[request] for request in policy._kept.in_order(told.engine.view)] == ["Y", "Z", "X"]


def test_in_the_order_of_lpm_each_edge_of_the_trie_is_computed_once() -> None:
    """One at a time, outputs of one token, an ample cache (RadixAttention, theorem 3.1); a prompt found whole computes its last token."""
    random = Random(3)
    for _ in range(20):
        prompts = {f"R{i}": random.choices("ab", k=random.randint(1, 6)) for i in range(random.randint(1, 20))}
        tokens = {name: [ord(letter) for letter in prompt] for name, prompt in prompts.items()}
        asked = ", ".join(f"{name} {len(prompt)}/1 @0" for name, prompt in prompts.items())
        ran = golden(PrefixOrder(Fixed(100), in_batch=False), asked, batch=1, prefix_cache=LRU(), prompt=tokens)
        served = [prompts[name] for name in sorted(ran.ends, key=ran.ends.__getitem__)]
        edges = {tuple(prompt[:end]) for prompt in served for end in range(1, len(prompt) + 1)}
        whole = sum(any(prompt == other[: len(prompt)] for other in served[:at]) for at, prompt in enumerate(served))
        assert (
            sum(len(prompt) for prompt in served) - sum(found for found, _ in ran.found.values()) == len(edges) + whole
        )


HOT = "".join(map(chr, range(500, 508)))


@pytest.mark.parametrize("number", [30, 60, 120])
@pytest.mark.parametrize(
    ("policy", "waits"),
    [
        (lambda: PrefixOrder(Fixed(4), "lpm"), lambda number: number + 3),
        (lambda: PrefixOrder(Fixed(4), "spf"), lambda number: number + 3),
        (lambda: PrefixOrder(Fixed(4), "hrrn"), lambda number: 33),
        (lambda: SarathiServe(Fixed(4)), lambda number: 8),
    ],
)
def test_lpm_starves_a_cold_prompt_and_hrrn_does_not(
    policy: Callable[[], Any], waits: Callable[[int], int], number: int
) -> None:
    """N hot prompts have 8 shared and 2 own tokens: one runs and 3 wait at first, and one comes each second. A cold prompt of 12 comes at 2."""
    hot = {f"H{index}": [*map(ord, HOT), 2000 + index, 1] for index in range(number)}
    asked = [f"{name} 10/1 @{max(index - 3, 0)}" for index, name in enumerate(hot)]
    asked.insert(5, "C 12/1 @2")
    ran = golden(policy(), ", ".join(asked), batch=1, tokens=4, prefix_cache=LRU(), prompt={**hot, "C": [3] * 12})
    assert ran.ends["C"] - 2 == waits(number)


class Ranks(AnyOrder):
    """Makes random plans, some of them by a kept order, and compares this order with that of all waiting requests at each plan."""

    def __init__(self, numbers: Random, kept: KeptOrder, plain: Callable[[View], list[Request]]) -> None:
        super().__init__(numbers.randint(0, 1_000_000), preempts=numbers.choice((0.0, 0.05, 0.2)), rejects=0.02)
        self.kept, self.plain, self.forgets = kept, plain, numbers.random() < 0.3
        self.requests: dict[int, Request] = {}  # by identity, as `deepcopy` has them

    def on_arrival(self, request: Request) -> None:
        self.requests[id(request)] = request
        self.kept.expect([request])

    def on_finish(self, request: Request) -> None:
        self.kept.discard([request])

    def plan(self, view: View) -> Plan:
        if self.forgets:  # the log keeps one or two changes, so that an order often cannot tell which hashes changed
            view.kv._state.cache.pool.changes._most = 1  # type: ignore[attr-defined]
        expected = self.plain(view)
        self.kept.in_order(view)
        assert [*deepcopy(self.kept, dict(self.requests)).in_order(view)] == expected
        plan = super().plan(view)
        if self._random.random() < 0.5 and not view.num_in_flight:
            made = view.plan()
            made.add_decodes(preempt_newest=True)
            for request, other in zip(self.kept.in_order(view), expected, strict=False):
                assert request is other
                if not made.add(request, self._random.randint(1, 9)):
                    break
            plan = made.build() if made.num_requests else plan
        self.kept.discard(plan.requests)
        self.kept.expect(plan.preempt)
        return plan


def by_uncached(view: View) -> list[Request]:
    return sorted(view.waiting, key=lambda request: request.num_tokens - request.num_computed)


def depth_first(view: View) -> list[Request]:
    """By the path through the tree of cached prefixes: of each step, how few wait beyond it, and its place among the first seen."""
    size, waiting = view.kv.block_size, list(view.waiting)
    names = {request: view.kv.block_hashes(request)[: request.num_computed // size] for request in waiting}
    weight = Counter(chain.from_iterable(names.values()))
    place = {name: number for number, name in enumerate(weight)}
    return sorted(waiting, key=lambda request: [*((-weight[name], place[name]) for name in names[request]), (inf, 0)])


@pytest.mark.parametrize(("kept", "plain"), [(FewestUncached, by_uncached), (DepthFirst, depth_first)])
@pytest.mark.parametrize("mode", MODES)
def test_an_order_that_is_kept_is_that_of_all_who_wait(
    kept: Callable[[], KeptOrder], plain: Callable[[View], list[Request]], mode: str, num_cancellations: int, draw: int
) -> None:
    """Blocks are registered and evicted, requests arrive, are admitted, preempted, rejected and cancelled."""
    for seed in range(draw, draw + num_cancellations):
        serve(lambda numbers: Ranks(numbers, kept(), plain), seed, mode)
