"""Blocks with names: worked examples of vLLM's order, and a state machine in which each block holds what was written to it.

A name is the prefix itself, so that a block with a wrong content shows. Examples are written as "abc", a token per character.
"""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from pool_check import check_pool

from cbatch import CachedBlock, Eviction, PolicyError, Request
from cbatch.kv import PrefixPool
from cbatch.kv.changes import Changes
from policies.evictions import FIFO, LFU, LRU, SLRU, TLRU, Belady, Marconi

RANDOM = st.randoms(use_true_random=True)


def names_of(text: str, size: int) -> list[str]:
    return [text[:end] for end in range(size, len(text) + 1, size)]


def admit(pool: PrefixPool, row: int, text: str) -> int:
    """Shares what is found of a text and takes blocks for the rest; returns the tokens found."""
    found = [name for name in names_of(text[:-1], pool.block_size) if name in pool]
    pool.share(row, found)
    pool.extend(row, pool.blocks_for(len(text)) - len(found))
    pool.register(row, names_of(text, pool.block_size), len(text) // pool.block_size)
    return len(found) * pool.block_size


class Blocks:
    """A pool in the notation of the sheet: blocks are numbered from 1."""

    def __init__(self, num_blocks: int, size: int, eviction: Eviction | None = None) -> None:
        self.pool = PrefixPool(num_blocks, size, 8, 100, eviction or LRU())

    def table(self, row: int) -> list[int]:
        return [block + 1 for block in self.pool.tables[row, : self.pool.held_by(row)].tolist()]

    @property
    def free(self) -> str:
        """The order in which blocks are taken; those right of the bar keep their content."""
        pool = self.pool
        return f"{[block + 1 for block in reversed(pool._blank)]} | {[block + 1 for block in pool._cached]}"

    @property
    def names(self) -> dict[str, list[int]]:
        pool = self.pool
        return {
            str(name): [b + 1 for b in (block, *pool._copies.get(name, ()))] for name, block in pool._blocks.items()
        }


def test_a_machine_that_starts_again_finds_nothing_in_host_memory_either() -> None:
    """Two of four blocks hold "ab" and "abcd"; "xyXY" takes all, so that the first two are in host memory, and clearing sends no others there."""
    pool = PrefixPool(4, 2, 8, 100, LRU(), 10)
    for row, text in enumerate(("abcd", "xyXYzwZW")):
        admit(pool, row, text)
        pool.release(row, None)
    assert len(pool.host) == 2 and "ab" in pool
    copies = pool.host.take_copies()
    assert copies is not None and len(copies.out) == 2
    cursor = pool.changes.begin()
    pool.clear()
    check_pool(pool)
    lost = {"ab", "abcd", *names_of("xyXYzwZW", 2)}
    assert not any(name in pool for name in lost)
    assert {*(pool.changes.since(cursor) or ())} == lost
    assert pool.host.take_copies() is None and pool.num_evicted == 2
    admit(pool, 0, "abcd")
    check_pool(pool)


def test_a_block_s_life_as_in_vllm() -> None:
    """A [abcde] and an output x, B [abcdfg], C [abcd], D [mnopq], E [abcdex!] on six blocks of two tokens."""
    blocks = Blocks(6, 2)
    pool = blocks.pool
    assert admit(pool, 0, "abcde") == 0
    assert (blocks.table(0), blocks.free) == ([1, 2, 3], "[4, 5, 6] | []")
    pool.register(0, names_of("abcdex", 2), 3)
    pool.release(0, None)
    assert (blocks.free, blocks.names) == ("[4, 5, 6] | [3, 2, 1]", {"ab": [1], "abcd": [2], "abcdex": [3]})
    assert admit(pool, 1, "abcdfg") == 4
    assert (blocks.table(1), blocks.free) == ([1, 2, 4], "[5, 6] | [3]")
    assert admit(pool, 2, "abcd") == 2, "its last token is computed though the cache holds it"
    assert (blocks.table(2), blocks.free, blocks.names["abcd"]) == ([1, 5], "[6] | [3]", [2, 5])
    assert pool.num_free == 2, "D, of three blocks, does not fit"
    pool.release(2, None)
    assert blocks.free == "[6] | [3, 5]"
    assert admit(pool, 3, "mnopq") == 0
    assert (blocks.table(3), blocks.free) == ([6, 3, 5], "[] | []")
    assert blocks.names == {"ab": [1], "abcd": [2], "abcdfg": [4], "mn": [6], "mnop": [3]}
    pool.release(1, None)
    assert blocks.free == "[] | [4, 2, 1]"
    pool.release(3, None)
    assert admit(pool, 4, "abcdex!") == 4


def test_a_block_that_is_not_full_is_taken_next() -> None:
    blocks = Blocks(6, 2)
    admit(blocks.pool, 0, "abcde")
    blocks.pool.release(0, None)
    assert blocks.free == "[3, 4, 5, 6] | [2, 1]"


def test_a_retiring_block_is_found_and_taken_back() -> None:
    blocks = Blocks(4, 1)
    pool = blocks.pool
    admit(pool, 0, "abc")
    pool.release(0, after=7)
    assert (pool.num_free, pool.num_retiring, pool.num_in_use(["a", "ab"])) == (1, 3, 2)
    assert admit(pool, 1, "abx") == 2
    assert (pool.num_free, pool.num_retiring) == (0, 1)
    pool.retire(7)
    assert (pool.num_free, pool.num_retiring, blocks.free) == (1, 0, "[] | [3]")


def test_preempting_gains_what_newcomers_do_not_share() -> None:
    """A and B hold [ab], A also [abc]; cached is [x]. Together A and B free three blocks, of which a newcomer shares two."""
    pool = Blocks(8, 1).pool
    admit(pool, 2, "x")
    pool.release(2, None)
    admit(pool, 0, "abc")
    admit(pool, 1, "abd")
    assert (pool.num_alone(0), pool.num_alone(1)) == (1, 1)
    assert [pool.num_gained(rows, ()) for rows in ([0], [1], [0, 1])] == [1, 1, 4]
    assert [pool.num_gained(rows, [["a", "ab"]]) for rows in ([], [0], [0, 1])] == [0, 1, 2]
    assert pool.num_gained([], [["x"], ["x"], ["a"]]) == -1, "two newcomers take the same block once"


class Asked:
    """Prompts served one a second, one at a time, each with one output: the names evicted, and the tokens found."""

    def __init__(self, eviction: Eviction, num_blocks: int, prompts: str) -> None:
        self.blocks, self.evicted, self.found = Blocks(num_blocks, 1, eviction), dict[str, list[str]](), list[int]()
        pool, requests = self.blocks.pool, list(enumerate(prompts.split()))
        for number, prompt in requests:
            eviction.on_submit(Request(number, len(prompt), 1), names_of(prompt, 1))
        for number, prompt in requests:
            before = set(pool._blocks)
            pool.now = number
            found = [name for name in names_of(prompt[:-1], 1) if name in pool]
            eviction.on_admit(Request(number, len(prompt), 1), found, number)
            self.found.append(admit(pool, 0, prompt))
            self.evicted[prompt] = [name for name in before if name not in pool]
            pool.release(0, None)


PROMPTS = "b1 b2 c3 b4 c5 ab6 b7 ab8"


@pytest.mark.parametrize(
    ("eviction", "found", "evicted"),
    [
        (LRU, [0, 1, 0, 1, 1, 0, 0, 2], {"b4", "b", "c5"}),
        (LFU, [0, 1, 0, 1, 1, 0, 1, 2], {"b4", "c5", "c"}),
        (SLRU, [0, 1, 0, 1, 1, 0, 0, 1], {"b4", "c5", "b"}),
        (Belady, [0, 1, 0, 1, 1, 0, 1, 2], None),
    ],
)
def test_hits_of_an_eviction(eviction: type[Eviction], found: list[int], evicted: set[str] | None) -> None:
    asked = Asked(eviction(), 4, PROMPTS)
    assert asked.found == found
    assert evicted is None or set(asked.evicted["ab6"]) == evicted


@pytest.mark.parametrize("eviction", [LRU(), LFU(), FIFO(), SLRU(), TLRU(3, 1), Marconi(), Belady()])
def test_without_evictions_all_evictions_are_equal(eviction: Eviction) -> None:
    asked = Asked(eviction, 30, PROMPTS)
    assert (asked.found, asked.blocks.pool.num_evicted) == ([0, 1, 0, 1, 1, 0, 1, 2], 0)


def test_a_copy_of_a_block_in_use_is_spare() -> None:
    """[ab] of row 0 is released while row 1 still holds its copy; after the release of row 1 only the newer copy is spare."""

    class Spare(Eviction):
        spare: dict[int, bool]

        def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[Any]:
            self.spare = {block.created: block.is_spare for block in blocks}
            return [not block.is_spare for block in blocks]

    pool = Blocks(6, 1, eviction := Spare()).pool
    for row in (0, 1):
        pool.extend(row, 2)
        pool.register(row, ["a", "ab"], 2)
    pool.release(0, None)
    pool.extend(2, 3)  # two are blank
    assert eviction.spare == {1: True, 2: True}
    pool.release(1, 7)
    pool.retire(7)
    pool.extend(2, 1)
    assert eviction.spare == {1: False, 3: True, 4: False}
    assert "a" in pool and "ab" in pool


def test_the_oldest_copy_is_found_next() -> None:
    blocks = Blocks(4, 1)
    for row in range(3):
        blocks.pool.extend(row, 1)
        blocks.pool.register(row, ["a"], 1)
    blocks.pool.release(0, None)
    assert blocks.names == {"a": [1, 2, 3]}
    blocks.pool.extend(3, 2)  # one is blank
    assert blocks.names == {"a": [2, 3]}


def test_belady_expects_nothing_of_requests_that_left() -> None:
    eviction, requests = Belady(), [Request(number, 2, 1) for number in range(2)]
    for request, name in zip(requests, "ab", strict=True):
        eviction.on_submit(request, [name])
    blocks = [CachedBlock(name, 0, 1, False, 1, 0, 0, 0.0, 2) for name in "ab"]
    assert eviction.keys(blocks, 0.0) == [(0, -1), (-1, -1)]
    eviction.on_finish(requests[0])
    assert eviction.dynamic and eviction.keys(blocks, 0.0) == [(-math.inf, -1), (-1, -1)]


def test_each_reader_of_changes_follows_at_its_own_pace() -> None:
    """The log keeps 3 to 6 changes, from the first reader on. A reader that is too far behind learns so."""
    changes = Changes(3)
    changes.add("a")
    early = changes.begin()
    changes.add("bc")
    late = changes.begin()
    changes.add("d")
    assert (changes.since(early), changes.since(late), changes.since(changes.begin())) == (["b", "c", "d"], ["d"], [])
    changes.add("efg")
    assert changes.since(early) == [*"bcdefg"]
    changes.add("h")
    assert (changes.since(early), changes.since(late), len(changes._hashes or ())) == (None, None, 3)


def test_more_blocks_find_no_less_one_at_a_time() -> None:
    random = Random(5)
    for _ in range(8):
        prompts = " ".join(
            "".join(random.choices("ab", k=random.randint(1, 4))) + random.choice("xyz") for _ in range(40)
        )
        found = [sum(Asked(LRU(), size, prompts).found) for size in range(5, 40, 3)]
        assert found == sorted(found)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (lambda blocks: [], r"\(returned 0 keys\); return a number, or a tuple of numbers, for each of 4 blocks"),
        (lambda blocks: 1 / 0, "raised ZeroDivisionError: .*test_prefix_pool.py:"),
        (lambda blocks: ["one" if place else 1 for place in range(len(blocks))], "not supported between"),
        (lambda blocks: [math.nan for _ in blocks], "NaN has no order"),
        (lambda blocks: [(0, math.nan) for _ in blocks], "NaN has no order"),
    ],
)
def test_an_eviction_that_fails_is_named(keys: Callable[[Any], Any], message: str) -> None:
    class Failing(Eviction):
        def keys(self, blocks: object, now: float) -> Any:
            return keys(blocks)

    with pytest.raises(PolicyError, match=f"eviction Failing: keys.. .*{message}"):
        Asked(Failing(), 6, "a b cd ef ghijk lmnop")


def test_a_slot_whose_hash_the_device_has_is_overwritten_alone() -> None:
    """The host has [ab] and [a], the device [a]; while [ab] is read, an evicted block takes the slot of [a]."""
    pool = PrefixPool(4, 1, 4, 10, LRU(), 2)
    admit(pool, 0, "ab")
    pool.release(0, None)
    pool.extend(1, 4)
    pool.release(1, None)
    assert list(pool.host._slots) == ["ab", "a"]
    pool.host.hold(["a"])
    pool.load(0, ["a"])
    pool.extend(0, 1)
    assert pool.host.take_copies() is not None
    admit(pool, 2, "zy")
    pool.release(2, None)
    pool.share(3, ["a"])
    pool.host.hold(["ab"])
    pool.load(3, ["a", "ab"])
    copies = pool.host.take_copies()
    assert copies is not None and [len(each) for each in copies] == [1, 1] and list(pool.host._slots) == ["ab", "zy"]
    check_pool(pool)
