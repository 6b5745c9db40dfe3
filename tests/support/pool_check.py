"""What holds of a pool of named blocks at any moment."""

from collections import Counter
from itertools import chain

import numpy as np

from cbatch.kv import PrefixPool


def check_pool(pool: PrefixPool) -> None:
    """Each block is in one place, references are counted, names and blocks agree both ways, and the names are closed."""
    tables = [pool.tables[row, : pool.held_by(row)].tolist() for row in range(len(pool.room))]
    assert all(len(set(table)) == len(table) for table in tables)
    live = Counter(block for table in tables for block in table)
    leaving = Counter(chain.from_iterable(blocks.tolist() for blocks in chain.from_iterable(pool._retiring.values())))
    assert pool.live.tolist() == [live[block] for block in range(pool.num_blocks)]
    assert pool.leaving.tolist() == [leaving[block] for block in range(pool.num_blocks)]
    retiring = leaving.keys() - live
    assert sorted([*pool._blank, *pool._cached, *live.keys(), *retiring]) == list(range(pool.num_blocks))
    assert pool.num_free == len(pool._blank) + len(pool._cached)
    assert (pool.num_retiring, pool.num_cached) == (len(retiring), len(pool._cached))
    for rows in (np.arange(len(tables))[start::step] for step in (1, 2, 3) for start in range(step)):
        entries = [block for row in rows.tolist() for block in tables[row]]
        assert pool.num_shared_tokens(rows) == (len(entries) - len(set(entries))) * pool.block_size
    named = {(name, block) for block, name in enumerate(pool._hashes) if name is not None}
    assert named == {(name, b) for name, first in pool._blocks.items() for b in (first, *pool._copies.get(name, ()))}
    assert not {block for _, block in named} & set(pool._blank)
    before = {(name, previous) for name, block in named if (previous := pool._before[block]) is not None}
    assert all(previous in pool for _, previous in before)
    assert pool._num_successors == dict(Counter(previous for _, previous in before))
    for row, table in enumerate(tables):
        named_here = [pool._hashes[block] is not None for block in table]
        assert named_here == [place < pool.num_hashed[row] for place in range(len(table))]
    check_host(pool)


def check_host(pool: PrefixPool) -> None:
    """Each slot is free or has one name, the names are closed over both tiers, and what follows a name goes before it."""
    host = pool.host
    assert not host._reading, "slots are protected until they have been read"
    assert sorted([*host._free, *host._slots.values()]) == list(range(host.num_slots))
    assert host._before.keys() == host._slots.keys()
    assert all(before is None or before in pool for before in host._before.values())
    following = {(before, name) for before, names in host._following.items() for name in names}
    assert following == {(before, name) for name, before in host._before.items() if before is not None}
    order = {name: place for place, name in enumerate(host._slots)}
    for name, before in host._before.items():
        assert before not in order or before in pool._blocks or order[name] < order[before]
