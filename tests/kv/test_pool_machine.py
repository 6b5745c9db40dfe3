"""Any sequence of steps leaves a pool of prefix blocks as a plain model of it."""

from itertools import islice
from random import Random

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_check import check_pool
from test_prefix_pool import RANDOM, names_of

from cbatch import CachedBlock, Eviction
from cbatch.kv import BlockHash, Copies, PrefixPool
from policies.evictions import FIFO, LFU, LRU, SLRU, TLRU, Belady, Marconi


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
