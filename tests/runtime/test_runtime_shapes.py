"""Which captured shape takes a step; tests that need no GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cbatch.limits import Limits
from cbatch.runtime.batch import ANY, Extents, Shape, Work
from cbatch.runtime.fast.graph_shapes import MeasuredGraphs, default_shapes, mixed_sizes, without_slow
from cbatch.runtime.graphs import Captured, GraphedIteration, is_decode, max_chunks


def shapes(seconds: dict[int, float]) -> dict[Shape, float]:
    return {Shape(size, 33, 16): time for size, time in seconds.items()}


def tokens(found: dict[Shape, object]) -> list[int]:
    return [shape.num_tokens for shape in found]


def test_shapes_slower_than_a_larger_one_are_left_out() -> None:
    assert tokens(without_slow(shapes({64: 1.0, 96: 2.5, 128: 2.0, 256: 4.0}))) == [64, 128, 256]
    assert tokens(without_slow(shapes({64: 1.0, 96: 2.02, 128: 2.0}))) == [64, 96, 128]
    assert without_slow({}) == {}


def test_a_step_takes_the_first_shape_for_its_tokens_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    milliseconds = {64: 7.0, 256: 9.0, 384: 19.0, 512: 12.0, 1024: 24.0}  # 384 tokens take longer than 512

    class Timed(MeasuredGraphs):
        def _replay_seconds(self, shape: Shape) -> float:
            return milliseconds[shape.num_tokens] / 1e3

    monkeypatch.setattr(GraphedIteration, "_capture_all", lambda self, shapes: None)
    eager: Any = SimpleNamespace(shape=lambda step: None)
    stream: Any = None
    captured = [Shape(8, 8, 16), *(Shape(size, 33, 16) for size in milliseconds)]
    iteration = Timed(eager, [], [stream], [], captured)
    assert iteration.mixed_sizes == (64, 256, 512, 1024)

    def size_of(pad_to: int, num_chunks: int, decodes: int = 0) -> int | None:
        rows = num_chunks + decodes
        step: Any = SimpleNamespace(
            pad_to=pad_to, rows=range(rows), num_tokens=np.array([2] * num_chunks + [1] * decodes), within=None
        )
        shape: Shape | None = iteration.shape(step)
        return shape and shape.num_tokens

    assert [size_of(size, 1) for size in (9, 64, 65, 257, 512, 1024, 1025)] == [64, 64, 256, 512, 512, 1024, None]
    assert [max_chunks(Shape(size, 33, 16)) for size in (64, 256, 1024, 4096)] == [4, 8, 32, 33]
    assert [size_of(60, chunks) for chunks in (4, 5, 8, 9)] == [64, 256, 256, 512]
    assert size_of(5, 0, decodes=5) == 8


def test_sizes_are_every_tile_above_the_batch() -> None:
    assert mixed_sizes(Limits(48, 4096, 4096, tile=128)) == [128, 192, *range(256, 2049, 128)]
    assert mixed_sizes(Limits(200, 1024, 4096, tile=128)) == list(range(256, 1025, 128))
    assert mixed_sizes(Limits(48, 4096, 4096, tile=128, graph_sizes=(32, 4096, 8192))) == [4096]


def test_a_step_takes_a_graph_with_the_fewest_passes_of_a_draft_model_that_it_needs() -> None:
    """2 requests with up to 3 drafts: as many rows as the drafts of each number need, and mixed graphs without drafts or with the most.

    A graph of decodes is for as many requests as can have all of its drafts, and for as many as it has rows.
    """
    shapes = default_shapes(Limits(2, 64, 64, tile=32, max_drafts=3), 16, "all", range(3))
    sizes = [(shape.num_rows, shape.num_drafts, shape.num_requests) for shape in shapes if is_decode(shape)]
    decodes = [(1, 0, 1), (2, 0, 2), (2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 2, 1), (4, 2, 2), (6, 2, 2)]
    assert sorted(sizes) == sorted([*decodes, (1, 3, ANY), (2, 3, ANY), (4, 3, 1), (4, 3, 2), (8, 3, 2)])
    mixed = [(shape.num_tokens, shape.num_rows, shape.num_drafts) for shape in shapes if not is_decode(shape)]
    assert mixed == [(size, 8, number) for number in (0, 3) for size in (32, 48, 64)]
    iteration = GraphedIteration.__new__(GraphedIteration)
    iteration.shapes = sorted(shapes)

    def chosen(*within: int, pad_to: int | None = None) -> tuple[int, ...]:
        step: Any = SimpleNamespace(
            pad_to=pad_to or len(within), rows=within, num_tokens=np.array([1] * len(within)), within=np.array(within)
        )
        shape = iteration.shape(step)
        return shape.num_tokens, shape.num_drafts, shape.num_requests

    assert chosen(0, 1, 0) == (4, 1, 2)
    assert chosen(0, 1, 0, 1, 2) == (6, 2, 2)
    assert chosen(0, 1, 2, 3, 0, 1, 2) == (8, 3, 2)
    assert (chosen(0, 1, 2, 3), chosen(0, 0, 1, 2)) == ((4, 3, 1), (4, 2, 2))
    assert (chosen(0, 0, pad_to=40), chosen(0, 1, pad_to=40)) == ((48, 0, ANY), (48, 3, ANY))


def test_more_chunks_than_a_graph_holds_run_eagerly_though_the_shape_is_the_same() -> None:
    """A full batch of short prompts may be as large as a captured shape by itself."""
    calls: list[str] = []
    shape = Shape(64, 33, 16)
    graph: Any = SimpleNamespace(replay=lambda: calls.append("replay"))
    iteration = GraphedIteration.__new__(GraphedIteration)
    iteration._eager = SimpleNamespace(parts=lambda *_: calls.append("eager"))  # type: ignore[assignment]
    iteration.graphs = {(shape, 0): [Captured(graph, torch.empty(0))]}
    iteration.num_replayed = iteration.num_eager = 0
    slot: Any = SimpleNamespace(index=0)
    for chunks in (max_chunks(shape), max_chunks(shape) + 1):
        iteration(slot, Work(shape, Extents(2, 40, chunks), sampling=False))
    assert calls == ["replay", "eager"]
    assert (iteration.num_replayed, iteration.num_eager) == (1, 1)


def test_what_loading_left_unused_is_given_back_before_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch cannot do so during a capture, which then runs out of memory though most of it is unused."""
    calls: list[str] = []

    class Recorded(GraphedIteration):
        def _warm_up(self, shape: Shape) -> None:
            calls.append("warm up")

        def _capture(self, shape: Shape, slot: Any, pool: Any) -> None:
            calls.append("capture")

        def _used_bytes(self) -> int:
            return 0

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("give back"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    slot: Any = SimpleNamespace(index=0)
    stream: Any = None
    Recorded(lambda *_: None, [slot], [stream], [], [Shape(8, 8, 4), Shape(64, 8, 4)])  # type: ignore[arg-type]
    assert calls == ["warm up", "warm up", "give back", "capture", "capture"]
