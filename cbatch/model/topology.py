"""The distribution of a model over GPUs: tensor parallelism within a stage, pipeline stages, replicas."""

from dataclasses import dataclass, replace
from typing import Annotated

from cbatch.errors import ConfigError
from cbatch.model.spec import ModelSpec, Rank
from cbatch.validation import check, positive, whole

Degree = Annotated[int, whole(1, 10_000)]  # the limit exceeds the size of any cluster
Network = Annotated[float, positive("GB/s")] | None


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs that serve one model.

    tensor_parallel: GPUs that share every layer (Megatron-LM, arXiv 1909.08053: two all-reduces per layer).
    pipeline_stages: consecutive parts with equally many layers; one iteration per stage is in flight.
    replicas: copies of the model, each with its own queue.
    gpus_per_node: GPUs that share a node's fast links; a node has whole stages, one after another.
    network: GB/s from one GPU to another node; None: as the hardware profile states.
    """

    tensor_parallel: Degree = 1
    pipeline_stages: Degree = 1
    replicas: Degree = 1
    gpus_per_node: Degree = 8
    network: Network = None

    def __post_init__(self) -> None:
        check(self, "")
        if self.tensor_parallel > self.gpus_per_node:
            problem = f"tensor_parallel={self.tensor_parallel} exceeds gpus_per_node={self.gpus_per_node}"
            remedy = "raise gpus_per_node, or pipeline_stages instead"
            raise ConfigError(f"{problem}, and all-reduces are modelled within a node; {remedy}")

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_stages * self.replicas

    def leaves_node(self, stage: int) -> bool:
        """Returns whether the link from this stage to the next stage connects two nodes."""
        return (stage + 1) % (self.gpus_per_node // self.tensor_parallel) == 0

    def check(self, spec: ModelSpec) -> None:
        """Raises ConfigError if the topology does not divide the model. The message lists the degrees that do."""
        for key in ("tensor_parallel", "pipeline_stages"):
            if what := _uneven(spec, key, getattr(self, key)):
                divisors = ", ".join(str(degree) for degree in range(1, 65) if not _uneven(spec, key, degree))
                problem = f"{key}={getattr(self, key)} does not divide the {what} of model={spec.name}"
                raise ConfigError(f"{problem}; choose one of {divisors}")

    def share(self, spec: ModelSpec) -> ModelSpec:
        """Returns one GPU's part of the model, as a smaller model; GPUs share key-value heads if there are too few."""
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


def _uneven(spec: ModelSpec, key: str, degree: int) -> str | None:
    """Returns the part that `degree` ranks or stages cannot share evenly, or None. Ranks may share key-value heads."""
    ranks = {
        "attention heads": spec.num_heads,
        "columns of the feed-forward layer": spec.intermediate_size,
        "key-value heads": spec.num_kv_heads if degree % spec.num_kv_heads else degree,
    }
    parts = ranks if key == "tensor_parallel" else {"layers": spec.num_layers}
    return next((f"{number} {what}" for what, number in parts.items() if number % degree), None)


def split_ranks(spec: ModelSpec, tensor_parallel: int) -> list[Rank]:
    """Returns the ranks of a tensor-parallel group. Raises ConfigError if they do not divide the model."""
    Topology(tensor_parallel, gpus_per_node=tensor_parallel).check(spec)
    return [Rank(index, tensor_parallel) for index in range(tensor_parallel)]


def share_of(spec: ModelSpec, rank: Rank) -> ModelSpec:
    """Returns one rank's part of the model, like `Topology.share`, but with the rank's exact share of the vocabulary."""
    tokens = rank.share(spec.vocab_size)
    share = Topology(rank.size, gpus_per_node=rank.size).share(spec)
    return replace(share, vocab_size=tokens.stop - tokens.start)
