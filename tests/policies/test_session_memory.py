"""A server sees new sessions without end: what policies and evictions remember of them is bounded."""

from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import pytest
from every_policy import EVERY_POLICY
from test_session_policies import serve

from cbatch import Eviction
from experiments.workloads import Session, Turn
from policies.evictions import GivenUp, SoftTTL
from policies.pauses import Pauses, TimeToLive
from policies.shared import latest

BY_SESSION = [name for name, make in EVERY_POLICY.items() if "sessions" in getattr(make(8), "depends_on", ())]


def num_entries(part: Any) -> int:
    """The entries of all containers that an object of `policies` holds, but for windows."""
    if isinstance(part, Mapping):
        return len(part) + sum(map(num_entries, part.values()))
    if isinstance(part, (list, tuple, Set, deque)):
        return 0 if getattr(part, "maxlen", None) else len(part) + sum(map(num_entries, part))
    return num_entries(vars(part)) if type(part).__module__.startswith("policies") else 0


def sessions(number: int) -> list[Session]:
    """Sessions of two turns, one after another."""
    return [
        Session(f"S{place}", [Turn(4, 2, pause=8.0 * place, extra={"tool": "a"}), Turn(4, 2, (0,), 1.0, 0)])
        for place in range(number)
    ]


@pytest.mark.parametrize("timeout", [None, 0.5])
@pytest.mark.parametrize("name", BY_SESSION)
def test_a_policy_remembers_as_much_after_sixty_sessions_as_after_thirty(
    name: str, timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of sessions whose clients leave during the first turn."""
    monkeypatch.setattr(latest, "MOST", 20)
    sizes = []
    for number in (30, 60):
        serve(policy := EVERY_POLICY[name](8), sessions(number), eviction=SoftTTL(5.0), timeout=timeout)
        sizes.append(num_entries(policy))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("timeout", [None, 0.5])
@pytest.mark.parametrize("make", [lambda: SoftTTL(5.0), lambda: SoftTTL(TimeToLive(Pauses())), GivenUp])
def test_an_eviction_remembers_as_much(make: Any, timeout: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SoftTTL, "__deepcopy__", lambda eviction, memo: eviction, raising=False)
    monkeypatch.setattr(latest, "MOST", 20)
    sizes = []
    for number in (30, 60):
        eviction: Eviction = make()
        serve(EVERY_POLICY["sarathi_serve"](8), sessions(number), eviction=eviction, timeout=timeout)
        sizes.append(num_entries(eviction))
    assert sizes[0] == sizes[1]
