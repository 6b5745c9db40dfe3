"""A server on the CPU made of real parts that a test can reach and change before it runs, and workloads that stress it."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from any_order import AnyOrderStream
from fuzz_policy import FuzzPolicy
from guesses import Guesses
from poison import PoisonedIteration
from poison import poison as poison_executor
from pool_check import check_pool
from races import check_races
from schedules import UnitCost
from tiny_models import CPU, LLAMA, LONGEST_OUTPUT, LONGEST_PROMPT, Reference, greedy_references, stage_models

from cbatch import Engine, Eviction, FinishReason, Limits, Policy, Request, Server, Status
from cbatch.arrivals import Listed
from cbatch.drafts import Drafter
from cbatch.kv import KVSize, PrefixPool
from cbatch.model import ModelSpec
from cbatch.runtime.attention import ReferenceAttention
from cbatch.runtime.cpu import caches_of, make_draft_models
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.host_memory import stage_copies
from cbatch.runtime.iteration import EagerIteration, make_drafting
from cbatch.runtime.options import Options
from cbatch.runtime.slots import Slot, make_slots
from cbatch.runtime.streams import Stream, Streams, ThreadStream, stream_names

LONGEST = LONGEST_PROMPT + LONGEST_OUTPUT


@dataclass(frozen=True)
class Ask:
    """A request for the first `max_new_tokens` of a reference's output, or up to its token at `stop_at`.

    reference: its place among the references. answered: tokens of the output that are part of the prompt, as in a next turn.
    """

    reference: int
    max_new_tokens: int = LONGEST_OUTPUT
    stop_at: int | None = None
    arrival_iteration: int = 0
    answered: int = 0

    def request(self, id_: int, references: Sequence[Reference]) -> Request:
        reference = self._continued(references)
        stop_tokens = () if self.stop_at is None else (reference.output[self.stop_at],)
        return reference.request(id_, self.max_new_tokens, stop_tokens)

    def expected(self, request: Request, references: Sequence[Reference]) -> list[int]:
        return self._continued(references).expected(self.max_new_tokens, request.stop_tokens)

    def _continued(self, references: Sequence[Reference]) -> Reference:
        prompt, sampling, output = references[self.reference]
        return Reference([*prompt, *output[: self.answered]], sampling, output[self.answered :])


@dataclass(eq=False)
class Rig:
    """An engine with requests submitted, and its parts. expected: the output of each request."""

    slots: list[Slot]
    iterations: list[EagerIteration]
    executor: StreamExecutor
    engine: Engine
    requests: list[Request]
    expected: list[list[int]]

    def run(self) -> None:
        """Serve everything.

        Raises:
            AssertionError: a token is wrong, or a request, block or row was lost or given twice.
        """
        try:
            self.engine.run(self._check_progress)
        finally:
            self.executor.close()
        for request, expected in zip(self.requests, self.expected, strict=True):
            if request.finish_reason is FinishReason.REJECTED:
                expected = expected[: len(request.output)]
            else:
                stopped = expected[-1] in request.stop_tokens
                assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert request.output == expected, f"request {request.id}: wrong tokens"
        check_accounts(self.engine, self.requests)

    def _check_progress(self, engine: Engine) -> None:
        assert engine.state.iteration < 3000, "the run does not end"


def check_accounts(engine: Engine, requests: list[Request]) -> None:
    """Every request was served once, and everything that it held was given back."""
    record = engine.record
    assert sorted(request.id for request in record.requests) == [request.id for request in requests]
    assert all(request.status is Status.FINISHED for request in requests)
    ids, times = record.tokens()
    assert Counter(ids.tolist()) == {request.id: len(request.output) for request in requests if request.output}
    assert all(earlier <= later for earlier, later in pairwise(times))
    pool, table = engine.state.pool, engine.state.table
    assert pool.num_used == pool.num_retiring == 0
    if isinstance(pool, PrefixPool):
        check_pool(pool)
    else:
        assert sorted(pool._free.tolist()) == list(range(pool.num_blocks))
    assert sorted(table._free_rows) == list(range(table.num_rows))


def threads(num_stages: int = 1) -> Streams:
    return Streams.of([ThreadStream(name) for name in stream_names(num_stages)])


def beside(stream: Stream, name: str) -> Stream:
    """Returns a further stream of the same kind."""
    return AnyOrderStream(name, stream._order) if isinstance(stream, AnyOrderStream) else ThreadStream(name)


def build(
    streams: Streams,
    policy: Policy,
    asks: Sequence[Ask],
    references: Sequence[Reference],
    *,
    spec: ModelSpec = LLAMA,
    asynchronous: bool = True,
    num_stages: int = 1,
    sizes: Sequence[int] | None = None,
    num_ranks: int = 1,
    batch: int = 4,
    num_blocks: int = 24,
    block_size: int = 4,
    poison: bool = False,
    check: bool = False,
    kind: type[EagerIteration] = EagerIteration,
    prefix_cache: Eviction | None = None,
    num_host_blocks: int = 0,
    max_drafts: int = 0,
    drafter: Drafter | None = None,
) -> Rig:
    """Puts an engine together.

    num_ranks: of each stage. num_stages: of the pipeline, whose streams `streams` must be. sizes: number of layers of each stage.
    drafter: None: `Guesses`, if there are drafts.
    poison: tokens of memory that was never written are an error. check: so are races. kind: what computes.
    """
    limits = Limits(batch, LONGEST + batch, LONGEST, tile=1, num_stages=num_stages, max_drafts=max_drafts)
    kv = KVSize(num_blocks, block_size, num_host_blocks)
    slots = make_slots(limits, block_size, [[CPU] * num_ranks] * num_stages, streams, spec.hidden_size)
    stages = stage_models(spec, kv, ReferenceAttention(), num_stages, sizes, num_ranks)
    drafter = (drafter or Guesses(references)) if max_drafts else None
    made = PoisonedIteration if poison else kind
    draft_models = make_draft_models(Options(drafter=drafter, tensor_parallel=num_ranks), spec, kv)
    iterations = [
        made(models, drafting=make_drafting(drafter, models, () if stage else draft_models, limits, spec.vocab_size))
        for stage, models in enumerate(stages)
    ]
    executor = StreamExecutor(streams, slots, iterations, drafter)
    executor.caches = caches = caches_of(stages, draft_models)
    executor.host_copies = stage_copies(caches, lambda stage: beside(streams.d2h, f"blocks {stage}"), len(slots))
    if poison:
        poison_executor(executor)
    if check:
        check_races(executor)
    requests = [ask.request(id_, references) for id_, ask in enumerate(asks)]
    expected = [ask.expected(request, references) for ask, request in zip(asks, requests, strict=True)]
    server = Server(executor, limits, UnitCost(), kv, asynchronous, prefix_cache=prefix_cache)
    arriving = {id_: ask.arrival_iteration for id_, ask in enumerate(asks)}
    engine = server.engine(policy, Listed(requests, arriving))
    return Rig(slots, iterations, executor, engine, requests, expected)


def stress(
    streams: Callable[[random.Random, int], Streams],
    seed: int,
    *,
    spec: ModelSpec = LLAMA,
    asynchronous: bool = True,
    num_stages: int = 1,
    num_ranks: int = 1,
    check: bool = False,
    max_drafts: int = 0,
) -> Rig:
    """A run in which requests stop early, are preempted and reordered, and blocks and table rows are soon reused.

    streams: made from random numbers and the number of stages.
    """
    numbers = random.Random(seed)
    references = greedy_references(spec)
    asks = [
        Ask(
            numbers.randrange(len(references)),
            stop_at=numbers.choice([None, *range(LONGEST_OUTPUT)]),
            arrival_iteration=id_ // 2,
        )
        for id_ in range(numbers.randint(4, 10))
    ]
    return build(
        streams(numbers, num_stages),
        FuzzPolicy(seed),
        asks,
        references,
        spec=spec,
        asynchronous=asynchronous,
        num_stages=num_stages,
        num_ranks=num_ranks,
        num_blocks=numbers.randint(14, 24),
        check=check,
        max_drafts=max_drafts,
    )
