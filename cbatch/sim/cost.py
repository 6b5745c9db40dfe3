"""The cost model: seconds of an iteration from its shape, from a hardware profile, a model and a topology.

What depends on the number of tokens alone - matrix products, small operations, messages - is computed once for each
number. Device time only: host time is the executor's.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from cbatch.cost import BatchShape
from cbatch.errors import ProfileError
from cbatch.model import DTYPE_BYTES, ModelSpec
from cbatch.sim.estimate import Seconds
from cbatch.sim.profile import Profile
from cbatch.sim.topology import Topology

Outside = Literal["mark", "error"]


class Parts(NamedTuple):
    """Device seconds of one iteration by operation, over all layers and stages; `communication` waits counted."""

    linear: float
    attention: float
    head: float
    other: float
    communication: float

    @property
    def total(self) -> float:
        return sum(self)


class StageTimes(NamedTuple):
    """Seconds of one iteration in a pipeline.

    compute, communication: of each stage's layers: computing, and all-reduces between.
    embedding: of the first stage, in addition. head: of the last one.
    transfers: from each stage to the next one, [stages - 1].
    """

    compute: float
    communication: float
    embedding: float
    head: float
    transfers: tuple[float, ...]


class _OfTokens(NamedTuple):
    """What the number of tokens decides; `linear` and `other` of a stage's layers."""

    linear: float
    other: float
    communication: float
    embedding: float
    transfers: tuple[float, ...]
    covered: bool


class ProfileCost:
    """Predicts iterations of one model on one kind of GPU; implements `cbatch.CostModel`.

    estimated: names of the parts that were not measured for this model but come from the ceilings.
    num_outside: executed iterations whose shape lay outside what was measured, so that times were extrapolated.
    """

    def __init__(
        self,
        profile: Profile,
        spec: ModelSpec,
        topology: Topology = Topology(),  # noqa: B008 - frozen
        outside: Outside = "mark",
    ) -> None:
        """
        Args:
            outside: what to do with an iteration outside the measured range: "mark" extrapolates and counts it.

        Raises:
            ConfigError: the topology does not divide the model. ProfileError: its links were not measured.
        """
        self.profile = profile
        self.spec = spec
        self.topology = topology
        self.outside = outside
        self.num_outside = 0
        self.operations = profile.operations(spec, topology.tensor_parallel)
        self.estimated = self.operations.estimated
        self._layers = topology.share(spec).num_layers  # of a stage
        self._all_reduce: Seconds | None = None
        if topology.tensor_parallel > 1:
            self._all_reduce, estimated = profile.links.all_reduce_of(topology.tensor_parallel, profile.name)
            self.estimated += ("all_reduce",) * estimated
        self._links = [profile.links.to_next_stage(topology.leaves_node(stage), profile.name)
                       for stage in range(topology.pipeline_stages - 1)]  # fmt: skip
        self._hidden_bytes = spec.hidden_size * DTYPE_BYTES[spec.dtype]
        self._attention = self.operations.attention
        self._tokens: dict[int, _OfTokens] = {}
        self._heads: dict[int, float] = {}

    def predict(self, shape: BatchShape) -> float:
        """Seconds that the busiest device, the one of the last stage, has to do with an iteration of this shape."""
        times = self._times(shape, self._of_tokens(shape.num_tokens))
        first = times.embedding if not times.transfers else 0.0
        return times.compute + times.communication + first + times.head

    def parts(self, shape: BatchShape) -> Parts:
        """The operations of one iteration: `total` is the time from its start in the first stage to its end in the last."""
        of_tokens, stages = self._of_tokens(shape.num_tokens), self.topology.pipeline_stages
        return Parts(
            stages * of_tokens.linear,
            stages * self._layers * self._attention.seconds(shape),
            self._head(shape.num_requests),
            stages * of_tokens.other + of_tokens.embedding,
            stages * of_tokens.communication + sum(of_tokens.transfers),
        )

    def execute(self, shape: BatchShape) -> StageTimes:
        """The times of an iteration that is being carried out: the same as predicted, checked against what was measured.

        Raises:
            ProfileError: `outside` is "error", and the shape lies outside what was measured.
        """
        of_tokens = self._of_tokens(shape.num_tokens)
        if not of_tokens.covered or not self._attention.covers(shape):
            if self.outside == "error":
                raise ProfileError(f"hardware={self.profile.name}: an iteration of {shape.num_tokens} tokens in "
                                   f"{shape.num_requests} requests lies outside what was measured for model={self.spec.name}; "
                                   "lower batch or max_tokens, or set outside=mark to extrapolate")  # fmt: skip
            self.num_outside += 1
        return self._times(shape, of_tokens)

    def provenance(self) -> dict[str, Any]:
        """What every simulated result says of itself."""
        profile = self.profile
        return {
            "profile": profile.name,
            "hardware": profile.hardware,
            "source": profile.source,
            "error": profile.error,
            "gpus": self.topology.num_gpus,
            "estimated": list(self.estimated),
            "iterations_outside_measured_range": self.num_outside,
        }

    def _times(self, shape: BatchShape, of_tokens: _OfTokens) -> StageTimes:
        linear, other, communication, embedding, transfers, _ = of_tokens
        compute = linear + other + self._layers * self._attention.seconds(shape)
        return StageTimes(compute, communication, embedding, self._head(shape.num_requests), transfers)

    def _of_tokens(self, num_tokens: int) -> _OfTokens:
        found = self._tokens.get(num_tokens)
        if found is None:
            found = self._tokens[num_tokens] = self._compute_of_tokens(num_tokens)
        return found

    def _compute_of_tokens(self, num_tokens: int) -> _OfTokens:
        operations, layers = self.operations, self._layers
        message = num_tokens * self._hidden_bytes
        all_reduces = 2 * layers * self._all_reduce.at(message) if self._all_reduce else 0.0
        messages = [*self._links, *([self._all_reduce] if self._all_reduce else [])]
        return _OfTokens(
            layers * operations.linear.at(num_tokens),
            layers * operations.other.at(num_tokens),
            all_reduces,
            operations.embedding.at(num_tokens),
            tuple(link.at(message) for link in self._links),
            all(part.covers(num_tokens) for part in (operations.linear, operations.other, operations.embedding))
            and all(part.covers(message) for part in messages),
        )

    def _head(self, num_requests: int) -> float:
        found = self._heads.get(num_requests)
        if found is None:
            found = self._heads[num_requests] = self.operations.head.at(num_requests)
        return found
