"""Requests that move between engines: their tokens stay those of one engine, and nothing leaks, whatever ends when."""

import random
from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from fuzz_policy import FuzzPolicy
from guesses import Speculating
from poison import poisoned
from pool_check import check_pool
from schedules import UnitCost
from tiny_models import LLAMA, LONGEST_OUTPUT, LONGEST_PROMPT, greedy_references, make_executor, stage_models

from cbatch import Engine, FinishReason, Limits, Policy, Request, Status
from cbatch.drafts import ModelDrafter
from cbatch.host import advance
from cbatch.kv import KVSize, PrefixPool, hashes
from cbatch.kv.hashes import chained
from cbatch.model import ModelSpec
from cbatch.moves import Loading, Moved, hold
from cbatch.runtime.attention import ReferenceAttention
from cbatch.runtime.cpu import assemble, make_draft_models
from cbatch.runtime.options import Options
from cbatch.runtime.transfers import copy_blocks
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.sarathi_serve import SarathiServe

SIZE = 4
LONGEST = LONGEST_PROMPT + LONGEST_OUTPUT


class Pair:
    """Two engines on the CPU; what the second reads is copied at once, or by `deliver`. fewest, most: blocks of a random cache.

    ahead: requests wait at once, before the engine hears that the copies have ended.
    """

    spec, size, limits, fewest, most = LLAMA, SIZE, Limits(4, LONGEST + 4, LONGEST, tile=1), 15, 40

    def __init__(self, policies: list[Policy], *, asynchronous: bool = True, num_blocks: int = 40) -> None:
        size = {"num_blocks": num_blocks, "block_size": self.size, "asynchronous": asynchronous}
        self.engines = [
            Engine(policy, executor, self.limits, UnitCost(), prefix_cache=LRU(), **size)
            for policy, executor in zip(policies, self.executors(num_blocks), strict=False)
        ]
        self.sent: list[int] = []  # blocks of each transfer
        self.late: list[tuple[int, Any]] = []
        self.at_once, self.ahead = True, False
        for receiver in range(len(self.engines)):
            self.engines[receiver].inbox.read = lambda *sent, receiver=receiver: self._read(receiver, *sent)
        self.sender_of: dict[int, int] = {}

    def executors(self, num_blocks: int) -> list[Any]:
        return [make_executor(self.spec, self.limits, num_blocks, self.size) for _ in range(2)]

    def copy(self, sender: Any, receiver: Any, pairs: Any) -> None:
        copy_blocks(sender.caches, receiver.caches, pairs)

    def _read(self, receiver: int, loading: Loading, moved: Moved, now: float) -> bool:
        self.late.append((receiver, (loading, moved)))
        if self.ahead:
            self._copy(receiver, loading, moved)
        elif self.at_once:
            self.deliver()
        return self.ahead

    def _copy(self, receiver: int, loading: Loading, moved: Moved) -> None:
        engine, sender = self.engines[receiver], self.engines[self.sender_of[loading.request.id]]
        blocks = engine.state.pool.tables[loading.row, : len(loading.hashes)]
        pairs = moved.blocks[loading.num_found :], blocks[loading.num_found :]
        self.copy(sender.executor, engine.executor, pairs)
        self.sent.append(len(pairs[0]))

    def deliver(self) -> None:
        """Ends what is under way."""
        for receiver, (loading, moved) in self.late:
            engine, sender = self.engines[receiver], self.engines[self.sender_of[loading.request.id]]
            if not self.ahead:
                self._copy(receiver, loading, moved)
            moved.lease.end()
            engine.inbox.copied.append(loading.request.id)
            engine.poke(engine.now())
            sender.poke(sender.now())
        self.late.clear()

    def move(self, request: Request, sender: int, receiver: int, lease: float = inf) -> Moved:
        self.sender_of[request.id] = sender
        moved = self.engines[sender].give(request, lease)
        self.engines[receiver].offer(request, moved, self.engines[receiver].now())
        return moved

    def step(self, engine: Engine) -> None:
        if engine.num_in_flight or (engine.num_unfinished and min(engine.next_at(), engine.arrivals.next()) < inf):
            advance(engine, engine.arrivals)

    def close(self) -> None:
        for engine in self.engines:
            engine.executor.close()


def asked(number: int, spec: ModelSpec = LLAMA, **fields: Any) -> list[Request]:
    """Request i is reference i, of the longer ones."""
    references = greedy_references(spec)[-number:]
    return [
        Request(id_, len(reference.prompt), LONGEST_OUTPUT, prompt=reference.prompt, **fields)
        for id_, reference in enumerate(references)
    ]


def check_end(pair: Pair, requests: list[Request]) -> None:
    """Each request ended once with its tokens, each token was received once, and both sides have everything back."""
    references = greedy_references(pair.spec)[-len(requests) :]
    for request, reference in zip(requests, references, strict=True):
        whole = request.finish_reason is FinishReason.LENGTH
        assert request.output == reference.output[: None if whole else len(request.output)], request
    ended = [request.id for engine in pair.engines for request in engine.record.requests]
    assert sorted(ended) == [request.id for request in requests]
    ids = [id_ for engine in pair.engines for id_ in engine.record.tokens()[0].tolist()]
    assert Counter(ids) == {request.id: len(request.output) for request in requests if request.output}
    for engine in pair.engines:
        state = engine.state
        assert not state.leases and not engine.inbox.offered and not engine.inbox.loading
        assert state.pool.num_used == 0
        assert isinstance(state.pool, PrefixPool)
        check_pool(state.pool)
        assert sorted(state.table._free_rows) == list(range(state.table.num_rows))


def run_to_end(pair: Pair) -> None:
    for _ in range(2000):
        pair.deliver()
        if not any(engine.num_unfinished or engine.num_in_flight for engine in pair.engines):
            break
        for engine in pair.engines:
            pair.step(engine)
    for engine in pair.engines:
        engine.poke(0.0)
        engine._take_arrivals()


def test_the_blocks_of_a_moved_request_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever engine fills them: the receiver keeps the hashes of the sender."""
    hashed: list[bytes] = []
    monkeypatch.setattr(hashes, "chained", lambda *block: hashed.extend(made := chained(*block)) or made)
    pair, (request,) = Pair([SarathiServe(Fixed(48)), SarathiServe(Fixed(48))]), asked(1)
    pair.engines[0].state.hands_over = lambda request: True
    pair.engines[0].on_leave = lambda request: pair.move(request, 0, 1)
    pair.engines[0].submit([request])
    run_to_end(pair)
    check_end(pair, [request])
    assert pair.sent and len(hashed) == len({*hashed}) == (request.max_tokens - 1) // SIZE
    pair.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_is_computed_here_and_its_output_there(asynchronous: bool) -> None:
    """All full blocks are sent, and the receiver computes the rest of the prompt and the first token: fewer than a block and one."""
    pair = Pair([SarathiServe(Fixed(48)), SarathiServe(Fixed(48))], asynchronous=asynchronous)
    first = pair.engines[0]
    requests = asked(4)
    first.state.hands_over = lambda request: True
    first.on_leave = lambda request: pair.move(request, 0, 1)
    first.submit(requests)
    run_to_end(pair)
    check_end(pair, requests)
    assert pair.sent == [request.num_prompt_tokens // SIZE for request in sorted(requests, key=lambda r: r.finished_at)]
    assert first.record.tokens()[0].tolist() == [0, 1, 2, 3], "the first token of each is computed with its prompt"
    for request in requests:
        assert request.num_cached_again == request.num_prompt_tokens // SIZE * SIZE
        assert (request.num_preemptions, request.num_moves) == (0, 1)
        assert request.num_recomputed_tokens == request.num_prompt_tokens % SIZE
    pair.close()


def test_a_request_that_ends_with_its_first_token_stays() -> None:
    pair = Pair([SarathiServe(Fixed(48)), SarathiServe(Fixed(48))])
    (reference,) = greedy_references(LLAMA)[-1:]
    shortest = Request(0, len(reference.prompt), 1, prompt=reference.prompt)
    stops = Request(1, len(reference.prompt), 9, prompt=reference.prompt, stop_tokens=(reference.output[0],))
    pair.engines[0].state.hands_over = lambda request: True
    pair.engines[0].submit([shortest, stops])
    run_to_end(pair)
    assert [shortest.finish_reason, stops.finish_reason] == [FinishReason.LENGTH, FinishReason.STOP]
    assert pair.engines[0].state.pool.num_used == 0 and not pair.sent
    pair.close()


def test_blocks_that_the_receiver_has_are_not_sent() -> None:
    """The prompt comes twice; the second time only the notification is left."""
    pair = Pair([SarathiServe(Fixed(48)), SarathiServe(Fixed(48))])
    first, reference = pair.engines[0], greedy_references(LLAMA)[-1]
    first.state.hands_over = lambda request: True
    first.on_leave = lambda request: pair.move(request, 0, 1)
    for id_ in range(2):
        first.submit([Request(id_, len(reference.prompt), 4, prompt=reference.prompt)])
        run_to_end(pair)
    assert pair.sent == [len(reference.prompt) // SIZE, 0]
    pair.close()


def test_a_lost_lease_recomputes_and_leaks_nothing() -> None:
    """The sender frees the blocks at once: the receiver finds none and computes prompt and first token again."""
    pair = Pair([SarathiServe(Fixed(48)), SarathiServe(Fixed(48))])
    requests = asked(3)
    pair.engines[0].state.hands_over = lambda request: True
    pair.engines[0].on_leave = lambda request: pair.move(request, 0, 1, lease=-inf)
    pair.engines[0].submit(requests)
    run_to_end(pair)
    check_end(pair, requests)
    assert not pair.sent
    assert all(request.num_recomputed_tokens == request.num_prompt_tokens for request in requests)
    pair.close()


def test_a_client_may_leave_while_its_blocks_are_copied() -> None:
    """The blocks stay taken until the copy has ended: it would write into another request's."""
    pair = Pair([SarathiServe(Fixed(48)), SarathiServe(Fixed(48))])
    pair.at_once = False
    first, second = pair.engines
    requests = asked(1)
    first.state.hands_over = lambda request: True
    first.on_leave = lambda request: pair.move(request, 0, 1)
    first.submit(requests)
    while not pair.late:
        pair.step(first)
        pair.step(second)
    assert requests[0].status is Status.MOVING
    second.cancel(requests[0])
    held = requests[0].num_prompt_tokens // SIZE
    assert (first.state.pool.num_used, second.state.pool.num_used) == (held, held), "the partial block is free"
    run_to_end(pair)
    check_end(pair, requests)
    assert requests[0].output == greedy_references(LLAMA)[-1].output[:1]
    pair.close()


def test_held_blocks_stay_while_they_are_sent() -> None:
    """Although their client leaves and others need the memory, of which they take all that is left."""
    pair = Pair([SarathiServe(Fixed(8))], asynchronous=False, num_blocks=12)
    (engine,), requests = pair.engines, asked(5)
    engine.submit(requests[:1])
    while requests[0].num_computed < 16:
        engine.step()
    moved = hold(engine.state, requests[0], 4, engine.now())
    assert moved is not None and moved.lease is not None
    cache = engine.executor.caches[0][0]
    before = cache.keys[:, moved.blocks].clone()
    engine.cancel(requests[0])
    engine.submit([shortened(request) for request in requests[1:]])
    run_to_end(pair)
    assert engine.state.cache.pool.num_evicted > 8 and engine.state.pool.num_used == 4
    assert torch.equal(cache.keys[:, moved.blocks], before)
    moved.lease.end()
    run_to_end(pair)
    assert engine.state.pool.num_used == 0
    pair.close()


def shortened(request: Request) -> Request:
    """The first 30 tokens of a prompt, with two more."""
    prompt = list(request.prompt or ())[:30]
    return Request(request.id, len(prompt), 2, prompt=prompt)


class DraftingPair(Pair):
    """Each engine's draft model is the model itself."""

    limits = replace(Pair.limits, max_drafts=3)

    def executors(self, num_blocks: int) -> list[Any]:
        kv, options = KVSize(num_blocks, self.size), Options(drafter=ModelDrafter(self.spec))
        return [
            poisoned(
                assemble,
                stage_models(self.spec, kv, ReferenceAttention()),
                self.limits,
                options,
                make_draft_models(options, self.spec, kv),
            )
            for _ in range(2)
        ]


def random_moves(seed: int, kind: type[Pair] = Pair) -> None:
    """Two engines with random plans: requests move at any time in either direction, leases end, clients leave, copies come late."""
    draw = random.Random(seed)
    policies: list[Policy] = [FuzzPolicy(seed), FuzzPolicy(seed + 1)]
    pair = kind(policies, asynchronous=draw.random() < 0.7, num_blocks=draw.randint(kind.fewest, kind.most))
    pair.at_once, pair.ahead = draw.random() < 0.5, draw.random() < 0.5
    requests = asked(draw.randint(3, 8), pair.spec)
    for request in requests:
        pair.engines[draw.randrange(2)].submit([request])
    pair.engines[0].state.hands_over = lambda request: request.id % 2 == 0
    pair.engines[0].on_leave = lambda request: pair.move(request, 0, 1, draw.choice([inf, -inf]))
    try:
        for _ in range(3000):
            if not any(engine.num_unfinished or engine.num_in_flight for engine in pair.engines):
                break
            index = draw.randrange(2)
            engine = pair.engines[index]
            pair.step(engine)
            here = [*engine.state.waiting, *engine.state.running]
            here = [request for request in here if request.id not in engine.inbox.loading]
            if here and draw.random() < 0.1:
                pair.move(draw.choice(here), index, 1 - index, draw.choice([inf, inf, -inf]))
            if draw.random() < 0.03:
                inbox = engine.inbox
                coming = [request for request, _ in inbox.offered]
                coming += [each.request for id_, each in inbox.loading.items() if id_ not in inbox._ahead]
                coming += [request for request in requests if engine.state.holds(request)]
                if coming:
                    engine.cancel(draw.choice(coming))
            if draw.random() < 0.3:
                pair.deliver()
            inside = sum(len(each.state.running) + len(each.state.waiting) for each in pair.engines)
            counted = inside + sum(each.inbox.num_coming for each in pair.engines)
            assert counted <= sum(request.finish_reason is None for request in requests)
        else:
            raise AssertionError("the run does not end")
        run_to_end(pair)
        check_end(pair, requests)
    finally:
        pair.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first = 100_000 * metafunc.config.getoption("--draw")
        metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("--schedules")))


def test_random_moves_keep_tokens_and_blocks(seed: int) -> None:
    random_moves(seed)


def test_a_draft_models_keys_and_values_move_with_the_models() -> None:
    """So that all drafts after a move are right; without the prompt's, few would be."""
    policies: list[Policy] = [Speculating(SarathiServe(Fixed(48))) for _ in range(2)]
    pair, requests = DraftingPair(policies), asked(6)
    first, second = pair.engines
    first.state.hands_over = lambda request: True
    first.on_leave = lambda request: pair.move(request, 0, 1)
    first.submit(requests)
    run_to_end(pair)
    check_end(pair, requests)
    accepted, compared = second.state.drafts.counts
    assert accepted.tolist() == compared.tolist() and compared.sum() > 20
    pair.close()
