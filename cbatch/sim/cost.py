"""The cost model: predicts an iteration's device seconds from its shape, a hardware profile, a model and a topology.

Times that depend only on the number of tokens (matrix products, small operations, messages) are cached by that number.
Iterations without prompts have separate tables if the runtime computes them differently.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any, NamedTuple

from cbatch.cost import BatchShape
from cbatch.model import DTYPE_BYTES, ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.attention import Attention, TableAttention
from cbatch.sim.measured import DecodeOnly, DraftedOnly
from cbatch.sim.power import STEADY
from cbatch.sim.profile import Operations, Profile
from cbatch.sim.provenance import FALLBACK, NOT_COMPARED, not_measured
from cbatch.sim.roofline import Affine, Seconds
from cbatch.sim.times import Parts, StageTimes, TokenTimes


class _Tables(NamedTuple):
    """Cached readings of the tables of one kind of iteration.

    layers: number of layers in a stage, multiplied by the factor of the predicted card.
    times: by number of tokens. head: seconds by number of requests.
    """

    layers: float
    attention: Attention
    times: Callable[[int], TokenTimes]
    head: Callable[[int], float]


class ProfileCost:
    """Predicts iterations of one model on one kind of GPU; implements `cbatch.CostModel`.

    estimated: names of the parts that were not measured for this model; see `Operations`.
    power: how the clock follows the GPU's load; None: unknown, with a constant clock.
    max_rows: rows of the largest iteration without prompts, drafts included, for which graphs are captured; 0: `max_batch`.
    kv_bytes: of a token's keys and values on a GPU, which copies move.
    of_draft_model: see `DraftPasses.seconds`, which `predict` adds; None: there is no draft model.
    asked: whether `predict` was called, which in a run with real tokens only policies and routers do.
    num_outside: executed iterations with shapes outside the measured range, whose times were extrapolated.
    num_eager: executed iterations with prompts that fit no captured graph, or all of them if no graphs are known.
    """

    def __init__(
        self,
        profile: Profile,
        spec: ModelSpec,
        topology: Topology = Topology(),  # noqa: B008 - frozen
        max_batch: int | None = None,
    ) -> None:
        """
        max_batch: largest number of requests in an iteration, for which graphs are captured; None: the measured number.

        Raises:
            ConfigError: the topology does not divide the model. ProfileError: the topology's links were not measured.
        """
        self.profile, self.spec, self.topology = profile, spec, topology
        self.num_outside = self.num_eager = self.max_rows = 0
        self.asked = False
        self.of_draft_model: Callable[[BatchShape], float] | None = None
        self.operations = profile.operations(spec, topology.tensor_parallel)
        self.estimated = self.operations.estimated
        share = topology.share(spec)
        self._layers, self.kv_bytes = share.num_layers, share.kv_bytes_per_token
        self._all_reduce: Seconds | None = None
        if topology.tensor_parallel > 1 and self.operations.measured.exchange is None:
            self._all_reduce, estimated = profile.links.all_reduce_of(topology.tensor_parallel, profile.name)
            self.estimated += ("all_reduce",) * estimated
        leaves = map(topology.leaves_node, range(topology.pipeline_stages - 1))
        self._sends = frozenset[str]()  # the links over which anything is sent
        self._links = [*map(self.link, leaves)]
        self.power, graphs = self.operations.measured.power, self.operations.measured.captured_graphs
        self.max_batch = max_batch
        self._mixed = self._tables_of(self.operations, profile.card.prompts, mixed=True)
        without_prompts = self.operations.measured.without_prompts
        self._decode_only = self._tables_of(without_prompts or self.operations, profile.card.decodes, mixed=False)
        self._most_decodes = without_prompts.linear.sizes[-1] if without_prompts else math.inf
        with_drafts = self.operations.measured.drafted_only
        self._drafted = with_drafts and self._tables_of(with_drafts, profile.card.decodes, mixed=False)
        self._most_rows = with_drafts.linear.sizes[-1] if with_drafts else 0
        self._decodes = cache(self.power.of_decodes) if self.power else None
        self._copies = False  # whether any were predicted
        self._single_decodes: dict[int, StageTimes] = {}  # times of iterations with one decode, by its context
        self._padded = cache(partial(graphs.padded, max_batch or graphs.requests[-1])) if graphs else None

    def link(self, leaves_node: bool, blocks: bool = False) -> Seconds:
        """Returns the seconds of a send from one GPU to another, or with `blocks` of KV blocks, by bytes. Raises ProfileError if they are not known."""
        if blocks and not leaves_node and (of_blocks := self.profile.links.kv_blocks):
            self._sends |= {"kv_blocks"}
            return of_blocks
        self._sends |= {"between_nodes" if leaves_node else "within_node"}
        if leaves_node and self.topology.network:
            return Affine(0.0, 1e-9 / self.topology.network)
        return self.profile.links.to_next_stage(leaves_node, self.profile.name)

    def delay(self, leaves_node: bool) -> Seconds | None:
        """Returns `Links.delay`; a network's adapters read memory themselves."""
        delay = None if leaves_node else self.profile.links.delay
        self._sends |= {"delay"} if delay else set()
        return delay

    def predict(self, shape: BatchShape) -> float:
        """Returns the seconds that an iteration of this shape occupies the busiest device, which computes the last stage."""
        tables, self.asked = self._tables(shape), True
        times = self._times(shape, tables, tables.times(self._num_tokens(shape)))
        first = times.embedding if not times.transfers else 0.0
        seconds = times.compute + times.communication + first + times.head
        return seconds + self.of_draft_model(shape) if self.of_draft_model else seconds

    def parts(self, shape: BatchShape) -> Parts:
        """Returns the seconds by operation; `total` is the time from the start in the first stage to the end in the last."""
        tables, stages = self._tables(shape), self.topology.pipeline_stages
        token_times = tables.times(self._num_tokens(shape))
        times = self._times(shape, tables, token_times)
        return Parts(
            stages * token_times.linear,
            stages * tables.layers * tables.attention.seconds(shape),
            times.head,
            stages * token_times.other + token_times.embedding,
            stages * token_times.communication + sum(token_times.transfers),
        )

    def execute(self, shape: BatchShape) -> StageTimes:
        """Returns the times of an executed iteration at the GPU's steady clock rate; see `pace` for others."""
        tables = self._tables(shape)
        self.num_eager += bool(shape.chunks) and self.graph_tokens(shape) is None
        return self._execute(shape, tables, tables.times(self._num_tokens(shape)))

    def execute_decodes(self, shape: BatchShape) -> Iterator[tuple[BatchShape, StageTimes]]:
        """Yields the shapes and `execute` times of the iterations that follow an iteration of decodes (`following_decodes`)."""
        tables, num_tokens = self._tables(shape), self._num_tokens(shape)
        token_times = tables.times(num_tokens)
        for following in following_decodes(shape):
            times = self._single_decodes.get(following.decode_context) if num_tokens == 1 else None
            if times is None:
                num_outside = self.num_outside
                times = self._execute(following, tables, token_times)
                if num_tokens == 1 and self.num_outside == num_outside:
                    self._single_decodes[following.decode_context] = times
            yield following, times

    def _execute(self, shape: BatchShape, tables: _Tables, token_times: TokenTimes) -> StageTimes:
        if not token_times.covered or not tables.attention.covers(shape):
            self.num_outside += 1
        return self._times(shape, tables, token_times, paced=True)

    def copy_seconds(self, num_out: int, num_back: int, block_size: int) -> float:
        """See `cbatch.CostModel`. All GPUs copy their parts at the same time. Raises ProfileError if the profile has no times of copies."""
        self._copies = True
        out, back = self.profile.links.of_host(self.kv_bytes * block_size, self.profile.name)
        return num_out * out + num_back * back

    def is_eager(self, shape: BatchShape) -> bool:
        """Returns whether there are captured graphs, but none for this iteration."""
        return self._padded is not None and self.graph_tokens(shape) is None

    def graph_tokens(self, shape: BatchShape) -> int | None:
        """Returns the tokens of the captured graph that computes an iteration, or None."""
        prompts = bool(shape.chunks or shape.num_padding)
        return None if self._padded is None else self._padded(self.max_rows, shape.num_tokens, prompts)

    def origins(self) -> dict[str, str]:
        """Returns the origin of each entry that predictions use; see `cbatch.sim.provenance`."""
        profile, topology = self.profile, self.topology
        links = sorted(self._sends)
        if self._all_reduce and "all_reduce" not in self.estimated:
            links.append(f"all_reduce.{topology.tensor_parallel}")
        links += ["to_host", "from_host"] if self._copies else []
        of_links = {name: profile.origin("links", *name.split(".")) for name in links}
        if "between_nodes" in links and topology.network:
            of_links["between_nodes"] = "assumed: given for the run"
        estimated = dict.fromkeys(self.estimated, f"{FALLBACK}: not measured for {self.spec.name}")
        return {**profile.table_origins(self.spec, topology.tensor_parallel), **of_links, **estimated}

    def provenance(
        self, asynchronous: bool | None = None, *, own_host: bool = False, in_graphs: bool = False
    ) -> dict[str, Any]:
        """Returns the profile, its error, unmeasured parts, and extrapolated iterations; part of every simulated result.

        asynchronous: which loop; None: neither. own_host: whether the run, not the profile, states the host time.
        in_graphs: whether all iterations fitted a captured graph.
        """
        profile, origins = self.profile, self.origins()
        known, otherwise = profile.error_of(self.spec, self.topology, asynchronous, in_graphs), profile.error
        if asynchronous is None:
            del origins["host"]
        elif own_host:
            origins["host"], known, otherwise = "assumed: given for the run", None, NOT_COMPARED
        return {
            "profile": profile.name,
            "card": profile.card.text,
            "hardware": profile.hardware,
            "source": profile.source,
            "error": known.text if known else otherwise,
            "compared": asdict(known) if known else {},
            "gpus": self.topology.num_gpus,
            "times_of": profile.similar_to(self.spec),
            "not_measured": not_measured(origins),
            "iterations_outside_measured_range": self.num_outside,
        }

    def _times(self, shape: BatchShape, tables: _Tables, token_times: TokenTimes, *, paced: bool = False) -> StageTimes:
        """Returns the times of an iteration. paced: whether to compute the pace of decode-only iterations."""
        linear, other, pace, communication, embedding, transfers, _ = token_times
        compute = linear + other + tables.layers * tables.attention.seconds(shape)
        many = tables is self._drafted and shape.num_decodes > self._most_decodes  # products dominate, as with prompts
        if paced and self._decodes and not shape.chunks and not many:
            pace = self._decodes(shape.num_decodes)(compute)
        head = tables.head(self._num_rows(shape))
        return StageTimes(compute, communication, embedding, head, transfers, pace)

    def _tables_of(self, parts: Operations | DecodeOnly, factor: float, *, mixed: bool) -> _Tables:
        times = cache(partial(self._token_times, parts, factor, mixed))
        head, least = parts.head, self.operations.least_head

        @cache
        def head_seconds(number: int) -> float:
            seconds = head.at(number)
            return factor * (seconds if head.covers(number) or not seconds else max(seconds, least.at(number)))

        attention = self.operations.attention
        if isinstance(parts, DraftedOnly) and isinstance(attention, TableAttention):
            attention = replace(attention, decodes=parts.alone)
        return _Tables(factor * self._layers, attention, times, head_seconds)

    def _tables(self, shape: BatchShape) -> _Tables:
        """Returns the tables for a shape. Decodes beyond the decode-only tables resemble as many prompt tokens: products dominate both."""
        if self._drafted and self._among_drafts(shape) and shape.num_decodes <= self._most_rows:
            return self._drafted
        if shape.chunks or shape.num_padding or shape.num_decodes > self._most_decodes:
            return self._mixed
        return self._decode_only

    def _num_rows(self, shape: BatchShape) -> int:
        """Returns the rows of the output head. Captured graphs with prompts compute all rows that drafts could fill."""
        if shape.chunks and self.max_rows > (self.max_batch or 0) and (size := self.graph_tokens(shape)):
            return min(self.max_rows, size - 1)
        if self._drafted and self._among_drafts(shape):
            return self._num_tokens(shape)
        return len(shape.chunks) + shape.num_decodes

    def _num_tokens(self, shape: BatchShape) -> int:
        """Returns the tokens of the products. The tables of iterations with prompts have other captured graphs than drafts have."""
        if self._among_drafts(shape) and (self._drafted or shape.num_decodes > self._most_decodes):
            return self.graph_tokens(shape) or shape.num_tokens
        return shape.num_tokens

    def _among_drafts(self, shape: BatchShape) -> bool:
        """Returns whether an iteration has drafts and no prompts, or is computed by such a graph that was measured."""
        could = self._drafted and self.max_rows > (self.max_batch or 0) and not shape.num_padding
        return not shape.chunks and bool(shape.num_drafts or could)

    def _token_times(self, parts: Operations | DecodeOnly, factor: float, mixed: bool, num_tokens: int) -> TokenTimes:
        layers, embedding = self._layers, self.operations.embedding
        message = num_tokens * self.spec.hidden_size * DTYPE_BYTES[self.spec.dtype]
        exchanges = layers * measured.at(num_tokens) if (measured := self.operations.measured.exchange) else 0.0
        messages = list(self._links)
        if self._all_reduce:
            exchanges = 2 * layers * self._all_reduce.at(message)
            messages.append(self._all_reduce)
        linear, other = (factor * layers * part.at(num_tokens) for part in (parts.linear, parts.other))
        rows = self.operations.measured.captured_rows
        if mixed and self.max_batch and rows and num_tokens <= rows.columns[0][-1]:  # larger iterations have no graph
            over_measured = rows.at(self.max_batch, num_tokens) - rows.at(rows.sizes[-1], num_tokens)
            more = factor * over_measured / self.topology.pipeline_stages
            share = max(more / (linear + other), -1.0)  # measured as part of both parts; split in their ratio
            linear, other = linear * (1 + share), other * (1 + share)
        mixed = mixed or num_tokens > self._most_decodes
        pace = self.power.of_prompts(num_tokens, linear + other) if mixed and self.power else STEADY
        return TokenTimes(
            linear,
            other,
            pace,
            exchanges,
            embedding.at(num_tokens),
            tuple(link.at(message) for link in self._links),
            all(part.covers(num_tokens) for part in (parts.linear, parts.other, embedding))
            and all(part.covers(message) for part in messages),
        )


def following_decodes(shape: BatchShape) -> Iterator[BatchShape]:
    """Yields the shapes of the iterations after an iteration of decodes; each adds one token per request to the KV cache."""
    _, number, context, num_padding, num_shared, _ = shape
    while True:
        context += number
        yield BatchShape((), number, context, num_padding, num_shared)
