"""Blocks and places that a plan can use; `test_engine_machine` checks that every block is free, retiring or held once."""

from types import SimpleNamespace

import pytest
from plain_view import PlainKVView, PlainRequest

from cbatch import Limits, Request, RequestSpec
from cbatch.kv import BlockPool, CountingPool
from cbatch.limits import Resources


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0, 16, 4, 100)
    assert BlockPool(1, 1, 4, 100).num_tokens == 1


def test_a_pool_that_grows_keeps_the_blocks_of_its_rows() -> None:
    pool = BlockPool(8, 4, 2, 16)
    pool.extend(1, 2)
    held = pool.tables[1, :2].tolist()
    pool.grow(5)
    assert (pool.tables.shape, pool.tables[1, :2].tolist(), pool.held.tolist()) == ((5, 4), held, [0, 2, 0, 0, 0])


@pytest.mark.parametrize("kind", [BlockPool, CountingPool])
def test_blocks_of_two_requests_come_free_with_the_same_iteration(kind: type[BlockPool]) -> None:
    pool = kind(8, 4, 2, 16)
    for row, blocks in ((0, 2), (1, 3)):
        pool.extend(row, blocks)
    for row in (0, 1):
        pool.release(row, 7)
    assert (pool.num_free, pool.num_retiring) == (3, 5)
    pool.retire(7)
    assert (pool.num_free, pool.num_retiring) == (8, 0)


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
    """After 8 computed tokens the next one takes a third block, after 11 it does not; a token in flight is not ready."""
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
