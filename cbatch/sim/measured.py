"""The part of a profile's file about a model: measured times of the model's parts and of the host."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import inf, log
from typing import Annotated, Any

from pydantic import Field

from cbatch.model import DTYPE_BYTES, ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.attention import TableAttention, flops_per_score
from cbatch.sim.interpolation import BilinearGrid, ChunkGrid, PiecewiseLinear
from cbatch.sim.power import PowerLimit
from cbatch.sim.provenance import Loop
from cbatch.sim.roofline import Affine
from cbatch.sim.schema import (
    Grid,
    HostSeconds,
    NotNegative,
    NumGpus,
    NumLayers,
    Positive,
    TableColumns,
    check_ascending,
    check_length,
)
from cbatch.validation import whole

ByTokens = Annotated[PiecewiseLinear, TableColumns("tokens")]
ByRequests = Annotated[PiecewiseLinear, TableColumns("requests")]
Products = Annotated[PiecewiseLinear, TableColumns("tokens", positive=True)]
AttentionGrid = Annotated[BilinearGrid, Grid("sizes", "contexts")]

PARTS = ("linear", "attention", "other", "head")  # the parts of an iteration, as attributes of `Measured`

OF_LAYERS = ("linear", "other", "chunks", "decodes", "mixed_decodes", "alone", "exchange")
"""The tables that `MeasuredModel.measured` divides by the number of layers."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Host seconds of an iteration: plan, pack, launch and absorb.

    seconds_per_found_prompt, seconds_per_found_token: of an admitted request that finds tokens in the prefix cache: its prompt is hashed by
        block, and its tokens and blocks are entered in tables.
    seconds_per_chunk: of each other prompt, or chunk of one, in an iteration. The asynchronous loop hides this time, as the device takes longer.
    eager_seconds: added for each rank if operations are launched one by one, without a captured graph, while the device computes.
    receives_in_launch: whether the host receives earlier tokens while it launches so. It plans again after the launch.
    server_seconds: of each request, on its way from the server to the engine; see `Arrivals`.
    handover_seconds: from a request's first token to the turn of the replica that continues it, if idle: messages between threads.
    """

    seconds: HostSeconds
    seconds_per_request: HostSeconds = 0.0
    eager_seconds: HostSeconds = 0.0
    server_seconds: HostSeconds = 0.0
    handover_seconds: HostSeconds = 0.0
    seconds_per_found_prompt: HostSeconds = 0.0
    seconds_per_found_token: HostSeconds = 0.0
    seconds_per_chunk: HostSeconds = 0.0
    receives_in_launch: bool = False

    def of(self, num_requests: int, found: Sequence[int] = (), num_chunks: int = 0) -> float:
        """Returns the seconds of an iteration. found: tokens that admitted requests found in the prefix cache."""
        seconds = self.seconds + self.seconds_per_request * num_requests
        seconds += self.seconds_per_chunk * max(num_chunks - len(found), 0)
        return seconds + self.seconds_per_found_prompt * len(found) + self.seconds_per_found_token * sum(found)


HostTimes = Annotated[Mapping[Loop, HostTime], Field(min_length=2)]
"""Host times of the synchronous and the asynchronous loop."""


@dataclass(frozen=True, slots=True)
class SmallOperations:
    """Norms, activations and residual sums of a layer: a constant time, plus bytes per hidden element of a token."""

    seconds_per_layer: NotNegative
    bytes_per_hidden_element: Positive

    def of(self, share: ModelSpec, bandwidth: float) -> Affine:
        moved = self.bytes_per_hidden_element * share.hidden_size * DTYPE_BYTES[share.dtype] / 2
        return Affine(self.seconds_per_layer, moved / bandwidth)


@dataclass(frozen=True, slots=True)
class DecodeOnly:
    """Parts of iterations without prompts, if the runtime computes them differently; fields as in `Measured`."""

    linear: Products
    other: ByTokens
    head: ByRequests


@dataclass(frozen=True, slots=True)
class DraftedOnly(DecodeOnly):
    """Parts of iterations without prompts in graphs that hold drafts, against the graph's rows.

    decodes: attention of decodes with drafts, see `TableAttention.drafted`. alone: of those without, as `TableAttention.decodes`.
    """

    decodes: AttentionGrid
    alone: AttentionGrid


@dataclass(frozen=True, slots=True)
class CapturedGraphs:
    """The captured graphs to whose tokens the runtime pads iterations.

    requests: sizes of the graphs for decode-only iterations; the largest batch also has a graph.
    tokens: sizes of the graphs for iterations with prompts. Only graphs larger than the largest batch are used.
    fewest: fewest tokens for each graph of `tokens`; an iteration with fewer tokens that no smaller graph holds runs unpadded.
    """

    requests: tuple[Annotated[int, whole(1)], ...]
    tokens: tuple[Annotated[int, whole(1)], ...]
    fewest: tuple[Annotated[int, whole(0)], ...]

    def __post_init__(self) -> None:
        check_ascending("requests", self.requests)
        check_ascending("tokens", self.tokens)
        check_length("fewest", self.fewest, "tokens", self.tokens)

    def padded(self, max_batch: int, max_rows: int, num_tokens: int, prompts: bool) -> int | None:
        """Returns the tokens of the graph that computes an iteration; None: it runs unpadded.

        max_rows: of iterations without prompts, if drafts may make them more than `max_batch`. prompts: whether it has prompts.
        """
        if not prompts:
            sizes = {max_batch, *(size for size in self.requests if size < max(max_batch, max_rows))}
            if max_rows > max_batch:
                powers = [1 << power for power in range(7, max_rows.bit_length())]
                more = (*powers, *(3 * power // 2 for power in powers if power >= 256))
                sizes |= {max_rows, *(size for size in more if size < max_rows)}
            return min((size for size in sizes if size >= num_tokens), default=None)
        for size, fewest in zip(self.tokens, self.fewest, strict=True):
            if max_batch < size and num_tokens <= size:
                return size if num_tokens >= fewest else None
        return None


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a model on one GPU at one tensor-parallel degree; None: not measured.

    In a file the times cover all layers. `MeasuredModel.measured` returns them for one layer.

    linear, other: seconds of the layers' matrix products and small operations, against tokens.
    head: seconds of output head and sampling, against requests. embedding: against tokens.
    chunks, decodes, mixed_decodes: seconds of the layers' attention, see `TableAttention`.
    decode_only: iterations without prompts, if measured separately; linear, other and head then exclude them.
    drafted_only: those in graphs that hold drafts, made by n-grams; `other` includes that. None: priced as if graphs held none.
    shared_reads: see `TableAttention`; against decodes.
    exchange: seconds of the layers' exchanges between ranks, against tokens; None: two all-reduces per layer over the profile's links.
    power: how an iteration's time depends on the preceding iterations.
    captured_rows: cost of a captured graph's rows, used or not; a graph has one row per request of the largest batch. Seconds that a
        mixed iteration takes longer than with graphs for the smallest batch, against (largest batch, tokens). The other tables
        were measured at the last of these batches.
    captured_graphs: None: no padding.
    """

    linear: Products | None = None
    other: ByTokens | None = None
    head: ByRequests | None = None
    embedding: ByTokens | None = None
    decode_only: DecodeOnly | None = None
    drafted_only: DraftedOnly | None = None
    chunks: AttentionGrid | None = None
    decodes: AttentionGrid | None = None
    mixed_decodes: AttentionGrid | None = None
    shared_reads: Annotated[PiecewiseLinear, TableColumns("requests", "share")] | None = None
    power: PowerLimit | None = None
    captured_rows: Annotated[BilinearGrid, Grid("requests", "tokens")] | None = None
    captured_graphs: CapturedGraphs | None = None
    exchange: ByTokens | None = None

    def __post_init__(self) -> None:
        if (self.chunks is None) != (self.decodes is None) or (self.mixed_decodes is not None and self.decodes is None):
            raise ValueError("chunks and decodes belong together; give both tables")

    def names(self) -> Iterator[str]:
        """Yields the keys of the tables in a file; tables of `decode_only` have separate keys."""
        for part in fields(self):
            table = getattr(self, part.name)
            if isinstance(table, DecodeOnly):
                yield from (f"{part.name}.{inner.name}" for inner in fields(table))
            elif table is not None:
                yield part.name

    @property
    def without_prompts(self) -> DecodeOnly | None:
        """Returns `decode_only`, continued to the largest captured graph: there its products grow as those beside prompts do."""
        alone, graphs, mixed = self.decode_only, self.captured_graphs, self.linear
        if not (alone and graphs and mixed) or graphs.requests[-1] <= (most := int(alone.linear.sizes[-1])):
            return alone
        edges = pairwise([most, *(size for size in graphs.requests if size > most)])
        last = alone.linear.seconds[-1] - mixed.at(most)
        steps = [(size, last + mixed.at(high)) for low, high in edges for size in (low + 1, high)]
        return replace(alone, linear=PiecewiseLinear.through([*zip(*alone.linear, strict=True), *steps]))

    @property
    def attention(self) -> TableAttention | None:
        if self.chunks is None or self.decodes is None:
            return None
        drafted = self.drafted_only.decodes if self.drafted_only else None
        grid = ChunkGrid(*self.chunks)
        return TableAttention(grid, self.decodes, self.mixed_decodes, shared_reads=self.shared_reads, drafted=drafted)

    def share_out(self, spec: ModelSpec, num_gpus: int) -> "Measured":
        """Estimates one GPU's tables in a group that shares every layer, from the tables of a single GPU.

        Products take a GPU's share of the time, attention the share of the GPU's key-value heads, small operations the full time. On
        two H200s this estimate was 5% off (mean over iterations of two models); an estimate from kernel rates was 9% off.
        """
        part = 1 / num_gpus
        heads = Topology(num_gpus, gpus_per_node=num_gpus).share(spec).num_kv_heads / spec.num_kv_heads
        shared = self.scaled(linear=part, head=part, chunks=heads, decodes=heads, mixed_decodes=heads, alone=heads)
        return replace(shared, exchange=None, captured_rows=None)

    def scaled(self, **factors: float) -> "Measured":
        """Multiplies the seconds of tables, also in `decode_only`, by factors."""
        parts: list[Any] = [self, self.decode_only, self.drafted_only]
        for place, part in enumerate(parts):
            tables = {name: table for name in factors if (table := getattr(part, name, None))}
            parts[place] = part and replace(part, **{name: tables[name].scaled(factors[name]) for name in tables})
        scaled: Measured = replace(parts[0], decode_only=parts[1], drafted_only=parts[2])
        return scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """The tables of a model by tensor-parallel degree.

    num_layers: layers that the tables cover. host: host times of this model; None: the profile's host times.
    shape: `ModelSpec.shape` of the model; empty: not stated, so only the name identifies the model.
    """

    num_layers: NumLayers
    shape: Mapping[str, Annotated[int, whole(1)]] = field(default_factory=dict)
    host: HostTimes | None = None
    tensor_parallel: Mapping[NumGpus, Measured]

    def differs(self, spec: ModelSpec) -> set[str]:
        """Returns the keys of `shape` in which a model differs from the measured model. Without a shape the tables are 16-bit."""
        if not self.shape and DTYPE_BYTES[spec.dtype] > 2:
            return {"dtype_bytes"}
        return {key for key, number in self.shape.items() if number != spec.shape.get(key)}

    def distance(self, spec: ModelSpec) -> float:
        """Returns the distance to a model's layers, over logarithms of sizes; infinite if `fitted` cannot estimate the model."""
        same = self.shape.keys() == spec.shape.keys() and "dtype_bytes" not in self.differs(spec)
        if not same or not all(tables.chunks for tables in self.tensor_parallel.values()):
            return inf
        sizes = self.shape.keys() - {"num_layers", "vocab_size"}
        return sum(abs(log(spec.shape[size] / self.shape[size])) for size in sizes)

    def fitted(self, spec: ModelSpec, tensor_parallel: int) -> tuple[Measured, tuple[str, ...]]:
        """Estimates the tables of `measured` for a model of another shape; assumes gated layers.

        Times are proportional to weights for products and head, to the operations per score for chunks, and to the KV cache per token
        for decodes. A chunk also reads the cache. Small operations keep their least time, due to launches; the rest follows the hidden size.
        """
        sizes: dict[str, Any] = {size: self.shape[size] for size in self.shape.keys() - {"dtype_bytes"}}
        known, tables = replace(spec, family="llama", **sizes), self.measured(spec, tensor_parallel)[0]
        linear, scores = spec.layer_weights / known.layer_weights, flops_per_score(spec) / flops_per_score(known)
        width = spec.hidden_size / known.hidden_size
        head = width * spec.vocab_size / known.vocab_size
        kv = spec.num_kv_heads * spec.head_dim / (known.num_kv_heads * known.head_dim)
        fit = tables.scaled(linear=linear, head=head, chunks=scores, decodes=kv, mixed_decodes=kv)
        decodes, attention = fit.decode_only, fit.attention
        fit = replace(
            fit,
            other=fit.other and fit.other.scaled(width, min(fit.other.seconds)),
            decode_only=decodes and replace(decodes, other=decodes.other.scaled(width, min(decodes.other.seconds))),
            drafted_only=None,
            chunks=attention.chunks.at_least(attention.seconds_per_context) if attention else None,
        )
        return fit, tuple(fit.names())

    def measured(self, spec: ModelSpec, tensor_parallel: int) -> tuple[Measured, tuple[str, ...]]:
        """Returns one GPU's tables, per layer, and the names of inferred tables: unmeasured degrees are inferred from one GPU.

        `captured_rows` covers all layers of the model, which may have more or fewer than the tables.
        """
        degree = tensor_parallel if tensor_parallel in self.tensor_parallel else 1
        factors = dict.fromkeys(OF_LAYERS, 1 / self.num_layers) | {"captured_rows": spec.num_layers / self.num_layers}
        tables = self.tensor_parallel.get(degree, Measured()).scaled(**factors)
        if degree == tensor_parallel:
            return tables, ()
        shared = tables.share_out(spec, tensor_parallel)
        return shared, tuple(name for name in PARTS if getattr(shared, name))
