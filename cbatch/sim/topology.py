"""How one model is spread over GPUs: tensor-parallel within a stage, stages in a pipeline, whole copies as replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cbatch.errors import ConfigError
from cbatch.model import ModelSpec

MOST = 10_000
"""GPUs, stages or replicas: more than any cluster has for one model."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs that serve one model.

    tensor_parallel: GPUs that share every layer (Megatron-LM, arXiv 1909.08053: two all-reduces a layer).
    pipeline_stages: parts of equally many layers, one after the other; as many iterations are under way.
    replicas: copies of all this, each with a queue of its own.
    gpus_per_node: GPUs that share a node's fast links; stages are placed on consecutive ones.
    """

    tensor_parallel: int = 1
    pipeline_stages: int = 1
    replicas: int = 1
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_stages", "replicas", "gpus_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
                raise ConfigError(f"{name}={value} must be a whole number from 1 to {MOST}")
        if self.tensor_parallel > self.gpus_per_node:
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel} exceeds gpus_per_node={self.gpus_per_node}, and "
                "all-reduces are known within a node only; lower it and raise pipeline_stages"
            )

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_stages * self.replicas

    def leaves_node(self, stage: int) -> bool:
        """Whether the link from this stage to the next one runs between nodes."""
        node = [stage * self.tensor_parallel // self.gpus_per_node for stage in (stage, stage + 1)]
        return node[0] != node[1]

    def check(self, spec: ModelSpec) -> None:
        """Raise ConfigError where the topology does not divide the model."""
        for field, what in (
            ("num_heads", "attention heads"),
            ("intermediate_size", "columns of the feed-forward layer"),
        ):
            self._check_divides(spec, getattr(spec, field), what)
        heads = spec.num_kv_heads
        if heads % self.tensor_parallel and self.tensor_parallel % heads:
            self._check_divides(spec, heads, "key-value heads")
        if spec.num_layers % self.pipeline_stages:
            raise ConfigError(
                f"pipeline_stages={self.pipeline_stages} does not divide the {spec.num_layers} layers of "
                f"model={spec.name}; choose one of {_divisors(spec.num_layers)}"
            )

    def share(self, spec: ModelSpec) -> ModelSpec:
        """One GPU's part of the model, which is a model itself: fewer layers, heads and columns.

        Key-value heads are copied where there are fewer of them than GPUs.
        """
        self.check(spec)
        parts = self.tensor_parallel
        return replace(
            spec,
            num_layers=spec.num_layers // self.pipeline_stages,
            num_heads=spec.num_heads // parts,
            num_kv_heads=max(spec.num_kv_heads // parts, 1),
            intermediate_size=spec.intermediate_size // parts,
            vocab_size=-(-spec.vocab_size // parts),
        )

    def _check_divides(self, spec: ModelSpec, number: int, what: str) -> None:
        if number % self.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel} does not divide the {number} {what} of "
                f"model={spec.name}; choose one of {_divisors(number)}"
            )


def _divisors(number: int) -> str:
    return ", ".join(str(candidate) for candidate in range(1, min(number, 64) + 1) if number % candidate == 0)
