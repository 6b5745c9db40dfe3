"""A simulated drafter: which drafts are accepted, drawn from survivals, and how long drafting takes.

The survival S_i is the share of verifications that accept draft i, and so all before it. Each position of each request has one uniform
number u, made from (seed, request, position) alone. Where the newest token has position p, draft i is a guess of the token at p + i: if
the drafts before it are accepted, it is as well if u(p + i) < S_i / S_(i-1). So every policy faces the same numbers, and a position decides once: after a rejection, the base token takes the position.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cbatch.cost import BatchShape
from cbatch.drafts import Drafter
from cbatch.errors import ConfigError
from cbatch.executor import Step
from cbatch.model import ModelSpec
from cbatch.request import Ints
from cbatch.sim.cost import ProfileCost


class DraftPasses:
    """The passes of a draft model that each GPU of the first stage holds whole.

    An iteration with k drafts of a request takes k + 1 passes, the last without the output head: it only writes keys and values. The first pass of an
    iteration with prompts computes all its rows. Its captured graphs have either no drafts or the most, and then take all passes.
    """

    def __init__(self, cost: ProfileCost, spec: ModelSpec, max_drafts: int) -> None:
        """cost: of the model that checks the drafts. max_drafts: of a request."""
        self._checks, self._max_drafts = cost, max_drafts
        self._drafts = ProfileCost(cost.profile, spec, max_batch=cost.max_batch)
        self._drafts.max_rows = cost.max_rows
        self._parts = cache(self._drafts.parts)

    def seconds(self, shape: BatchShape, most: int | None = None) -> float:
        """Returns the seconds of an iteration's passes. most: drafts of a request; None: drafts are spread evenly."""
        single = shape.num_decodes - shape.num_drafts
        k = -(-shape.num_drafts // max(single, 1)) if most is None else most
        graph, rows = self._checks.graph_tokens(shape), single + len(shape.chunks)
        if graph is not None and shape.chunks:
            rows = min(self._checks.max_rows, graph - 1)
        elif graph is not None:
            rows = each if (each := graph // (1 + k)) >= single else graph
        rows = min(rows, self._checks.max_batch or rows)
        context = shape.decode_context * single // max(shape.num_decodes, 1)
        one_each = self._parts(BatchShape((), rows, context))
        if not shape.chunks:
            return (k + 1) * one_each.total - one_each.head
        if k and graph is not None:
            k = self._max_drafts
        return self._drafts.predict(shape) + k * one_each.total - (one_each.head if k else 0.0)


CONTEXT = 512  # tokens in the KV cache of each request, assumed where passes of a drafter's layers are priced

_WORDS = tuple(np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class SurvivalsDrafter(Drafter):
    """Draws the outcomes of drafts that have no values, and prices drafting."""

    name = "survivals"

    def __init__(
        self,
        survivals: Sequence[float] | None = None,
        alpha: float | None = None,
        max_drafts: int | None = None,
        layers: int = 0,
        parallel: bool = False,
        seconds_per_pass: float = 0.0,
        seed: int = 0,
        model: ModelSpec | None = None,
    ) -> None:
        """
        survivals: of draft 1, 2, ...
        alpha: instead of survivals: the probability that a draft is accepted if those before it were.
        max_drafts: of a request in an iteration; None: as many as there are survivals, or 8.
        layers: of a drafter that otherwise has the model's shape, as EAGLE's and MTP's; 0: its passes take no time.
        parallel: all drafts of a request in one pass, as DSpark's; else one pass for each.
        seconds_per_pass: in addition to those of its layers.
        model: of a drafter that is a model of its own; see `DraftPasses`.

        Raises ConfigError unless either is given, survivals fall from at most 1 to at least 0, there is one for each draft, and nothing
        else is negative.
        """
        if (survivals is None) == (alpha is None):
            raise ConfigError("drafter: give either drafter.survivals, a list of shares, or drafter.alpha")
        numbers = (("max_drafts", max_drafts, 1), ("layers", layers, 0), ("seconds_per_pass", seconds_per_pass, 0))
        for name, value, least in numbers:
            if value is not None and value < least:
                raise ConfigError(f"drafter.{name}={value}: give at least {least}")
        if alpha is not None and not 0 <= alpha <= 1:
            raise ConfigError(f"drafter.alpha={alpha}: give a share from 0 to 1")
        if survivals is not None:
            _check(survivals, max_drafts)
        self.max_drafts = max_drafts or len(survivals or range(8))
        if survivals is None:
            survivals = [(alpha or 0.0) ** place for place in range(1, self.max_drafts + 1)]
        self.survivals, self.seed, self.parallel = [*survivals], seed, parallel
        self.layers, self.seconds_per_pass, self.model = layers, seconds_per_pass, model
        self._rates = np.array([later / before if before else 0.0 for before, later in pairwise([1.0, *survivals])])
        self._cost: ProfileCost | None = None
        self._of_model: DraftPasses | None = None
        self._known: dict[tuple[int, int], float] = {}

    def of_replication(self, number: int) -> "SurvivalsDrafter":
        """Returns the drafter of one of several replications, which draw independently."""
        other = copy(self)
        other.seed += number
        return other

    def on(self, cost: ProfileCost) -> "SurvivalsDrafter":
        """Returns the drafter with passes priced on the hardware of a cost model."""
        priced = copy(self)
        if self.model is not None:
            priced._of_model = DraftPasses(cost, self.model, self.max_drafts)
        elif self.layers:
            shape, topology = replace(cost.spec, num_layers=self.layers), replace(cost.topology, pipeline_stages=1)
            priced._cost, priced._known = ProfileCost(cost.profile, shape, topology, cost.max_batch), {}
        return priced

    def seconds(self, num_requests: int, k: int) -> float:
        if not (num_requests and k) or self.model is not None:
            return 0.0
        return self._pass(num_requests, k) if self.parallel else k * self._pass(num_requests, 1)

    def _pass(self, num_requests: int, k: int) -> float:
        """Returns the seconds of a pass that makes `k` drafts for each request."""
        if (seconds := self._known.get((num_requests, k))) is None:
            shape = BatchShape((), num_requests, CONTEXT * num_requests).with_drafts((k - 1) * num_requests)
            seconds = self.seconds_per_pass + (self._cost.predict(shape) if self._cost else 0.0)
            self._known[num_requests, k] = seconds
        return seconds

    def draw(self, step: Step, rejected: Ints) -> Ints:
        """Returns the accepted drafts of each request of a step with drafts. rejected: drafts in flight that `Step.start` counts, [requests]."""
        assert step.drafts is not None
        places = np.arange(1, min(int(step.drafts.max()), len(self._rates)) + 1)
        # Positions of the newest tokens that are no drafts.
        newest = step.start + step.num_tokens - step.drafts - 1 - rejected
        drawn = uniforms(self.seed, step.table.id[step.rows], newest[:, None] + places)
        accepted = (drawn < self._rates[: len(places)]) & (places <= step.drafts[:, None])
        numbers: Ints = np.logical_and.accumulate(accepted, axis=1).sum(1)
        return numbers

    def seconds_of(self, step: Step) -> float:
        """Returns the seconds of drafting for a step; one after another, pass k is of the requests with at least k drafts."""
        most = 0 if step.drafts is None else int(step.drafts.max())
        if self._of_model is not None:
            return self._of_model.seconds(step.shape(), most)
        if step.drafts is None:
            return 0.0
        if self.parallel:
            return self.seconds(int(np.count_nonzero(step.drafts)), most)
        return sum(self.seconds(int(np.count_nonzero(step.drafts >= k)), 1) for k in range(1, most + 1))


def _check(survivals: Sequence[float], max_drafts: int | None) -> None:
    """Raises ConfigError unless survivals are shares that do not rise, at least as many as drafts."""
    given = [*survivals] if isinstance(survivals, list | tuple) else None
    numbers = given and all(isinstance(share, int | float) and share is not True for share in given)
    if not given or not numbers or any(not 0 <= later <= before for before, later in pairwise([1.0, *given])):
        problem = f"drafter.survivals={survivals}"
        raise ConfigError(f"{problem}: give shares from 1 to 0 in brackets, none above the one before, as '[.8,.6]'")
    if max_drafts is not None and max_drafts > len(given):
        raise ConfigError(f"drafter.max_drafts={max_drafts}: give at most {len(given)}, as there are no more survivals")


def uniforms(seed: int, requests: Ints, positions: Ints) -> NDArray[np.float64]:
    """Returns a number in [0, 1) for each position, [requests, positions], by the finaliser of SplitMix64."""
    mixed = _mix(np.full_like(requests, seed).astype(np.uint64)) ^ requests.astype(np.uint64)
    bits = _mix(_mix(mixed)[:, None] ^ positions.astype(np.uint64))
    drawn: NDArray[np.float64] = np.multiply(bits >> np.uint64(11), 2.0**-53, dtype=np.float64)
    return drawn


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    step, first, second = _WORDS
    values = values + step
    values = (values ^ (values >> np.uint64(30))) * first
    values = (values ^ (values >> np.uint64(27))) * second
    return values ^ (values >> np.uint64(31))
