"""Which captured shape takes a step; tests that need no GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch.runtime.batch import Bounds, Shape, Work
from cbatch.runtime.fast.graph_shapes import HIDDEN, WORTH, MeasuredGraphs, find_shape, least_tokens, without_slow
from cbatch.runtime.graphs import Captured, GraphedIteration, max_chunks


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
    least = dict(zip(tokens(seconds), least_tokens(seconds, launch_seconds=1.3).values(), strict=True))
    assert least[256] == least[512] == 0  # launching takes more than the 2 s of the padded step are worth
    assert 512 < least[1024] < 1024
    share = (least[1024] - 1 - 512) / 512
    assert 2.0 + 2.0 * share == pytest.approx(WORTH * 4.0, rel=0.01)
    assert set(least_tokens(seconds, launch_seconds=HIDDEN * 4.0).values()) == {0}
    close = least_tokens(shapes({256: 1.0, 384: 1.1}), launch_seconds=0.0)
    assert set(close.values()) == {0}


@pytest.mark.parametrize(
    ("layers", "ranks", "milliseconds", "unpadded"),
    [
        (32, 1, {768: 18.3, 1024: 23.9, 2048: 48.0}, [False, True]),  # Llama-3.1-8B on an H200
        (40, 1, {768: 35.0, 1024: 46.0, 2048: 88.0}, [True, True]),  # LLaMA-13B
        (32, 2, {768: 10.0, 1024: 13.0, 2048: 25.0}, [False, False]),  # on two GPUs, launched by one thread
    ],
)
def test_which_steps_are_padded_depends_on_layers_and_ranks_not_on_the_speed_of_the_host(
    monkeypatch: pytest.MonkeyPatch, layers: int, ranks: int, milliseconds: dict[int, float], unpadded: list[bool]
) -> None:
    """A server of a busy host padded prompts of 1,025 tokens to 2,048 that the simulated one computes unpadded."""

    class Timed(MeasuredGraphs):
        def _replay_seconds(self, shape: Shape) -> float:
            return milliseconds[shape.num_tokens] / 1e3

    monkeypatch.setattr(GraphedIteration, "_capture_all", lambda self, shapes: None)
    model = SimpleNamespace(layers=SimpleNamespace(size=layers))
    eager: Any = SimpleNamespace(models=[model] * ranks)
    stream: Any = None
    (_, (of_1024, _), (of_2048, _)) = Timed(eager, [], [stream], [], list(shapes(milliseconds))).ranges
    assert [of_1024 > 769, of_2048 > 1025] == unpadded


def test_a_step_takes_the_first_shape_for_its_tokens_and_chunks_that_is_worth_it() -> None:
    seconds = shapes({256: 1.0, 512: 2.0, 1024: 2.1})
    least = least_tokens(seconds, launch_seconds=0.0)
    assert tokens(least) == [256, 512, 1024] and least[Shape(1024, 33, 16)] == 0
    assert [find_shape(least, size, 1) for size in (257, 300)] == [None, None]
    assert [find_shape(least, size, 1) for size in (256, 500, 600, 1025)] == [*seconds, None]
    assert [max_chunks(Shape(size, 33, 16)) for size in (64, 256, 1024, 4096)] == [4, 8, 32, 33]
    small, large = least = dict.fromkeys(shapes({64: 1.0, 256: 1.1}), 0)
    assert [find_shape(least, 60, chunks) for chunks in (4, 5, 8, 9)] == [small, large, large, None]


def test_more_chunks_than_a_graph_holds_run_eagerly_though_the_shape_is_the_same() -> None:
    """A full batch of short prompts may be as large as a captured shape by itself."""
    calls: list[str] = []
    shape = Shape(64, 33, 16)
    graph: Any = SimpleNamespace(replay=lambda: calls.append("replay"))
    iteration = GraphedIteration.__new__(GraphedIteration)
    iteration._eager = lambda *_: calls.append("eager")  # type: ignore[assignment]
    iteration.graphs = {(shape, 0): [Captured(graph, torch.empty(0))]}
    iteration.num_replayed = iteration.num_eager = 0
    slot: Any = SimpleNamespace(index=0)
    for chunks in (max_chunks(shape), max_chunks(shape) + 1):
        iteration(slot, Work(shape, Bounds(2, 40, chunks), sampling=False))
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
