"""Searches for histories that violate properties: all tiny scenarios by size, then larger random scenarios.

The first tiny scenario that violates a property is therefore the smallest. Hypothesis shrinks random scenarios.
Sizes scale with the policy's chunk: some prompts are shorter than a chunk, others are longer.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from cbatch import Eviction, Policy
from cbatch.kv import blocks_for
from cbatch.policy import copy_policy
from cbatch.stall import Patience
from experiments.check.properties import OVERTAKEN_LIMIT, Property, Violation
from experiments.check.scenario import SHORT, Arrival, Ending, PolicyHistory, Scenario, play

_LARGEST_BATCH = 4
MOST_OUTPUT = 12  # tokens
_SHOWN = 30  # plans of a counterexample's text; earlier ones are left out


class Counterexample(NamedTuple):
    """A schedule that violates a property. Its text ends at the violating plan."""

    history: PolicyHistory
    violation: Violation

    def __str__(self) -> str:
        history, violation = self
        requests = [f"request {id_}: {arrival}" for id_, arrival in enumerate(history.scenario.arrivals)]
        plans = [f"iteration {made.iteration}: {made.decided}" for made in history.decisions[: violation.decision + 1]]
        left_out = [f"... {len(plans) - _SHOWN} plans"] if len(plans) > _SHOWN else []
        why = f"  <- {violation.why}" if plans else f"\n{violation.why}"
        return "\n".join([str(history.scenario), *requests, *left_out, *plans[-_SHOWN:]]) + why


Verdicts = dict[str, Counterexample | None]  # by the name of a property: its counterexample, or None


def search(
    policy: Policy | Callable[[], Policy],
    properties: Sequence[Property],
    chunk: int,
    *,
    num_random: int,
    tiny: Iterable[Scenario] | None = None,
    patience: Patience = SHORT,
    eviction: Eviction | None = None,
    tick: Callable[[PolicyHistory], object] = lambda history: None,
) -> Verdicts:
    """Searches for the smallest history that violates each property.

    Args:
        policy: see `play`.
        chunk: the policy's chunk in tokens.
        num_random: random scenarios to try for each property that no tiny scenario violates.
        tiny: scenarios to try first; default `tiny_scenarios`.
        patience: how long a policy may make no progress. eviction: eviction of a prefix cache; None: no prefix cache.
        tick: called with the history of each tried scenario.

    Raises ConfigError: the policy cannot be copied.
    """
    if hasattr(policy, "plan"):
        copy_policy(policy)
    verdicts: Verdicts = {prop.name: None for prop in properties}
    held = list(properties)
    for scenario in tiny_scenarios(chunk) if tiny is None else tiny:
        if not held:
            return verdicts
        history = play(policy, replace(scenario, eviction=eviction), patience)
        tick(history)
        if history.ending is Ending.ENDLESS:  # the property `ends` is violated: later runs stop sooner
            patience = replace(patience, empty_plans=min(patience.empty_plans, 5))
        for prop in list(held):
            if violation := prop.violation(history, chunk):
                verdicts[prop.name] = Counterexample(history, violation)
                held.remove(prop)

    @lru_cache(256)  # all properties draw the same scenarios
    def serve(scenario: Scenario) -> PolicyHistory:
        tick(history := play(policy, replace(scenario, eviction=eviction), patience))
        return history

    for prop in held if num_random else ():
        verdicts[prop.name] = _search_random(serve, prop, chunk, num_random)
    return verdicts


def tiny_scenarios(chunk: int) -> Iterator[Scenario]:
    """Yields all scenarios with one or two requests, many with three, `tight_scenarios`, and streams in which a request may starve."""
    prompts = (1, chunk, 2 * chunk + 1)
    for count in (1, 2):
        yield from _all(count, chunk, product(prompts, (1, 2, 3), (0, 1, 2)))
    yield from _all(3, chunk, product(prompts[::2], (1, 3), (0, 1)))
    yield from tight_scenarios(chunk)
    for batch, prompt, output in product((1, 2), prompts, (1, 3)):
        stream = (Arrival(2, 2, 1 + number) for number in range((OVERTAKEN_LIMIT + 2) * batch))
        arrivals = (*[Arrival(2, 2, 0)] * 2, Arrival(prompt, output, 0), *stream)  # only ids 2 and 3 find no prefix
        ample = sum(arrival.tokens for arrival in arrivals)
        yield Scenario(arrivals, batch, ample, ample, 1, asynchronous=False)


def tight_scenarios(chunk: int) -> Iterator[Scenario]:
    """Yields workloads that may deadlock: a prompt needs both KV blocks; shorter prompts arrive while it holds one block."""
    for block, over, output, count, asynchronous in product((2, 4), (1, chunk), (1, 3), (1, 8), (False, True)):
        size = block * chunk
        shorter = (Arrival(size + over, output, 1 + number) for number in range(count))
        yield Scenario((Arrival(2 * size - output, output, 0), *shorter), 2, 2 * size, 2, size, asynchronous)


def _all(count: int, chunk: int, kinds: Iterable[tuple[int, int, int]]) -> Iterator[Scenario]:
    """Yields all scenarios of `count` requests, fewest tokens first; the first request arrives at the start.

    kinds: the possible (prompt, output, iteration) of a request.
    """
    block_size = max(chunk // 2, 1)
    every = [Arrival(*kind) for kind in kinds]
    first = [arrival for arrival in every if arrival.iteration == 0]
    workloads = product(first, *[every] * (count - 1))
    ordered = sorted(workloads, key=lambda workload: sum(arrival.tokens + arrival.iteration for arrival in workload))
    for arrivals in ordered:
        longest = max(arrival.tokens for arrival in arrivals)
        blocks = [blocks_for(arrival.tokens, block_size) for arrival in arrivals]
        kv_sizes = sorted({max(blocks), max(blocks) + 1, sum(blocks)})
        choices = product(range(1, count + 1), (longest, 2 * longest), kv_sizes, (False, True))
        for batch, tokens, num_blocks, asynchronous in choices:
            yield Scenario(arrivals, batch, max(tokens, batch, chunk), num_blocks, block_size, asynchronous)


def _search_random(
    serve: Callable[[Scenario], PolicyHistory], prop: Property, chunk: int, num_random: int
) -> Counterexample | None:
    """Tries random scenarios. Returns a counterexample, shrunk by hypothesis, or None."""
    from hypothesis import find, settings  # loaded only when needed
    from hypothesis.errors import NoSuchExample

    def judge(scenario: Scenario) -> Counterexample | None:
        violation = prop.violation(history := serve(scenario), chunk)
        return violation and Counterexample(history, violation)

    quiet, seed = settings(max_examples=num_random, database=None, deadline=None), random.Random(0)
    try:
        smallest = find(_scenarios(chunk), lambda scenario: judge(scenario) is not None, settings=quiet, random=seed)
    except NoSuchExample:
        return None
    return judge(smallest)


def _scenarios(chunk: int) -> Any:
    """Returns a hypothesis strategy for larger scenarios: up to 12 requests of up to 5 chunks."""
    from hypothesis import strategies as st

    @st.composite
    def scenario(draw: Any) -> Scenario:
        arrival = st.builds(Arrival, st.integers(1, 5 * chunk), st.integers(1, MOST_OUTPUT), st.integers(0, 20))
        arrivals = tuple(draw(st.lists(arrival, min_size=1, max_size=12)))
        batch = draw(st.integers(1, min(_LARGEST_BATCH, chunk)))
        block_size = draw(st.integers(1, 2 * chunk))
        longest = max(arrival.tokens for arrival in arrivals)
        max_tokens = max(longest, batch, chunk) + draw(st.integers(0, 3 * longest))
        enough = blocks_for(longest, block_size)
        num_blocks = enough + draw(st.integers(0, 3 * enough))
        return Scenario(arrivals, batch, max_tokens, num_blocks, block_size, draw(st.booleans()))

    return scenario()
