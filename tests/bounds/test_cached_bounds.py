"""Lower bounds where prompts may be found in a prefix cache, and regret."""

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
from hand_made import end
from schedules import make_engine
from test_bounds import UNIT

from cbatch import CostFunction, FinishReason, Limits, Policy, Request, RunRecord, Server
from cbatch.bounds import Bounds, Minorant, findable_tokens
from cbatch.kv import KVSize
from cbatch.request_spec import SLO
from cbatch.results.metrics import collect_served
from cbatch.results.regret import regret
from cbatch.sim.executor import SimExecutor
from policies.chunking.fixed import Fixed
from policies.evictions import LRU
from policies.orca import Orca
from policies.prefix_order import PrefixOrder
from policies.sarathi_serve import SarathiServe
from policies.vllm_v1 import VllmV1


def test_what_can_be_found_by_hand() -> None:
    """Blocks of 2 tokens, ids of 4. B's first id is A's; C goes on with A's conversation, and D comes first of all with B's ids."""
    asked = [
        Request(0, 5, 4, prefix_hashes=(1,), hash_block=4, texts=((7, 0),), arrival_time=1.0),
        Request(1, 8, 1, prefix_hashes=(1, 2), hash_block=4, arrival_time=2.0),
        Request(2, 12, 1, prefix_hashes=(1,), hash_block=4, texts=((7, 0),), arrival_time=3.0),
        Request(3, 9, 1, prefix_hashes=(1, 2), hash_block=4, arrival_time=0.0),
    ]
    found = findable_tokens(asked, 2)
    assert found == {
        0: (4, 4),
        1: (6, 6),
        2: (8, 8),
        3: (0, 8),
    }  # 0 has 9 tokens, its last one is never found; 1 computes a block


def test_a_prompt_that_is_found_costs_its_rest() -> None:
    """Two prompts of 5 tokens that share 4, of which one request computes 5 and the other one 1 token; an output token each."""
    asked = [Request(id_, 5, 2, prefix_hashes=(1,), hash_block=4) for id_ in range(2)]
    line, limits = Minorant(1.0, per_token=0.25), Limits(4, 2, 100)
    found = Bounds(asked, [line], limits, 100, findable=findable_tokens(asked, 4))
    assert found.prefill.tolist() == [1 + 0.25] * 2, "each may be the one that finds"
    assert found.service.tolist() == [2 * (1 + 0.25)] * 2
    assert found.rate == pytest.approx(2 / (0.75 * (5 + 1) + 0.75 * (1 + 1))), (
        "a token takes 0.25 s and half an iteration"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "policy", [Orca(), SarathiServe(Fixed(8)), PrefixOrder(Fixed(8), "dfs_weight"), VllmV1(16)], ids=repr
)
def test_no_policy_beats_the_bounds_with_a_prefix_cache(policy: Policy) -> None:
    """On a machine whose iterations take what a minorant says, with caches of all sizes."""
    shares = []
    for number in range(40):
        draw = Random(number)
        line = Minorant(1.0, draw.random(), draw.random() / 20, draw.random() / 10)
        limits = Limits(draw.randint(1, 4), draw.choice((50, 64)), 64)
        asked = list(sharing_requests(draw, 12))
        blocks, cost = draw.choice((33, 60, 400)), CostFunction(line.seconds)
        server = Server(SimExecutor(cost), limits, cost, KVSize(blocks, 2), bool(number % 2), prefix_cache=LRU())
        record = server.serve(policy, asked)
        found = Bounds(asked, [line], limits, 2 * blocks, findable=findable_tokens(asked, 2))
        ends, firsts = (np.array([getattr(each, at) for each in asked]) for at in ("finished_at", "first_token_at"))
        assert (found.prefill <= (firsts - found.arrival) * (1 + 1e-9)).all()
        assert (found.service <= (ends - found.arrival) * (1 + 1e-9)).all()
        assert (found.ends <= np.sort(ends) * (1 + 1e-9)).all()
        assert found.makespan <= record.steps[-1].ended * (1 + 1e-9)
        assert found.violations <= sum(end > each.arrival_time + 30 for each, end in zip(asked, ends, strict=True))
        shares.append(found.makespan / record.steps[-1].ended)
        assert Bounds(asked, [line], limits, 2 * blocks).makespan >= found.makespan
    assert np.mean(shares) > 0.4


def sharing_requests(draw: Random, number: int) -> Iterator[Request]:
    """Prompts of ids from a small tree, and conversations of which a turn's prompt holds the answers before."""
    turns: dict[int, int] = {}
    for id_ in range(number):
        arrival, objective = draw.choice((0.0, 3.0 * id_)), SLO(total=30.0)
        ids = tuple(100 * depth + draw.randint(0, 1) for depth in range(draw.randint(0, 3)))
        more, output = draw.randint(1, 9), draw.randint(1, 6)
        if draw.random() < 0.5:
            chat = draw.randint(0, 1)
            prompt = turns.get(chat, 4) + more
            turns[chat] = min(prompt + output, 40)
            yield Request(
                id_,
                prompt,
                output,
                arrival_time=arrival,
                slo=objective,
                prefix_hashes=(9,),
                hash_block=4,
                texts=((chat, 0),),
            )
        else:
            yield Request(
                id_,
                4 * len(ids) + more,
                output,
                arrival_time=arrival,
                slo=objective,
                prefix_hashes=ids,
                hash_block=4 * bool(ids),
            )


# Regret in results


def test_regret_by_hand() -> None:
    """One at a time: A 1/3 ends at 3 s, B 1/1 at 4 s; together they could take a token each in 3 s, so B6 is (1 + 3) / 2."""
    asked = [Request(0, 1, 3), Request(1, 1, 1, slo=SLO(total=1.5))]
    engine = make_engine(Orca(), Limits(1, 100, 100), num_blocks=200, block_size=1)
    engine.submit(asked)
    record = engine.run()
    asked.append(end(Request(2, 50, 50, slo=SLO(total=1.5)), None, 0.0, FinishReason.REJECTED))

    def bounds_of(requests: Sequence[Request]) -> Bounds:
        return Bounds(requests, UNIT, Limits(2, 100, 100), 200)

    found = regret(asked, collect_served(record), bounds_of)
    assert found == {
        "latency": pytest.approx((3 + 4) / (1 + 3)),
        "latency_bound": pytest.approx((1 + 3) / 2),
        "makespan": pytest.approx(4 / 3),
        "makespan_bound": pytest.approx(3.0),
        "violations": 2 - 1,
        "violations_bound": 1,
    }
    assert "violations" not in regret(asked[:1], collect_served(record), bounds_of)
    assert regret(asked, collect_served(RunRecord()), bounds_of) == {}
