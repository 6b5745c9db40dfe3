"""Blocks with names: worked examples of vLLM's order, and a state machine in which each block holds what was written to it.

A name is the prefix itself, so that a block with a wrong content shows. Examples are written as "abc", a token per character.
"""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_check import check_pool

from cbatch import CachedBlock, Eviction, PolicyError, Request
from cbatch.kv import BlockHash, Copies, PrefixPool
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


class Wild(Eviction):
    """Evicts any leaf, and keeps some in host memory."""

    dynamic = True

    def __init__(self) -> None:
        self.random = Random(0)

    def keys(self, blocks: object, now: float) -> list[float]:
        return [self.random.random() for _ in blocks]  # type: ignore[attr-defined]

    def keeps(self, block: CachedBlock, now: float) -> bool:
        return self.random.random() < 0.8


class PoolMachine(RuleBasedStateMachine):
    """Requests of few tokens in few blocks, on the device and in host memory.

    memory: what was written to each place of a block, the prefix up to its token. host_memory: what was copied to each slot.
    """

    @initialize(random=RANDOM)
    def build(self, random: Random) -> None:
        self.size, self.rows = random.randint(1, 3), random.randint(2, 5)
        kinds = [LRU, LFU, FIFO, SLRU, lambda: TLRU(3, 1), Marconi, Belady, Wild, Wild]
        on_host = random.choice([0, random.randint(1, 5), 20, 500])
        self.pool = PrefixPool(random.randint(3, 10), self.size, self.rows, 12, random.choice(kinds)(), on_host)
        self.host_memory: dict[int, list[str]] = {}
        self.named: set[BlockHash] = set()
        self.readers = dict.fromkeys((1, 3, 500), (self.pool.changes.begin(), frozenset[BlockHash]()))
        self.num_looks = 0
        self.memory: dict[int, str] = {}
        self.texts: dict[int, str] = {}  # by row
        self.computed: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.retiring: set[int] = set()
        self.holder_tokens: dict[int, int] = {}  # of the latest holder of each block
        self.cached_at: dict[int, float] = {}  # by block
        self.iteration = 0

    def table(self, row: int) -> list[int]:
        table: list[int] = self.pool.tables[row, : self.pool.held_by(row)].tolist()
        return table

    @rule(random=RANDOM)
    def plan(self, random: Random) -> None:
        """Preempts some, admits some and computes some, if the blocks suffice; then names what is full."""
        pool, size = self.pool, self.size
        pool.now += random.randint(0, 2)
        victims = [row for row in self.texts if random.random() < 0.15]
        idle = [row for row in range(self.rows) if row not in self.texts]
        found: dict[int, list[str]] = {}
        for row in random.sample(idle, random.randint(0, len(idle))):
            self.texts[row] = "".join(random.choices("ab", k=random.randint(1, 9)))
            names = names_of(self.texts[row][:-1], size)
            found[row] = list(islice(names, next((i for i, name in enumerate(names) if name not in pool), len(names))))
            assert [name for name in names if name in pool] == found[row], "the names are closed"
        starts = {row: len(found[row]) * size if row in found else self.computed[row] for row in self.texts}
        counts = {
            row: random.randint(1, len(text) - starts[row])
            for row, text in self.texts.items()
            if row not in victims and starts[row] < len(text)
        }
        held = {row: len(found[row]) if row in found else pool.held_by(row) for row in counts}
        more = {row: max(pool.blocks_for(starts[row] + n) - held[row], 0) for row, n in counts.items()}
        before, gained = pool.num_free, pool.num_gained(victims, found.values())
        if sum(more.values()) > before + gained:
            for row in found:
                del self.texts[row]
            return
        for row in victims:
            self.release(row, None)
        for row, names in found.items():
            on_device = pool.num_on_device(names)
            pool.share(row, names[:on_device])
            pool.host.hold(names[on_device:])
        for row, names in found.items():
            pool.load(row, names)
        for row, blocks in more.items():
            pool.extend(row, blocks)
        assert pool.num_free == before + gained - sum(more.values())
        self.copy()
        for row, names in found.items():
            for name, block in zip(names, self.table(row), strict=False):
                assert [self.memory[block * size + at] for at in range(size)] == [
                    name[: len(name) - size + at + 1] for at in range(size)
                ]
        for row, number in counts.items():
            text, table = self.texts[row], self.table(row)
            assert starts[row] // size >= pool.num_hashed[row], "a named block is not written to"
            for at in range(starts[row], starts[row] + number):
                self.memory[table[at // size] * size + at % size] = text[: at + 1]
            self.computed[row] = starts[row] + number
            if self.computed[row] == len(text) and len(text) < 11:
                self.texts[row] += random.choice("ab")  # it is generated, and computed later
            assert table[: len(self.tables.get(row, ()))] == self.tables.get(row, []), "a table only grows"
            self.tables[row] = table
        for row in counts:
            pool.register(row, names_of(self.texts[row], size), self.computed[row] // size)
        self.iteration += 1

    def copy(self) -> None:
        """Copies between the tiers what the plan requires, before anything is computed."""
        size = self.size
        for block, slot in (copies := self.pool.host.take_copies() or Copies()).out:
            self.host_memory[slot] = [self.memory[block * size + at] for at in range(size)]
        for block, slot in copies.back:
            self.memory |= {block * size + at: content for at, content in enumerate(self.host_memory[slot])}

    @precondition(lambda self: self.texts)
    @rule(random=RANDOM)
    def end(self, random: Random) -> None:
        self.release(random.choice(list(self.texts)), random.choice([None, self.iteration, self.iteration + 1]))

    def release(self, row: int, after: int | None) -> None:
        table, pool = self.table(row), self.pool
        pool.note_holder(row, len(self.texts[row]))
        self.holder_tokens |= dict.fromkeys(table, len(self.texts[row]))
        pool.release(row, after)
        if after is not None:
            self.retiring.add(after)
        else:
            freed = [block for block in reversed(table) if block in pool._cached]
            assert list(pool._cached)[len(pool._cached) - len(freed) :] == freed, "the last block is evicted first"
        del self.texts[row], self.computed[row], self.tables[row]

    @precondition(lambda self: self.retiring)
    @rule()
    def retire(self) -> None:
        oldest = min(self.retiring)
        self.retiring.remove(oldest)
        self.pool.retire(oldest)

    @invariant()
    def blocks_and_names_agree(self) -> None:
        if hasattr(self, "pool"):
            check_pool(self.pool)
            self.num_looks += 1
            for each in (each for each in self.readers if self.num_looks % each == 0):
                (cursor, held), now = self.readers[each], frozenset([*self.pool._blocks, *self.pool.host._slots])
                changed = self.pool.changes.since(cursor)
                assert changed is None or held ^ now <= {*changed}, "no reader of changed names misses any"
                self.readers[each] = self.pool.changes.begin(), now
            for block, name in enumerate(self.pool._hashes):
                if isinstance(name, str):
                    assert self.memory[(block + 1) * self.size - 1] == name, "a block holds what its name says"
            for name, slot in self.pool.host._slots.items():
                assert self.host_memory[slot][-1] == name, "so does a slot"
            self.named.update(self.pool._blocks)
            if self.pool.host.num_slots == 500 and not isinstance(self.pool.eviction, Wild):
                assert all(name in self.pool for name in self.named), "nothing is lost while the host has room"

    @invariant()
    def evictions_are_told_what_has_happened(self) -> None:
        if hasattr(self, "pool") and not self.pool._in_order:
            self.cached_at = {block: self.cached_at.get(block, self.pool.now) for block in self.pool._cached}
            for number, at in self.cached_at.items():
                block = self.pool._describe(number)
                assert isinstance(name := block.hash, str)
                assert (block.start, block.end) == (len(name) - self.size, len(name))
                assert (block.holder_tokens, block.released_at) == (self.holder_tokens[number], at)


TestPool = pytest.mark.long(PoolMachine.TestCase)
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
