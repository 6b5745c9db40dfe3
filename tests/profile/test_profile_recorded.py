"""A profile from recordings: the prices of iterations, found again from what they took."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbatch import BatchShape, Limits
from cbatch.replay.counterfactual import Recorded
from cbatch.replay.decisions import Decided, Decision, Seen, StepEnd
from cbatch.request import RequestSpec
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import load_profile
from experiments.profile.__main__ import main as profile
from experiments.profile.recorded import iterations
from experiments.settings.presets import load_spec
from experiments.store.decisions_file import DecisionsWriter

Requests = dict[int, list[int]]


def price(shape: BatchShape) -> float:
    """Seconds: 4 ms, 20 us per decode, padded to 8, and 30 ns per token of context; with prompts 5 ms, 30 us, 50 ns, and 1 ns per pair."""
    if not shape.chunks:
        padded = -(-shape.num_decodes // 8) * 8 if shape.num_decodes > 4 else (0, 1, 2, 4, 4)[shape.num_decodes]
        return 4e-3 + 2e-5 * padded + 3e-8 * shape.decode_context
    pairs = sum(tokens * (context + (tokens + 1) / 2) for tokens, context in shape.chunks)
    return 5e-3 + 3e-5 * shape.num_tokens + 5e-8 * shape.decode_context + 1e-9 * pairs


def batches(numbers: random.Random) -> Iterator[tuple[Requests, list[tuple[int, int]]]]:
    """Yields requests (prompt, computed) and entries: prompts in chunks beside decodes, then ever fewer decodes."""
    requests: Requests = {}
    for id_ in range(60):
        requests[id_] = [numbers.randint(50, 1000), 0]
        while (left := requests[id_][0] - requests[id_][1]) > 0:
            chunk = min(left, numbers.choice((32, 100, 400, 1000)))
            yield requests, [*((other, 1) for other in requests if other != id_), (id_, chunk)]
    while requests:
        for _ in range(4):
            yield requests, [(id_, 1) for id_ in requests]
        del requests[min(requests)]


def record(folder: Path) -> list[BatchShape]:
    """Writes a recording, with a pause before each request; returns the shapes."""
    folder.mkdir()
    writer, shapes, now = DecisionsWriter(folder / "decisions.jsonl.gz"), [], 0.0
    writer.begin(Recorded(Limits(64, 2048, 4096), 1000, 16, 1, True, (), (), 64))
    known: set[int] = set()
    for iteration, (requests, entries) in enumerate(batches(random.Random(1))):
        for id_ in requests.keys() - known:
            known.add(id_)
            writer.request(RequestSpec(id_, requests[id_][0], 500))
        running = tuple((id_, computed, 1) for id_, (_, computed) in requests.items() if computed)
        begins = now + (1.0 if not running else 0.0)
        chunks = tuple((count, requests[id_][1]) for id_, count in entries if requests[id_][1] < requests[id_][0])
        contexts = [requests[id_][1] + 1 for id_, _ in entries if requests[id_][1] >= requests[id_][0]]
        shapes.append(BatchShape(chunks, len(contexts), sum(contexts)))
        writer.event(Decision(iteration, Seen(now, 0, (), running, 0, 0), Decided(tuple(entries)), (now,)))
        now = begins + price(shapes[-1])
        writer.event(StepEnd(iteration, begins, now, (), (now,)))
        for id_, count in entries:
            requests[id_][1] += count
    writer.close()
    return shapes


def test_prices_are_found_again(tmp_path: Path) -> None:
    shapes = record(tmp_path / "a")
    found = list(iterations(tmp_path / "a" / "decisions.jsonl.gz"))
    assert [shape for shape, _ in found] == shapes[1:], "before the first one nothing ran"
    assert [seconds for _, seconds in found] == pytest.approx([price(shape) for shape in shapes[1:]])
    written = tmp_path / "vllm.json"
    given = ["engine=vllm", "model=llama-3.1-8b", f"recordings={tmp_path}", f"output={written}"]
    assert profile(given) == 0
    cost = ProfileCost(load_profile(str(written)), load_spec("llama-3.1-8b"))
    for shape in (
        BatchShape((), 17, 9000),
        BatchShape((), 60, 9000),
        BatchShape((), 1, 800),
        BatchShape(((300, 0),)),
        BatchShape(((200, 500), (100, 0)), 30, 15000),
    ):
        assert cost.predict(shape) == pytest.approx(price(shape), rel=0.01)
    assert cost.profile.host_time(True, "llama-3.1-8b").seconds == 0
