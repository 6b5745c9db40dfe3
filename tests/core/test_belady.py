"""One at a time and in open loop no eviction finds more than Belady's.

python -m pytest tests/core/test_belady.py --workloads=500
"""

from random import Random

from contended import LinearCost
from test_prefix_cache import EVICTIONS

from cbatch import Eviction, Limits, Request, Server
from cbatch.kv import KVSize, blocks_for
from cbatch.sim.executor import SimExecutor
from policies.evictions import Belady
from policies.request_level import RequestLevel

LONGEST = 40


def draw(numbers: Random) -> list[Request]:
    """Prompts that repeat, cut or continue earlier prompts, some of them of sessions."""
    now, requests, texts = 0.0, list[Request](), [[0] * 8]
    for id_ in range(numbers.randint(10, 30)):
        now += numbers.choice((0.0, 1e-3, 0.05))
        text = numbers.choice(texts[-8:])
        prompt = text[: numbers.choice((numbers.randint(1, len(text)), len(text)))]
        texts.append((prompt + numbers.choices(range(3), k=numbers.choice((0, 1, 6))))[: LONGEST - 6])
        fields = {"prompt": texts[-1], "arrival_time": now, "session": numbers.choice(("a", "b", None))}
        requests.append(Request(id_, len(texts[-1]), numbers.randint(1, 6), **fields))
    return requests


def tokens_found(seed: int, eviction: Eviction) -> int:
    """Serves random requests, every other time by the asynchronous loop."""
    numbers, asynchronous = Random(seed), seed % 2 > 0
    requests, size = draw(numbers), numbers.randint(1, 4)
    kv = KVSize(max(blocks_for(request.max_tokens, size) for request in requests) + numbers.randint(0, 20), size)
    limits = Limits(1, LONGEST, LONGEST)
    server = Server(SimExecutor(LinearCost(), 1e-4), limits, LinearCost(), kv, asynchronous, prefix_cache=eviction)
    server.engine(RequestLevel(), requests).run()
    return sum(request.num_cached_tokens for request in requests)


def test_belady_finds_most_one_at_a_time(num_workloads: int) -> None:
    num_above = 0
    for seed in range(max(num_workloads, 25)):
        best = tokens_found(seed, Belady())
        others = [tokens_found(seed, make()) for make in EVICTIONS]
        assert max(others) == best, f"workload {seed}"
        num_above += min(others) < best
    assert num_above > 5, "evictions differ"
