"""A hardware profile: measurements of one kind of GPU and its links, and the error of simulated times."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from cbatch.errors import ConfigError
from cbatch.model import DTYPE_BYTES, ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.attention import Attention, AttentionRates
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.power import PowerLimit
from cbatch.sim.provenance import NOT_COMPARED, Compared
from cbatch.sim.roofline import Affine, Ceilings, Seconds, head_product, layer_products, small_operations

MEMORY_SHARE = 0.9
"""Share of the GPU's memory for weights and KV cache; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Host seconds of an iteration: plan, pack, launch and absorb.

    eager_seconds: what launching adds without a captured graph, operation by operation, while the device computes.
    """

    seconds: float = 0.0
    seconds_per_request: float = 0.0
    eager_seconds: float = 0.0

    def of(self, num_requests: int) -> float:
        return self.seconds + self.seconds_per_request * num_requests


@dataclass(frozen=True, slots=True)
class SmallOperations:
    """Norms, activations and residual sums of a layer: a constant, and bytes per hidden element of a token."""

    seconds_per_layer: float
    bytes_per_hidden_element: float

    def of(self, share: ModelSpec, bandwidth: float) -> Affine:
        moved = self.bytes_per_hidden_element * share.hidden_size * DTYPE_BYTES[share.dtype] / 2
        return Affine(self.seconds_per_layer, moved / bandwidth)


@dataclass(frozen=True, slots=True)
class DecodeOnly:
    """Parts of iterations without prompts, if a runtime computes them differently; each as in `Measured`."""

    linear: PiecewiseLinear
    other: PiecewiseLinear
    head: PiecewiseLinear


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Cost of the rows of a captured graph, used or not: one row per request of the largest batch.

    seconds: difference of a mixed iteration to one with graphs for the smallest batch, against (largest batch, tokens).
        The other tables were measured at the last of these batches. Larger iterations have only their requests' rows.
    """

    seconds: BilinearGrid

    def over_measured(self, max_batch: int, num_tokens: float) -> float:
        """Extra seconds of an iteration with graphs for this batch instead of the measured one."""
        if num_tokens > self.seconds.columns[0][-1]:
            return 0.0
        return self.seconds.at(max_batch, num_tokens) - self.seconds.at(self.seconds.sizes[-1], num_tokens)


@dataclass(frozen=True, slots=True)
class CapturedGraphs:
    """The graphs that a runtime has captured, to whose tokens it pads iterations.

    decodes: requests of those for decodes alone; there is one for the largest batch too.
    prompts: tokens of those for iterations with prompts, each with the fewest tokens that it takes: an iteration of
        fewer tokens that no smaller graph holds runs unpadded. Only those larger than the largest batch are used.
    """

    decodes: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]

    def padded(self, num_tokens: int, max_batch: int, *, prompts: bool) -> int | None:
        """Tokens of the graph that computes an iteration with or without prompts; None: it runs unpadded, without a graph."""
        if not prompts:
            sizes = [size for size in self.decodes if size < max_batch]
            return next((size for size in [*sizes, max_batch] if size >= num_tokens), None)
        for size, fewest in self.prompts:
            if max_batch < size and num_tokens <= size:
                return size if num_tokens >= fewest else None
        return None


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a model on one GPU at one tensor-parallel degree; None: not measured.

    linear, other: seconds of one layer's matrix products and small operations, against tokens.
    attention: of one layer.
    embedding: of the whole model, against tokens. head: output head and sampling, against requests.
    exchange: of one layer's parts between the ranks, against tokens; None: two all-reduces over the profile's links.
    decode_only: iterations without prompts, if measured separately; linear, other and head then exclude them.
    captured_rows: effect of the largest batch on captured iterations. captured_graphs: None: nothing is padded.
    power: how the time of an iteration depends on the iterations before it.
    inferred: parts derived from other measurements; they count as estimated.
    """

    linear: PiecewiseLinear | None = None
    attention: Attention | None = None
    other: PiecewiseLinear | None = None
    embedding: PiecewiseLinear | None = None
    head: PiecewiseLinear | None = None
    exchange: PiecewiseLinear | None = None
    decode_only: DecodeOnly | None = None
    captured_rows: CapturedRows | None = None
    captured_graphs: CapturedGraphs | None = None
    power: PowerLimit | None = None
    inferred: tuple[str, ...] = ()


class Tables(Protocol):
    """The measured tables of a profile."""

    def measured(self, spec: ModelSpec, tensor_parallel: int) -> Measured:
        """The measurements of this model; an empty `Measured` if there are none."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Seconds of all that one GPU computes for its share of a model, as in `Measured`.

    estimated: names of the parts that come from the ceilings, for lack of the model's tables and of rates of kernels.
    """

    linear: Seconds
    attention: Attention
    other: Seconds
    embedding: Seconds
    head: Seconds
    exchange: PiecewiseLinear | None
    decode_only: DecodeOnly | None
    captured_rows: CapturedRows | None
    captured_graphs: CapturedGraphs | None
    power: PowerLimit | None
    estimated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of GPU.

    name, hardware, source: the GPU, and the source of the numbers. entries: the origin of each entry, see
        `read_entries`.
    error: how far simulated times were from real runs, or that this is unknown. compared: the runs that it holds for, by
        loop ("async", "sync"); empty: the text says it itself.
    memory_bytes: of the device.
    ceilings: for parts that were not measured. attention, small: kernel rates for models that were not measured.
    sync_host, async_host: host time of an iteration in the two loops; hosts: of models for which it was measured.
    """

    name: str
    hardware: str
    source: str
    error: str
    memory_bytes: float
    ceilings: Ceilings
    tables: Tables
    attention: AttentionRates | None = None
    small: SmallOperations | None = None
    sync_host: HostTime = HostTime()
    async_host: HostTime = HostTime()
    links: Links = field(default_factory=Links)
    hosts: Mapping[str, tuple[HostTime, HostTime]] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    compared: Mapping[str, Compared] = field(default_factory=dict)

    def host(self, asynchronous: bool, model: str = "") -> HostTime:
        return self.hosts.get(model, (self.sync_host, self.async_host))[asynchronous]

    def error_of(self, model: str, num_gpus: int, asynchronous: bool | None) -> tuple[str, str]:
        """The error of such runs, and the same in a few words. asynchronous: None: of neither loop, such as single iterations."""
        if not self.compared:
            return self.error, ""
        known = self.real_runs(model, num_gpus, asynchronous)
        return (known.error or self.error, known.brief) if known else (NOT_COMPARED, "")

    def real_runs(self, model: str, num_gpus: int, asynchronous: bool | None) -> Compared | None:
        """The real runs that such runs were compared with, if any. asynchronous: as in `error_of`."""
        loops = {None: [*self.compared], False: ["sync"], True: ["async"]}[asynchronous]
        for known in (self.compared[loop] for loop in loops if loop in self.compared):
            if model in known.models and num_gpus == known.gpus:
                return known
        return None

    def origins(self, spec: ModelSpec, tensor_parallel: int) -> dict[str, str]:
        """The origin of each table of a model, of rates in the place of one, and of its host time."""
        model = f"models.{spec.name}."
        tables = f"{model}tensor_parallel.{tensor_parallel}."
        found = {name.removeprefix(tables): origin for name, origin in self.entries.items() if name.startswith(tables)}
        measured = self.tables.measured(spec, tensor_parallel)
        for part, entry, table, rates in (
            ("attention", "attention", measured.attention, self.attention),
            ("other", "small_operations", measured.other, self.small),
        ):
            if table is None and rates is not None:
                found[part] = self.entries.get(entry, self.source)
        host = f"{model}host." if spec.name in self.hosts else "host."
        of_host = [origin for name, origin in self.entries.items() if name.startswith(host)]
        return {**found, "host": of_host[0] if of_host else "assumed: none, the profile has no host time"}

    def operations(self, spec: ModelSpec, tensor_parallel: int = 1) -> Operations:
        """Seconds of one GPU's operations: measured, or estimated if there is no measurement."""
        share, ceilings = Topology(tensor_parallel).share(spec), self.ceilings
        measured = self.tables.measured(spec, tensor_parallel)
        bandwidth = ceilings.bandwidth_bytes_per_second
        rates = self.attention or AttentionRates(bandwidth, ceilings.flops_per_second, bandwidth)
        other = self.small.of(share, bandwidth) if self.small else small_operations(share, ceilings)
        embedding = Affine(0.0, 2 * share.hidden_size * DTYPE_BYTES[share.dtype] / bandwidth)
        known = {
            "linear": measured.linear,
            "attention": measured.attention or self.attention,
            "other": measured.other or self.small,
            "head": measured.head,
        }
        return Operations(
            linear=measured.linear or layer_products(share, ceilings),
            attention=measured.attention or rates.of(share),
            other=measured.other or other,
            embedding=measured.embedding or embedding,
            head=measured.head or head_product(share, ceilings),
            exchange=measured.exchange,
            decode_only=measured.decode_only,
            captured_rows=measured.captured_rows,
            captured_graphs=measured.captured_graphs,
            power=measured.power,
            estimated=(*(name for name, source in known.items() if source is None), *measured.inferred),
        )

    def kv_tokens(self, spec: ModelSpec, topology: Topology = Topology()) -> int:  # noqa: B008 - frozen
        """Tokens of KV cache beside the weights of one replica.

        Raises:
            ConfigError: the weights alone do not fit, or the topology does not divide the model.
        """
        share = topology.share(spec)
        free = self.memory_bytes * MEMORY_SHARE - share.weight_bytes
        if free < share.kv_bytes_per_token:
            needed = f"model={spec.name} does not fit: {share.weight_bytes / 1e9:.0f} GB of weights per GPU"
            usable, memory = f"{self.memory_bytes * MEMORY_SHARE / 1e9:.0f} GB", f"{self.memory_bytes / 1e9:.0f} GB"
            there = f"hardware={self.name} has {usable} for weights and KV cache ({MEMORY_SHARE:.0%} of {memory})"
            raise ConfigError(f"{needed}, but {there}; {self._remedy(spec, topology)}")
        return int(free // share.kv_bytes_per_token)

    def _remedy(self, spec: ModelSpec, topology: Topology) -> str:
        """Names the fewest GPUs per stage that hold a model."""
        for degree in range(topology.tensor_parallel + 1, topology.gpus_per_node + 1):
            with suppress(ConfigError):  # this number does not divide the model
                if (
                    replace(topology, tensor_parallel=degree).share(spec).weight_bytes
                    < self.memory_bytes * MEMORY_SHARE
                ):
                    return f"give backend=sim backend.tensor_parallel={degree}, or choose a smaller model"
        return "raise backend.pipeline_stages with backend=sim, or choose a smaller model"
