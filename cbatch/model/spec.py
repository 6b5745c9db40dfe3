"""The shape of a decoder-only transformer, for accounting, simulation and random weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from cbatch.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "nanogpt")
_HEADS = ("num_heads", "num_kv_heads", "head_dim")
_SIZES = ("num_layers", "hidden_size", *_HEADS, "intermediate_size", "vocab_size", "max_positions")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model.

    name: for messages and results.
    family: architecture; a `transformers` model type, or "nanogpt" (SARATHI's 12 H^2 block: plain MLP of width 4 H).
    max_positions: longest request in tokens, prompt and output.
    dtype: number format of weights and KV cache.
    path: local checkpoint folder (weights and tokenizer); None = random weights from `seed`.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    dtype: str = "bfloat16"
    tied_embeddings: bool = False
    rope_theta: float = 10000.0
    path: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for field, kind, what in (
            ("name", str, "text"),
            ("path", str | None, "the path of a folder, or null"),
            ("seed", int, "a whole number"),
            ("rope_theta", int | float, "a number"),
            ("tied_embeddings", bool, "true or false"),
        ):
            value = getattr(self, field)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(f"model.{field}={value!r} must be {what}")
        if not self.rope_theta > 0:
            raise ConfigError(f"model.rope_theta={self.rope_theta} must be above 0")
        for field, known in (("family", FAMILIES), ("dtype", DTYPE_BYTES)):
            if (value := getattr(self, field)) not in known:
                raise ConfigError(f"model.{field}={value!r} is unknown; choose one of {', '.join(known)}")
        for field in _SIZES:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"model.{field}={value} must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            heads, kv_heads = f"model.num_heads={self.num_heads}", f"model.num_kv_heads={self.num_kv_heads}"
            raise ConfigError(f"{heads} must be a multiple of {kv_heads}")

    @property
    def shape(self) -> dict[str, int]:
        """Returns the sizes that determine the time of an iteration, by name."""
        return {name: getattr(self, name) for name in _SIZES[:-1]} | {"dtype_bytes": DTYPE_BYTES[self.dtype]}

    @property
    def gated(self) -> bool:
        """Returns whether the feed-forward layer has a gate (SwiGLU): three matrices instead of two."""
        return self.family != "nanogpt"

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns (inputs, outputs) of each matrix product in one layer; projections of the same input are fused."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        up = self.intermediate_size * (2 if self.gated else 1)
        return {
            "qkv": (self.hidden_size, heads),
            "o": (self.num_heads * self.head_dim, self.hidden_size),
            "gate_up": (self.hidden_size, up),
            "down": (self.intermediate_size, self.hidden_size),
        }

    @property
    def layer_weights(self) -> int:
        """Returns the number of matrix elements in one layer."""
        return sum(inputs * outputs for inputs, outputs in self.linear_shapes.values())

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of matrices and embeddings, without norms and biases."""
        return Layers(0, self.num_layers, self.num_layers).weight_bytes(self)

    @property
    def kv_bytes_per_token(self) -> int:
        """Returns the bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def activation_bytes_per_token(self) -> int:
        """Returns the bytes of one token's activations that a layer holds at once.

        They are the residual, normalised and attended states; queries, keys and values twice; gates, ups and their products.
        """
        widths = self.linear_shapes
        values = 3 * self.hidden_size + 2 * widths["qkv"][1] + widths["gate_up"][1] + self.intermediate_size
        return values * DTYPE_BYTES[self.dtype]


class Layers(NamedTuple):
    """The layers of one pipeline stage, `first` to `end` - 1 of `total`.

    The first stage also has the embedding; the last stage also has the final norm and the output head.
    """

    first: int
    end: int
    total: int

    @property
    def size(self) -> int:
        return self.end - self.first

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.total

    def weight_bytes(self, spec: ModelSpec) -> int:
        """Returns the bytes of the stage's matrices and embeddings; the first and last stage each store a tied embedding."""
        shared = spec.tied_embeddings and self.is_first and self.is_last
        num_embeddings = 1 if shared else self.is_first + self.is_last
        weights = self.size * spec.layer_weights + num_embeddings * spec.vocab_size * spec.hidden_size
        return weights * DTYPE_BYTES[spec.dtype]


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a tensor-parallel group, which has a share of every matrix in a stage. size: ranks in the group."""

    index: int = 0
    size: int = 1

    def share(self, total: int) -> slice:
        """Returns the rank's share of `total` outputs, columns or vocabulary tokens; shares differ by at most one."""
        return slice(total * self.index // self.size, total * (self.index + 1) // self.size)

    def kv_heads(self, total: int) -> slice:
        """Returns the rank's key-value heads; ranks share a head if there are more ranks than heads."""
        first = total * self.index // self.size
        return slice(first, first + max(total // self.size, 1))


def split_layers(spec: ModelSpec, num_stages: int, sizes: Sequence[int] | None = None) -> list[Layers]:
    """Returns the layers of each pipeline stage.

    sizes: number of layers per stage; None: as equal as possible, with the remainder in earlier stages.

    Raises ConfigError if there are more stages than layers, or if `sizes` do not match stages or layers.
    """
    total = spec.num_layers
    if num_stages > total:
        problem = f"backend.pipeline_stages={num_stages} exceeds the {total} layers of model={spec.name}"
        raise ConfigError(f"{problem}; lower it to {total} or less")
    if sizes is None:
        sizes = [total // num_stages + (stage < total % num_stages) for stage in range(num_stages)]
    setting = f"backend.layers={list(sizes)}"
    if len(sizes) != num_stages:
        raise ConfigError(f"{setting}: give one number for each of the {num_stages} stages (backend.pipeline_stages)")
    if sum(sizes) != total or min(sizes) < 1:
        model = f"the {total} layers of model={spec.name}"
        raise ConfigError(f"{setting} must be numbers of at least 1 that sum to {model}")
    return [Layers(first, end, total) for first, end in pairwise(accumulate(sizes, initial=0))]
