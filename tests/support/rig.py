"""A server on the CPU made of real parts that a test can reach and change before it runs, and workloads that stress it."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpu_graphs import CpuGraphs, FixedShapeAttention
from fuzz_policy import FuzzPolicy
from poison import PoisonedIteration
from poison import poison as poison_executor
from races import CheckedStreams, watch
from schedules import UnitCost
from tiny_models import CPU, LLAMA, LONGEST_OUTPUT, LONGEST_PROMPT, Reference, greedy_references, stage_models

from cbatch import Engine, Limits, Policy, Request, Server, Status
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.model.checkpoint import Vocabulary
from cbatch.runtime.attention import ReferenceAttention
from cbatch.runtime.batch import Shape
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.iteration import EagerIteration, Iteration
from cbatch.runtime.slots import Slot, make_slots
from cbatch.runtime.streams import Streams

LONGEST = LONGEST_PROMPT + LONGEST_OUTPUT


@dataclass(frozen=True)
class Ask:
    """A request for the first `max_new_tokens` of a reference's output, or up to the token at `stop_at`."""

    reference: Reference
    max_new_tokens: int
    stop_at: int | None
    arrival_iteration: int

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return () if self.stop_at is None else (self.reference.output[self.stop_at],)

    @property
    def expected(self) -> list[int]:
        return self.reference.expected(self.max_new_tokens, self.stop_tokens)


@dataclass(eq=False)
class Rig:
    """An engine with requests submitted, and its parts. Request i was made from `asks[i]`."""

    streams: Streams
    slots: list[Slot]
    iterations: list[Iteration]
    executor: StreamExecutor
    engine: Engine
    requests: list[Request]
    asks: list[Ask]

    def run(self) -> None:
        """Serve everything.

        Raises:
            AssertionError: a token is wrong, or a request, block or row was lost or given twice.
        """
        try:
            self.engine.run(self._check_progress)
        finally:
            self.executor.close()
        for request, ask in zip(self.requests, self.asks, strict=True):
            assert request.output == ask.expected, f"request {request.id}: wrong tokens"
        check_accounts(self.engine, self.requests)

    def _check_progress(self, engine: Engine) -> None:
        assert engine.state.iteration < 3000, "the run does not end"


def check_accounts(engine: Engine, requests: list[Request]) -> None:
    """Every request was served once, and everything that it held was given back."""
    assert sorted(request.id for request in engine.record.requests) == [request.id for request in requests]
    assert all(request.status is Status.FINISHED for request in requests)
    ids, _ = engine.record.tokens()
    assert Counter(ids.tolist()) == {request.id: len(request.output) for request in requests if request.output}
    pool, table = engine.state.pool, engine.state.table
    assert pool.num_used == pool.num_retiring == 0
    assert sorted(pool._free.tolist()) == list(range(pool.num_blocks))
    assert sorted(table._free_rows) == list(range(table.num_rows))


def build(
    streams: Streams,
    policy: Policy,
    asks: list[Ask],
    *,
    spec: ModelSpec = LLAMA,
    graphs: bool = False,
    asynchronous: bool = True,
    num_stages: int = 1,
    sizes: Sequence[int] | None = None,
    num_ranks: int = 1,
    batch: int = 4,
    num_blocks: int = 24,
    block_size: int = 4,
    poison: bool = False,
) -> Rig:
    """Puts an engine together.

    graphs: replay captured graphs for all iterations.
    num_ranks: of each stage. num_stages: of the pipeline, whose streams `streams` must be. sizes: number of layers of each stage.
    """
    limits = Limits(batch, max_tokens=LONGEST + batch, max_request_tokens=LONGEST, tile=1, num_stages=num_stages)
    kv = KVSize(num_blocks, block_size)
    slots = make_slots(limits, block_size, [[CPU] * num_ranks] * num_stages, streams, spec.hidden_size)
    if isinstance(streams, CheckedStreams):
        watch(slots, streams.checker)
    attention = FixedShapeAttention() if graphs else ReferenceAttention()
    stages = stage_models(spec, kv, attention, num_stages, sizes, num_ranks)
    iterations: list[Iteration] = []
    for stage, models in enumerate(stages):
        eager = PoisonedIteration(models) if poison else EagerIteration(models)
        parts, shapes = [slot.stages[stage] for slot in slots], [Shape.largest(limits, block_size)]
        iterations.append(CpuGraphs(eager, parts, models[0].cache, shapes) if graphs else eager)
    executor = StreamExecutor(streams, slots, iterations, Vocabulary(spec))
    if poison:
        poison_executor(executor)
    requests = [
        ask.reference.request(id_, ask.max_new_tokens, ask.stop_tokens, ask.arrival_iteration)
        for id_, ask in enumerate(asks)
    ]
    engine = Server(executor, limits, UnitCost(), kv, asynchronous).engine(policy, requests)
    return Rig(streams, slots, iterations, executor, engine, requests, asks)


def stress(
    streams: Callable[[random.Random], Streams],
    seed: int,
    *,
    spec: ModelSpec = LLAMA,
    graphs: bool = False,
    asynchronous: bool = True,
    num_stages: int = 1,
    num_ranks: int = 1,
) -> Rig:
    """A run in which requests stop early, are preempted and reordered, and blocks and table rows are soon reused.

    Not poisoned: errors are for other checks to find.
    """
    numbers = random.Random(seed)
    references = greedy_references(spec)
    asks = [
        Ask(numbers.choice(references), LONGEST_OUTPUT, numbers.choice([None, *range(LONGEST_OUTPUT)]), id_ // 2)
        for id_ in range(numbers.randint(4, 10))
    ]
    return build(
        streams(numbers),
        FuzzPolicy(seed),
        asks,
        spec=spec,
        graphs=graphs,
        asynchronous=asynchronous,
        num_stages=num_stages,
        num_ranks=num_ranks,
        num_blocks=numbers.randint(14, 24),
    )
