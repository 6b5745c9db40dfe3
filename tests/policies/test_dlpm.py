"""DLPM: deficits of clients beside the order of the longest match."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from schedules import make_engine
from unit_machine import golden

from cbatch import Limits, Request, View
from policies.chunking import Fixed
from policies.dlpm import DLPM
from policies.evictions import LRU
from policies.predictors import Predictor
from policies.prefix_order import PrefixOrder
from policies.vtc import VTC


def test_deficits_put_a_match_behind_another_client() -> None:
    """f's second prompt matches, and waits for g, as f has spent its deficit."""
    prompts = {"F1": [1, 2, 3, 4], "F2": [1, 2, 3, 4], "G1": [5, 6, 7, 8]}
    whole, computed = VTC(Predictor()), VTC(Predictor(), charge_hits=False)
    policies = {"dlpm": DLPM(Fixed(4), 4.0), "lpm": PrefixOrder(Fixed(4)), "vtc": whole, "hits are free": computed}
    ran = {
        name: golden(
            policy,
            "F1 4/1 @0, F2 4/1 @0, G1 4/1 @0",
            batch=1,
            prefix_cache=LRU(),
            prompt=prompts,
            client={"F1": "f", "F2": "f", "G1": "g"},
        )
        for name, policy in policies.items()
    }
    assert (whole.counters, computed.counters) == ({"f": 12, "g": 6}, {"f": 9, "g": 6}), (
        "F2 computes one of four tokens"
    )
    assert (ran["dlpm"].schedule, ran["lpm"].schedule) == ("F14 | G14 | F21", "F14 | F21 | G14")


@pytest.mark.parametrize("charge_first", [True, False])
def test_a_client_that_leaves_before_its_first_token_keeps_its_charge(charge_first: bool) -> None:
    """The prompt's 4 tokens; the first output token is in flight."""
    policy = VTC(Predictor(), charge_first=charge_first)
    engine = make_engine(policy, Limits(8, 100, 100), asynchronous=True)
    engine.submit([request := Request(0, 4, 9, client="f")])
    engine.step()
    engine.cancel(request)
    assert (request.num_output_tokens, policy.counters) == (0, {"f": 4})


def test_a_refill_gives_every_client_in_debt_a_quantum() -> None:
    """a's first two prompts of 8 and 4 tokens overdraw a's quantum of 10; the next place is b's, though a's third matches longer.

    c, whose only request has left, is refilled once: it is known, and not in debt later.
    """
    prompts = {"A1": [1] * 8, "A2": [2] * 4, "B1": [3] * 6, "A3": [1] * 7 + [9]}
    policy = DLPM(Fixed(20), 10.0, output_weight=1.0)
    policy.on_wait(Request(9, 1, 1, client="c"))
    ran = golden(
        policy,
        "A1 8/3 @0, A2 4/1 @0, B1 6/1 @0, A3 8/1 @1",
        batch=2,
        prefix_cache=LRU(),
        prompt=prompts,
        client={"A1": "a", "A2": "a", "A3": "a", "B1": "b"},
    )
    assert ran.schedule == "A18 A24 | A11 B16 | A11 A31"
    assert policy.deficits == {"a": 10 - 12 - 1 - 1 - 1 + 10 - 1 - 1 - 1, "b": 10 - 6 - 1, "c": 10}


class LooksAtAll(DLPM):
    def prompts(self, view: View) -> Iterator[Request]:
        yield from view.prefilling
        ranked = list(self._kept.in_order(view))
        self._refill({request.client for request in ranked})
        for request in ranked:
            if self.deficits[request.client] > 0:
                cost = request.num_ready
                yield request
                self.deficits[request.client] -= cost


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True])
def test_beyond_128_waiting_clients_with_deficits_are_served_by_arrival(asynchronous: bool) -> None:
    """As if each plan looked at all who wait, also where some are preempted and where fewer wait in between."""
    random = Random(5)
    for _ in range(2):
        sizes = {f"R{i}": (random.randint(1, 9), random.randint(1, 7), random.choice((0, 0, 30))) for i in range(200)}
        asked = ", ".join(f"{name} {prompt}/{output} @{at}" for name, (prompt, output, at) in sizes.items())
        client = {name: f"c{min(random.randrange(40), random.randrange(9))}" for name in sizes}
        prompts = {name: random.choices("ab", k=prompt) for name, (prompt, *_) in sizes.items()}
        rest: dict[str, Any] = {
            "client": client,
            "prompt": {name: [ord(letter) for letter in prompt] for name, prompt in prompts.items()},
        }
        ran = [
            golden(
                kind(Fixed(20), 15.0), asked, batch=9, memory=36, asynchronous=asynchronous, prefix_cache=LRU(), **rest
            )
            for kind in (DLPM, LooksAtAll)
        ]
        assert "pre" in ran[0].schedule
        assert ran[0].schedule == ran[1].schedule
