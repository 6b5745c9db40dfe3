"""A hardware profile: measurements of one kind of GPU and its links, and the error of simulated times."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import Annotated

from pydantic import Field

from cbatch.errors import ConfigError, ProfileError
from cbatch.model import DTYPE_BYTES, ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.attention import Attention, AttentionRates, flops_per_score, rows_per_read
from cbatch.sim.links import TO_ADD, Links
from cbatch.sim.measured import PARTS, HostTime, HostTimes, Measured, MeasuredModel, SmallOperations
from cbatch.sim.provenance import NOT_COMPARED, Compared, Conditions, Place
from cbatch.sim.roofline import Affine, Ceilings, MatrixProducts, Seconds, small_operations
from cbatch.sim.schema import BlockSize, Bytes, BytesPerSecond, FlopsPerSecond, NotNegative, Positive

MEMORY_SHARE = 0.9
"""Share of the GPU's memory for weights, activations and KV cache, as in vLLM; the rest is for graphs and the libraries."""

CACHE_BYTES_PER_SECOND = 6.2e12
"""Rate at which decodes read context from an H100's L2 cache; measured: 5.2e12 (64 contexts of 1,344 tokens that share 1,024) to
6.5e12 (8 contexts of 60,000 that share 50,048; 2026-11-26, 91d30029). An H200 has the same multiprocessors."""


@dataclass(frozen=True, slots=True)
class Card:
    """The speed of one card and its host relative to a profile's tables: factors on the times of iterations with and without prompts.

    name: the card, or the records that the factors were fitted to; empty: the card that the tables were measured on.
    launches: factor on `HostTime.eager_seconds`.
    """

    name: str = ""
    prompts: Positive = 1.0
    decodes: Positive = 1.0
    launches: Positive = 1.0

    @property
    def text(self) -> str:
        """Returns a short text with the card and its factors; empty for the card that the tables were measured on."""
        if not self.name:
            return ""
        factors = f"prompts x{self.prompts:.3f}, decodes x{self.decodes:.3f}"
        return f"{self.name}: {factors}, launches without a graph x{self.launches:.3f}"


@dataclass(frozen=True, slots=True)
class Peak:
    """The rates of a data sheet: of 16-bit products without sparsity, and of memory."""

    flops_per_second: FlopsPerSecond
    bandwidth_bytes_per_second: BytesPerSecond


@dataclass(frozen=True, slots=True)
class Watts:
    """The power of one GPU: `idle` between iterations; in an iteration `busy`, plus joules per byte moved and per operation, at most `limit`."""

    idle: NotNegative
    busy: NotNegative
    joules_per_byte: NotNegative
    joules_per_flop: NotNegative
    limit: Positive

    def of(self, num_gpus: int) -> tuple[float, ...]:
        """Returns the fields for GPUs that share the bytes and operations."""
        each = self.joules_per_byte, self.joules_per_flop
        return num_gpus * self.idle, num_gpus * self.busy, *each, num_gpus * self.limit


PEAK = 1.3
"""Upper bound on the ratio of a data sheet's peak to the largest measured rate; faster products cannot have been measured."""

SLOWEST, LAUNCHES = 100, 2e-5
"""A layer's products take at most this multiple of their time at the ceilings, where that exceeds these seconds of launches."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Seconds of one GPU's operations for its share of one layer, measured or estimated.

    least_head: of an output head beyond the measured requests, at the ceilings.
    measured: the measured tables, per layer.
    estimated: names of the parts that were inferred from other measurements, or computed from the ceilings because neither
        the model's tables nor kernel rates exist.
    """

    linear: Seconds
    attention: Attention
    other: Seconds
    embedding: Seconds
    head: Seconds
    least_head: Seconds
    measured: Measured
    estimated: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of GPU. The fields are the keys of a profile's file; each object in the file may state its origin as "from".

    name, hardware, source: the GPU, and the source of the numbers.
    compared: real runs and the errors of their simulation, by loop and number of GPUs. error: the text for runs that `compared` does not cover.
    memory_bytes: memory of the device. block_size: default tokens per KV block, as in the measured engine.
    price: US dollars per hour of one device; None: unknown. watts: power, for the figures `energy`; None: unknown.
    peak: rates of the data sheet, for utilisation; None: the ceilings stand for them. ceilings: for unmeasured parts.
    attention, small_operations: for models that resemble no measured model.
    host: host time per iteration for models without their own; None: not measured.
    card: the card to predict, if the tables were measured on another card.
    origins: every "from", by the place of its object; see `cbatch.sim.provenance`.
    """

    name: str
    hardware: str
    source: str
    error: str = NOT_COMPARED
    compared: Mapping[Conditions, Compared] = field(default_factory=dict)
    memory_bytes: Bytes
    block_size: BlockSize = 16
    price: NotNegative | None = None
    peak: Peak | None = None
    watts: Watts | None = None
    ceilings: Ceilings
    attention: AttentionRates | None = None
    small_operations: SmallOperations | None = None
    host: HostTimes | None = None
    links: Links = field(default_factory=Links)
    card: Card = Card()
    models: Mapping[str, MeasuredModel] = field(default_factory=dict)
    origins: Annotated[Mapping[Place, str], Field(exclude=True)] = field(default_factory=dict)

    def peak_of(self, dtype: str) -> tuple[float, float]:
        """Returns the peak rates of products in this number format, and of memory. Raises ProfileError: no such rate is stated."""
        ceilings = self.ceilings.of(dtype)
        if self.peak is None:
            return ceilings.flops_per_second, ceilings.bandwidth_bytes_per_second
        narrow = DTYPE_BYTES[dtype] == 2
        flops = self.peak.flops_per_second if narrow else ceilings.flops_per_second
        return flops, self.peak.bandwidth_bytes_per_second

    def measured_as(self, spec: ModelSpec) -> str:
        """Returns the name of the measured model with this shape, or ""; only the number of layers may differ.

        A checkpoint may have any name. A model of the same name is preferred, then a model with as many layers.
        """
        names = [name for name, model in self.models.items() if name == spec.name or model.shape]
        fitting = [name for name in names if self.models[name].differs(spec) <= {"num_layers"}]
        return min(fitting, key=lambda name: (name != spec.name, len(self.models[name].differs(spec))), default="")

    def host_time(self, asynchronous: bool, spec: ModelSpec | None = None) -> HostTime:
        """Returns the host time of a model in one loop, on the card's host; zero if not measured. spec: None means a model without tables."""
        model = self.models.get(self.measured_as(spec)) if spec else None
        times = (model and model.host) or self.host
        time = times["async" if asynchronous else "sync"] if times else HostTime(0.0)
        return replace(time, eager_seconds=time.eager_seconds * self.card.launches)

    def error_of(
        self, spec: ModelSpec, topology: Topology, asynchronous: bool | None, in_graphs: bool = False
    ) -> Compared | None:
        """Returns the error of such runs of one replica, or None if none was compared. Comparisons on several GPUs are of tensor parallelism.

        What else a run may use, such as pipeline stages, is outside the conditions of the error; results say so.
        asynchronous: which loop; None: neither, as for single iterations. in_graphs: prefer such runs, see `Compared`.
        """
        measured, gpus = self.models.get(name := self.measured_as(spec) or spec.name), topology.tensor_parallel
        if measured and measured.differs(spec):
            return None
        ordered = sorted(self.compared.items(), key=lambda item: item[1].in_graphs != in_graphs)
        of_loop = (known for of, known in ordered if asynchronous in (None, of.startswith("async")))
        return next((known for known in of_loop if name in known.models and known.gpus == gpus), None)

    def origin(self, *place: str) -> str:
        """Returns the origin of an entry: stated by the entry, by the innermost enclosing object, or by the file's source."""
        stated = (self.origins.get(place[:length]) for length in range(len(place), -1, -1))
        return next((text for text in stated if text is not None), self.source)

    def measured(self, spec: ModelSpec, tensor_parallel: int) -> tuple[Measured, tuple[str, ...]]:
        """Returns `MeasuredModel.measured`. A model without tables gets tables of `similar_to`, fitted to its shape, if any."""
        if name := self.measured_as(spec):
            return self.models[name].measured(spec, tensor_parallel)
        name = self.similar_to(spec)
        return self.models[name].fitted(spec, tensor_parallel) if name else (Measured(), ())

    def similar_to(self, spec: ModelSpec) -> str:
        """Returns the name of the measured model whose tables are fitted to a model without tables, or ""."""
        distances = {name: model.distance(spec) for name, model in self.models.items() if not self.measured_as(spec)}
        name = min(distances, key=distances.__getitem__, default="")
        return name if distances.get(name, inf) < inf else ""

    def table_origins(self, spec: ModelSpec, tensor_parallel: int) -> dict[str, str]:
        """Returns the origin of each table of a model, of rates that replace a table, and of the host time."""
        model = self.models.get(name := self.measured_as(spec))
        known = model.tensor_parallel.get(tensor_parallel, Measured()) if model else Measured()
        tables = ("models", name, "tensor_parallel", str(tensor_parallel))
        origins = {table: self.origin(*tables, *table.split(".")) for table in known.names()}
        measured, _ = self.measured(spec, tensor_parallel)
        if measured.attention is None and self.attention is not None:
            origins["attention"] = self.origin("attention")
        if measured.other is None and self.small_operations is not None:
            origins["other"] = self.origin("small_operations")
        if model and model.host:
            return origins | {"host": self.origin("models", name, "host", "sync")}
        no_host = "assumed: none, the profile has no host time"
        return origins | {"host": self.origin("host", "sync") if self.host else no_host}

    def operations(self, spec: ModelSpec, tensor_parallel: int = 1) -> Operations:
        """Returns the seconds of one GPU's operations, measured or, without a measurement, estimated.

        Raises ProfileError if a layer's measured matrix products are faster than the device's peak, or are not in seconds.
        """
        share = Topology(tensor_parallel, gpus_per_node=tensor_parallel).share(spec)
        try:
            ceilings = self.ceilings.of(spec.dtype)
        except ProfileError as error:
            raise ProfileError(f"hardware={self.name}: {error}") from None
        measured, inferred = self.measured(spec, tensor_parallel)
        peak, flops = PEAK * ceilings.flops_per_second, 2 * share.layer_weights
        products = [part.linear for part in (measured, measured.decode_only) if part and part.linear]
        roofline = MatrixProducts(tuple(share.linear_shapes.values()), DTYPE_BYTES[share.dtype], ceilings)
        for tokens, seconds in chain.from_iterable(zip(*table, strict=True) for table in products):
            if seconds * peak < tokens * flops:
                rate = f"{tokens * flops / seconds / 1e12:.0f} TFLOP/s, {self.hardware} has at most {peak / 1e12:.0f}"
                problem = f"products of {share.name} with {tokens:g} tokens reach {rate}"
                raise ProfileError(f"hardware={self.name}: {problem}; correct the table of linear, or the ceilings")
            if seconds > SLOWEST * (least := roofline.at(tokens)) > SLOWEST * LAUNCHES:
                known = f"{seconds:.3g} s per layer, the ceilings give {least:.3g} s"
                problem = f"products of {share.name} with {tokens:g} tokens take {known}"
                raise ProfileError(f"hardware={self.name}: {problem}; give the table of linear in seconds")
        bandwidth, size = ceilings.bandwidth_bytes_per_second, DTYPE_BYTES[share.dtype]
        rates = self.attention or AttentionRates(bandwidth, self.ceilings.flops_per_second, bandwidth)
        slower = ceilings.flops_per_second / self.ceilings.flops_per_second
        rates = replace(rates, flops_per_second=rates.flops_per_second * slower)
        kv_bytes = share.kv_bytes_per_token / share.num_layers
        tables = measured.attention and replace(
            measured.attention,
            seconds_per_score=flops_per_score(share) / ceilings.flops_per_second,
            seconds_per_read=kv_bytes / self.peak.bandwidth_bytes_per_second if self.peak else 0.0,
            least_read=min(bandwidth / CACHE_BYTES_PER_SECOND, 1.0),
            rows_per_read=rows_per_read(share),
        )
        small = self.small_operations
        other = small.of(share, bandwidth) if small else small_operations(share, ceilings)
        least_head = MatrixProducts(((share.hidden_size, share.vocab_size),), size, ceilings)
        sources = measured.linear, tables or self.attention, measured.other or small, measured.head
        missing = [name for name, source in zip(PARTS, sources, strict=True) if source is None]
        return Operations(
            linear=measured.linear or roofline,
            attention=tables or rates.of(share),
            other=measured.other or other,
            embedding=measured.embedding or Affine(0.0, 2 * share.hidden_size * size / bandwidth),
            head=measured.head or least_head,
            least_head=least_head,
            measured=measured,
            estimated=(*missing, *inferred),
        )

    def kv_tokens(
        self,
        spec: ModelSpec,
        max_tokens: int,
        topology: Topology = Topology(),  # noqa: B008 - frozen
        draft: ModelSpec | None = None,
    ) -> int:
        """Returns the tokens of KV cache that fit beside one replica's weights and the activations of `max_tokens` tokens.

        draft: a draft model, whole on each GPU, whose keys and values are counted as well.

        Raises ConfigError: the weights leave no room for a token, or the topology does not divide the model.
        """
        models = [topology.share(spec), *([] if draft is None else [draft])]
        weights = sum(each.weight_bytes for each in models)
        per_token = sum(each.kv_bytes_per_token for each in models)
        beside = weights + max_tokens * sum(each.activation_bytes_per_token for each in models)
        free = (usable := self.memory_bytes * MEMORY_SHARE) - beside
        if free < per_token:
            per_gpu = f"{weights / 1e9:.0f} GB of weights per GPU"
            needed = f"model={spec.name} does not fit: {per_gpu}, {(beside - weights) / 1e9:.1f} GB of activations"
            there = f"hardware={self.name} has {usable / 1e9:.0f} GB for both and the KV cache"
            part = f"{MEMORY_SHARE:.0%} of {self.memory_bytes / 1e9:.0f} GB"
            remedy = _remedy(spec, max_tokens, topology, usable, self.links)
            raise ConfigError(f"{needed}, but {there} ({part}); {remedy}")
        return int(free // per_token)


def _remedy(spec: ModelSpec, max_tokens: int, topology: Topology, usable: float, links: Links) -> str:
    """Names the fewest GPUs per stage that hold a model, and the links they need. usable: bytes per GPU."""
    for degree in range(topology.tensor_parallel + 1, topology.gpus_per_node + 1):
        with suppress(ConfigError):  # this number does not divide the model
            share = replace(topology, tensor_parallel=degree).share(spec)
            if share.weight_bytes + max_tokens * share.activation_bytes_per_token < usable:
                lacking = "" if links.all_reduce else f" and add links.all_reduce.{degree}, {TO_ADD}"
                return f"give backend=sim backend.tensor_parallel={degree}{lacking}, or choose a smaller model"
    lacking = "" if links.within_node else f" and add links.within_node, {TO_ADD}"
    return f"raise backend.pipeline_stages with backend=sim{lacking}, or choose a smaller model"
