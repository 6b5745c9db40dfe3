"""Packing: every packed step of fuzzed runs is compared with the request table and the block pool."""

from typing import Any

import numpy as np
import pytest
import torch
from fuzz_policy import FuzzPolicy
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import UnitCost

from cbatch import Engine, Limits, Request, Sampling, Step, StepResult
from cbatch.runtime.batch import NOT_CARRIED, PLACEHOLDER, Fields, Shape, Work, device_views, host_views, pack, uniform
from cbatch.sim.executor import SimExecutor

VOCABULARY = 1000
MAX_TOKENS, MAX_BATCH, LONGEST = 40, 5, 60


class PackingExecutor(SimExecutor):
    """Packs each step into a buffer of random words, checks the result, and returns random tokens."""

    needs_tokens = True

    def __init__(self, extra: Shape) -> None:
        """extra: padding beyond the step's own shape, where the step is padded at all."""
        super().__init__(UnitCost())
        self.extra = extra
        self.random = np.random.default_rng(1)
        self.num_carried = self.num_padded = 0
        self.sampled: list[np.ndarray] = []

    def launch(self, step: Step) -> Any:
        shape = Shape.of(step)
        if shape.num_tokens > step.num_batch_tokens:
            shape = Shape(*(size + more for size, more in zip(shape, self.extra, strict=True)))
        buffer = self.random.integers(-(2**31), 2**31, shape.size).astype(np.int32)
        packed = host_views(buffer, shape)
        pack(step, shape, packed)
        self.check_rows(step, packed)
        check_padding(step, shape, packed)
        assert Work.of(shape, packed).bounds.max_context_len >= (step.start + step.num_tokens).max()
        self.num_carried += int((packed.carry >= 0).sum())
        self.num_padded += shape.num_tokens > step.num_batch_tokens
        self.sampled.append(self.random.integers(0, VOCABULARY, len(step.rows)).astype(np.int32))
        return super().launch(step), len(self.sampled) - 1

    def wait(self, in_flight: Any) -> StepResult:
        span, index = in_flight
        result = super().wait(span)
        return StepResult(self.sampled[index], result.started, result.ended)

    def check_rows(self, step: Step, packed: Fields[np.ndarray]) -> None:
        page = step.pool.block_size
        for place, request in enumerate(step.requests):
            begin, end = packed.query_starts[place : place + 2]
            positions = np.arange(step.start[place], step.start[place] + end - begin)
            assert end - begin == step.num_tokens[place]
            assert packed.context_lens[place] == positions[-1] + 1
            assert packed.positions[begin:end].tolist() == positions.tolist()
            blocks = step.pool.tables[request.row, : -(-int(positions[-1] + 1) // page)]
            assert packed.block_tables[place, : len(blocks)].tolist() == blocks.tolist()
            assert packed.kv_indices[begin:end].tolist() == [blocks[p // page] * page + p % page for p in positions]
            self.check_inputs(step, packed, place)
            sampling = request.sampling
            assert packed.temperature[place] == np.float32(sampling.temperature)
            if packed.temperature.any():
                assert (packed.top_k[place], packed.top_p[place]) == (sampling.top_k, np.float32(sampling.top_p))
                expected = uniform(np.array([sampling.seed], np.uint64), np.array([positions[-1] + 1], np.uint64))
                assert packed.uniform[place] == expected[0]

    def check_inputs(self, step: Step, packed: Fields[np.ndarray], place: int) -> None:
        """Token values, the carried ones included, are the request's prompt and output."""
        request, (begin, end) = step.requests[place], packed.query_starts[place : place + 2]
        ids, carry = packed.token_ids[begin:end], packed.carry[begin:end]
        assert (carry[:-1] == NOT_CARRIED).all()
        assert step.table.tokens is not None
        known = step.table.tokens[request.row, : request.num_known]
        inputs = ids.tolist()
        if carry[-1] != NOT_CARRIED:
            assert ids[-1] == PLACEHOLDER
            assert step.start[place] + len(ids) == request.num_known + 1
            inputs = inputs[:-1]
        assert inputs == known[step.start[place] :][: len(inputs)].tolist()
        assert len(inputs) + (carry[-1] != NOT_CARRIED) == len(ids)


def check_padding(step: Step, shape: Shape, packed: Fields[np.ndarray]) -> None:
    num_rows, num_tokens = len(step.rows), int(step.num_tokens.sum())
    dummy, page = step.pool.num_blocks, step.pool.block_size
    starts = packed.query_starts
    assert starts[0] == 0
    assert len(packed.token_ids) == shape.num_tokens
    assert (starts[num_rows:] == num_tokens).all()
    assert (packed.token_ids[num_tokens:] == PLACEHOLDER).all()
    assert (packed.carry[num_tokens:] == NOT_CARRIED).all()
    assert (packed.kv_indices[num_tokens:] // page == dummy).all()
    assert (packed.block_tables[num_rows:] == dummy).all()
    assert packed.block_tables.min() >= 0
    assert packed.block_tables.max() <= dummy  # beyond a request's own blocks any existing block will do
    assert (packed.temperature[num_rows:] == 0).all()
    assert (packed.context_lens[num_rows:] == 0).all()


lengths = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 20), st.sampled_from((0.0, 0.7))), min_size=1, max_size=8
)


@settings(max_examples=60)
@given(
    lengths=lengths,
    seed=st.integers(0, 100),
    page=st.sampled_from((1, 4, 16)),
    extra=st.tuples(*[st.integers(0, 5)] * 3),
)
def test_every_step_can_be_read_back(
    lengths: list[tuple[int, int, float]], seed: int, page: int, extra: tuple[int, int, int]
) -> None:
    executor = PackingExecutor(Shape(*extra))
    limits = Limits(MAX_BATCH, MAX_TOKENS, LONGEST)
    engine = Engine(FuzzPolicy(seed), executor, limits, UnitCost(), num_blocks=-(-LONGEST // page) + 4, block_size=page)
    random = np.random.default_rng(seed)
    engine.submit(
        Request(
            id_,
            prompt,
            output,
            prompt=random.integers(0, VOCABULARY, prompt).tolist(),
            sampling=Sampling(temperature, 5, 0.9, seed=id_ + 1),
        )
        for id_, (prompt, output, temperature) in enumerate(lengths)
    )
    engine.run()
    assert executor.num_carried or max(output for _, output, _ in lengths) < 4


@pytest.mark.parametrize("shape", [Shape(7, 3, 2), Shape(1, 1, 1), Shape(64, 2, 40)])
def test_host_and_device_cut_the_buffer_alike(shape: Shape) -> None:
    buffer = np.arange(shape.size, dtype=np.int32)
    host, device = host_views(buffer, shape), device_views(torch.from_numpy(buffer), shape)
    used = 0
    for name in Fields.__dataclass_fields__:
        ours, theirs = getattr(host, name), getattr(device, name)
        assert ours.shape == tuple(theirs.shape)
        assert np.shares_memory(ours, buffer)
        assert ours.view(np.int32).tolist() == theirs.view(torch.int32).tolist()
        used += ours.size
    assert used == shape.size
