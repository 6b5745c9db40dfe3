"""Block accounting under random use: no block is held twice, and all come back."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_view import PlainKVView, PlainRequest

from cbatch import Limits, Request, RequestSpec
from cbatch.kv import BlockPool
from cbatch.limits import Resources

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
    assert BlockPool(1, 1, 4, 100).num_tokens == 1


class Few(Resources):
    """Three run, of 5, 8 and 11 computed tokens in blocks of 4, two of them decoding; four may."""

    def __init__(self) -> None:
        self.kv = PlainKVView(SimpleNamespace(block_size=4, num_blocks=20, num_free=9, num_retiring=2))  # type: ignore[arg-type]
        self.limits = Limits(max_batch=4, max_tokens=100, max_request_tokens=100)
        self.running = [decode(id_, computed) for id_, computed in enumerate((5, 8, 11))]
        self.decoding = self.running[1:]

    def is_waiting(self, request: Request) -> bool:
        return False


def decode(id_: int, computed: int, ready: int = 1) -> PlainRequest:
    request = PlainRequest.from_spec(RequestSpec(id_, 3, 30))
    request.computed, request.ready, request.held = computed, ready, -(-computed // 4)
    return request


def test_blocks_and_places_that_a_plan_can_use() -> None:
    few = Few()
    assert [few.kv.blocks_for(tokens) for tokens in (0, 1, 4, 5, 9)] == [0, 1, 1, 2, 3]
    assert [few.kv.num_lacking(few.running[0], tokens) for tokens in (4, 8, 9, 17)] == [0, 0, 1, 3]  # it holds 2
    assert few.num_places == 1


def test_decodes_that_are_ready_and_the_blocks_that_they_take() -> None:
    """Of 8 computed tokens the next takes a third block, of 11 it does not; a token in flight is not ready."""
    few = Few()
    _, second, third = few.running
    assert few.ready_decodes(2) == ([second, third], 1)
    assert few.ready_decodes(1) == ([second], 1)
    assert few.ready_decodes(2, {second}) == ([third], 0)
    assert few.decode_blocks() == {second: 1, third: 0}
    few.decoding = [decode(3, 12, ready=0), third, second]
    assert few.decode_blocks() == {third: 0, second: 1}
    assert few.ready_decodes(2) == ([third, second], 1)
    assert few.ready_decodes(0) == ([], 0)
