"""Block accounting under random use: no block is held twice, and all come back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.kv import BlockPool

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["extend", "each", "release", "later", "end"]), st.integers(0, 4), st.integers(1, 6)),
    max_size=60,
)


@given(ACTIONS)
def test_every_block_is_free_retiring_or_held_once(actions: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(num_blocks=20, block_size=4, num_rows=5, max_tokens_per_request=80)
    iteration = 0
    for action, row, count in actions:
        if action == "extend" and count <= pool.num_free:
            pool.extend(row, count)
        elif action == "each" and pool.num_free >= 5 - row:
            pool.extend_each(np.arange(row, 5))
        elif action == "release":
            pool.release(row, None)
        elif action == "later":
            pool.release(row, iteration + count % 2)
        elif action == "end":
            pool.retire(iteration)
            iteration += 1
        held = np.concatenate([pool.tables[row, : pool.held[row]] for row in range(5)])
        assert len(set(held.tolist())) == len(held)
        assert len(held) + pool.num_free + pool.num_retiring == 20
    for row in range(5):
        pool.release(row, None)
    pool.retire(iteration)
    pool.retire(iteration + 1)
    assert pool.num_used == 0


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0, 16, 4, 100)
