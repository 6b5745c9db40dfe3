"""Curves and grids: measured points stay as measured, steps stay steps, and what lies outside is known."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_cluster import SPEC

from cbatch import BatchShape
from cbatch.cost import scores
from cbatch.model import ModelSpec
from cbatch.sim.attention import AttentionRates, TableAttention
from cbatch.sim.interpolation import BilinearGrid, ChunkGrid, PiecewiseLinear
from cbatch.sim.roofline import Ceilings, MatrixProducts, small_operations

# 4 heads and 2 key-value heads of 3, 8 hidden states, an MLP of 16; values of 2 bytes
TINY = ModelSpec("tiny", "llama", 1, 8, 4, 2, 3, 16, 100, 64)
POINTS = st.dictionaries(st.integers(1, 1000), st.floats(1e-6, 1.0), min_size=1, max_size=20)


@given(POINTS, st.integers(1, 1200))
def test_a_curve_goes_through_its_points_and_never_beyond_its_neighbours(points: dict[int, float], size: int) -> None:
    measured = PiecewiseLinear.through(points.items())
    assert [measured.at(known) for known in points] == pytest.approx(list(points.values()))
    for (low, before), (high, after) in pairwise(sorted(points.items())):
        if low <= size <= high:
            slack = 1e-12
            assert min(before, after) - slack <= measured.at(size) <= max(before, after) + slack
    assert measured.covers(size) == (size <= max(points))


def test_curves_by_hand() -> None:
    """A step stays a step; a curve holds below its points and grows in proportion beyond; points measured twice are averaged."""
    measured = PiecewiseLinear((128, 256, 257, 384), (55.0, 69.8, 92.33, 92.33))
    assert [measured.at(size) for size in (128, 192, 256, 257, 300, 384)] == [55.0, 62.4, 69.8, 92.33, 92.33, 92.33]
    assert [PiecewiseLinear((10, 20), (1.0, 3.0)).at(size) for size in (1, 40)] == [1.0, 6.0]
    assert PiecewiseLinear.through([(2, 3.0), (1, 1.0), (2, 5.0)]) == PiecewiseLinear((1, 2), (1.0, 4.0))


def test_a_grid_interpolates_both_ways_and_knows_what_it_covers() -> None:
    ragged = BilinearGrid.through([(64, 0, 1.0), (64, 100, 2.0), (64, 200, 3.0), (128, 0, 2.0), (128, 100, 4.0)])
    assert ragged == BilinearGrid((64, 128), ((0, 100, 200), (0, 100)), ((1.0, 2.0, 3.0), (2.0, 4.0)))
    assert [ragged.at(*place) for place in ((64, 100), (64, 150), (96, 100), (96, 50))] == [
        2.0,
        2.5,
        3.0,
        (1.5 + 3) / 2,
    ]
    assert ragged.at(128, 200) == 6.0  # the row's mean slope goes on
    assert (ragged.at(256, 100), ragged.at(32, 0)) == (8.0, 1.0)  # in proportion to the last row; as the first
    places = ((64, 200), (100, 200), (128, 200), (128, 100), (129, 0))
    assert [ragged.covers(*place) for place in places] == [True, True, False, True, False]


def test_the_attention_of_a_chunk_is_linear_in_its_scores() -> None:
    """1 second and half a second a score, measured at two sizes and contexts: of 8 tokens after 100 others, 8 * (100 + 4.5)."""
    grid = ChunkGrid.through((size, before, 1 + scores(size, before) / 2) for size in (8, 64) for before in (0, 100))
    assert (grid.at(8, 0), grid.at(8, 100)) == (1 + 36 / 2, 1 + 836 / 2)
    for size, before in ((16, 0), (40, 60), (64, 300), (500, 0), (70000, 1000)):
        assert grid.at(size, before) == pytest.approx(1 + size * (before + (size + 1) / 2) / 2)
    assert grid.at(4, 50) == grid.at(8, 50)


def test_nothing_outside_the_measured_range_is_faster_than_the_largest_rate() -> None:
    """A row without contexts, and decodes that take the same at 10 and at 20 tokens."""
    tables = TableAttention(
        ChunkGrid.through([(8, 0, 9.0)]),
        BilinearGrid.through([(1, 20, 5.0), (2, 10, 5.0), (2, 20, 5.0)]),
        seconds_per_score=0.5,
    )
    assert tables.seconds(BatchShape(((8, 0),))) == 9.0
    assert tables.seconds(BatchShape(((8, 100),))) == 836 / 2
    assert tables.seconds(BatchShape((), 2, 40)) == 5.0
    assert tables.seconds(BatchShape((), 2, 80)) == 10.0


def test_attention_tables_sum_chunks_and_add_decodes_at_their_mean_context() -> None:
    chunks = ChunkGrid.through([(8, 0, 1.0), (8, 100, 2.0)])
    tables = TableAttention(chunks, BilinearGrid.through([(1, 10, 0.5), (1, 20, 1.0), (4, 10, 2.0), (4, 20, 4.0)]))
    assert tables.seconds(BatchShape()) == 0.0
    assert tables.seconds(BatchShape(((8, 0), (8, 50)), 4, 60)) == 1.0 + 1.5 + 3.0
    mixed = TableAttention(chunks, tables.decodes, BilinearGrid.through([(4, 15, 9.0)]))
    assert mixed.seconds(BatchShape((), 4, 60)) == 3.0
    assert mixed.seconds(BatchShape(((8, 0),), 4, 60)) == 10.0
    assert not tables.covers(BatchShape(((9, 0),)))
    assert not tables.covers(BatchShape((), 4, 84))
    assert tables.covers(BatchShape(((8, 100),), 4, 80))
    cached = replace(tables, shared_reads=PiecewiseLinear((1.0, 4.0), (0.0, 0.8)))
    assert cached.seconds(BatchShape((), 4, 60, num_shared=25)) == tables.seconds(BatchShape((), 4, 40)) == 2.0
    ragged = TableAttention(ChunkGrid.through([(8, 0, 1.0), (8, 100, 2.0), (64, 0, 9.0)]), tables.decodes)
    assert ragged.seconds(BatchShape(((8, 200),))) < scores(8, 200)  # no largest rate is known
    assert [ragged.covers(BatchShape((chunk,))) for chunk in ((64, 0), (64, 100))] == [True, False]


def test_attention_in_closed_form_takes_the_larger_of_arithmetic_and_reading() -> None:
    rates = AttentionRates(
        bandwidth_bytes_per_second=128.0,
        flops_per_second=256.0,
        chunk_bandwidth_bytes_per_second=64.0,
        base_seconds=1.0,
        mixed_seconds=0.5,
        seconds_per_context_token=10.0,
    )
    attention = rates.of(SPEC)  # 128 bytes of KV a token, 256 FLOPs a score
    assert attention.seconds(BatchShape(((3, 10),))) == 1.0 + 3 * (10 + 2)  # arithmetic
    assert attention.seconds(BatchShape(((1, 10),))) == 1.0 + 11 * 2  # reading
    assert attention.seconds(BatchShape((), 4, 400)) == 1.0 + 1000.0  # the longest decode
    assert attention.seconds(BatchShape((), 400, 400)) == 1.0 + 400.0
    assert attention.seconds(BatchShape(((3, 10),), 400, 400)) == 1.0 + 436.0 + 0.5
    assert AttentionRates(256.0, 256.0, 64.0).of(SPEC).seconds(BatchShape((), 1, 100)) == 50.0  # nothing but reading


def test_an_estimated_product_takes_whole_tiles_of_arithmetic_or_one_read() -> None:
    product = MatrixProducts(((1000, 2000),), 2, Ceilings(5e9, 1e12, tile=128))
    assert product.at(1) == pytest.approx(2 * (2e6 + 3000) / 5e9)
    assert product.at(1025) == product.at(1152) == pytest.approx(2 * 1152 * 2e6 / 1e12)


def test_small_operations_by_hand() -> None:
    """10 hidden states, 24 queries, keys and values twice, and 2 inputs and an output of the activation, at 4 bytes/s."""
    assert small_operations(TINY, Ceilings(4.0, 1.0, 1)).at(3) == 3 * 2 * (10 * 8 + 2 * 24 + 3 * 16) / 4
