"""Which captured shape takes a step: what can be decided without a GPU."""

from __future__ import annotations

import pytest

from cbatch.runtime.batch import Shape
from cbatch.runtime.graphs import HIDDEN, WORTH, least_tokens, max_chunks, without_slow


def shapes(seconds: dict[int, float]) -> dict[Shape, float]:
    return {Shape(size, 33, 16): time for size, time in seconds.items()}


def tokens(found: dict[Shape, object]) -> list[int]:
    return [shape.num_tokens for shape in found]


def test_shapes_slower_than_a_larger_one_are_left_out() -> None:
    assert tokens(without_slow(shapes({64: 1.0, 96: 2.5, 128: 2.0, 256: 4.0}))) == [64, 128, 256]
    assert tokens(without_slow(shapes({64: 1.0, 96: 2.02, 128: 2.0}))) == [64, 96, 128]
    assert without_slow({}) == {}


def test_a_step_far_below_the_next_shape_runs_unpadded_where_launching_hides() -> None:
    seconds = shapes({256: 1.0, 512: 2.0, 1024: 4.0})
    least = dict(zip(tokens(seconds), least_tokens(seconds, launch_seconds=0.9).values(), strict=True))
    assert least[256] == least[512] == 0  # 0.9 s of launching would show beside 1 s of computing
    assert 512 < least[1024] < 1024
    share = (least[1024] - 1 - 512) / 512
    assert 2.0 + 2.0 * share == pytest.approx(WORTH * 4.0, rel=0.01)
    assert set(least_tokens(seconds, launch_seconds=HIDDEN * 4.0).values()) == {0}


def test_shapes_close_in_time_take_all_steps() -> None:
    seconds = shapes({256: 1.0, 384: 1.1})
    assert set(least_tokens(seconds, launch_seconds=0.0).values()) == {0}


def test_a_shape_takes_as_many_chunks_as_its_tokens_allow() -> None:
    assert [max_chunks(Shape(size, 33, 16)) for size in (64, 256, 1024, 4096)] == [4, 8, 32, 33]
