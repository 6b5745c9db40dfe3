"""Real tokens on a GPU: CUDA streams, the fused model, captured graphs, and the fastest attention that fits."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import cast

import torch
from transformers import PreTrainedModel

from cbatch.drafts import Drafter, NgramDrafter, draft_model
from cbatch.errors import CapacityError, ConfigError
from cbatch.kv import KVSize
from cbatch.limits import Limits
from cbatch.model import Layers, ModelSpec, Rank, split_layers
from cbatch.model.checkpoint import CHECKPOINT_FAMILIES
from cbatch.model.topology import share_of, split_ranks
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.carry import Drafting
from cbatch.runtime.cpu import caches_of, check_models
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.fast.argmax import argmax
from cbatch.runtime.fast.attention.choice import choose_attention
from cbatch.runtime.fast.fused_model import FusedModel, exchanges_of
from cbatch.runtime.fast.graph_shapes import MeasuredGraphs, default_shapes
from cbatch.runtime.fast.ngram_drafting import NgramDrafting
from cbatch.runtime.fast.quack_gemm import why_not_quack
from cbatch.runtime.gpu.devices import CudaClock, CudaStream, choose_devices, free_memory, make_streams, synchronize
from cbatch.runtime.gpu.memory import TOO_LARGE, check_memory, kv_tokens_that_fit
from cbatch.runtime.gpu.peers import send
from cbatch.runtime.gpu.shards import draw_shard, shard
from cbatch.runtime.host_memory import stage_copies
from cbatch.runtime.iteration import EagerIteration, Send, copy, make_drafting
from cbatch.runtime.model import PagedModel
from cbatch.runtime.options import Options
from cbatch.runtime.slots import Devices, Slot, make_slots
from cbatch.runtime.stage_model import Model
from cbatch.runtime.streams import Streams
from cbatch.runtime.weights import can_fuse, load_model, move_stages


class GpuExecutor(StreamExecutor):
    """A `StreamExecutor` on CUDA streams.

    attention, products: kernels in use for attention and large matrix products, and why faster kernels are not in use.
    iteration: the first stage's iteration; counts replays and reports the cost of the captures.
    """

    def __init__(
        self, streams: Streams, slots: list[Slot], iterations: list[MeasuredGraphs], attention: str, products: str
    ) -> None:
        super().__init__(streams, slots, iterations)
        self.attention, self.products = attention, products
        self.iteration = iterations[0]


def build(spec: ModelSpec, limits: Limits, kv: KVSize, options: Options = Options()) -> GpuExecutor:
    """Returns an executor that computes `spec` on the current GPU; more stages or ranks use the GPUs that follow.

    Raises:
        ConfigError: GPUs are missing or not connected, no attention kernel fits, there are more stages than layers, the ranks do not
            divide the heads, requests may be longer than the model's positions, or the draft model has another vocabulary.
        ModelError: the model cannot be built, loaded or captured.
        CapacityError: weights, KV cache and iterations exceed a GPU's memory.
    """
    check_fits(spec, limits, kv, options)
    devices = choose_devices(limits.num_stages, options.tensor_parallel)
    try:
        stages, *kernels = _load(spec, limits, kv, devices, options)
        draft_models = _load_draft_models(spec, limits, kv, devices, options)
        streams = make_streams(devices)
        slots = make_slots(limits, kv.block_size, devices, streams, spec.hidden_size)
    except torch.cuda.OutOfMemoryError as error:
        need = f"model {spec.name} with a KV cache of {kv.num_tokens} tokens"
        raise CapacityError(f"{need} exceeds the GPU's memory; lower kv_tokens") from error
    synchronize(devices)  # weights, cache and slots were filled on the default streams
    # Passes of a draft model cost their time in each graph, so there are graphs with fewer.
    fewer = range(limits.max_drafts if draft_models else 0)
    shapes = default_shapes(limits, kv.block_size, options.graphs, fewer)
    iterations = [
        MeasuredGraphs(
            EagerIteration(
                models,
                send=_sender(devices),
                drafting=_drafting(options.drafter, models, () if stage else draft_models, limits, spec.vocab_size),
            ),
            [slot.stages[stage] for slot in slots],
            cast(CudaStream, stream).streams,
            [model.cache for model in models],
            shapes,
        )
        for stage, (models, stream) in enumerate(zip(stages, streams.compute, strict=True))
    ]
    synchronize(devices)
    for model in chain(*stages):
        if isinstance(model, FusedModel):
            model.start()
    synchronize(devices)
    executor = GpuExecutor(streams, slots, iterations, *kernels)
    executor.drafter = options.drafter
    executor.times_copies = options.times_copies
    executor.caches = caches_of(stages, draft_models)
    executor.host_copies = stage_copies(
        executor.caches, lambda stage: CudaStream([CudaClock(device) for device in devices[stage]]), len(slots)
    )
    return executor


def check_fits(spec: ModelSpec, limits: Limits, kv: KVSize, options: Options = Options()) -> None:
    """Raises the ConfigError, ModelError or CapacityError that `build` would raise, before weights are loaded."""
    drafter = options.drafter
    check_models(spec, limits, kv, drafter)
    alone = drafter and drafter.max_drafts and not (drafter.model or _by_ngrams(drafter))
    if drafter and alone and type(drafter).propose_each is Drafter.propose_each:
        remedy = "define propose_each with operations of PyTorch, or give backend=cpu"
        raise ConfigError(f"drafter {type(drafter).__name__} proposes for one request at a time, on a CPU; {remedy}")
    check_memory(spec, limits, kv.num_tokens, *_parts(spec, limits, options), draft_model(drafter, spec))


def _drafting(
    drafter: Drafter | None, models: Sequence[Model], draft_models: Sequence[Model], limits: Limits, vocabulary: int
) -> Sequence[Drafting]:
    """Returns `make_drafting`, or for n-grams what does its work in one kernel."""
    if isinstance(drafter, NgramDrafter) and _by_ngrams(drafter):
        return [NgramDrafting(drafter, model.cache.texts, limits) for model in models]
    return make_drafting(drafter, models, draft_models, limits, vocabulary)


def _by_ngrams(drafter: Drafter | None) -> bool:
    """Returns whether the drafts are those of `NgramDrafter`, and no subclass makes others."""
    own = getattr(type(drafter), "propose", None), getattr(type(drafter), "propose_each", None)
    return own == (NgramDrafter.propose, Drafter.propose_each)


def kv_tokens_beside(spec: ModelSpec, limits: Limits, options: Options = Options()) -> int:
    """Returns the tokens of KV cache that fit on the GPUs beside the model. Raises CapacityError if none fits."""
    return kv_tokens_that_fit(spec, limits, *_parts(spec, limits, options), draft_model(options.drafter, spec))


def _parts(spec: ModelSpec, limits: Limits, options: Options) -> tuple[list[Layers], list[int], int]:
    """Returns the layers of each stage, the fewest free bytes among each stage's GPUs, and the number of ranks."""
    layers, num_ranks = split_layers(spec, limits.num_stages, options.layers), options.tensor_parallel
    split_ranks(spec, num_ranks)
    fused = f"{', '.join(CHECKPOINT_FAMILIES)} with SiLU and no biases but of q, k and v, and runtime.compile=false"
    if num_ranks > 1 and not _is_fused(spec, options):
        problem = f"backend.tensor_parallel={num_ranks}: on GPUs only the fused models can be split ({fused})"
        raise ConfigError(f"{problem}; choose one of them, or backend.pipeline_stages={num_ranks}")
    devices = choose_devices(limits.num_stages, num_ranks)
    return layers, [min(map(free_memory, group)) for group in devices], num_ranks


def _is_fused(spec: ModelSpec, options: Options) -> bool:
    return options.fused and not options.compiled and can_fuse(spec)


def _sender(devices: Devices) -> Send:
    return send if len(devices) > 1 else copy


def _load(
    spec: ModelSpec, limits: Limits, kv: KVSize, devices: Devices, options: Options
) -> tuple[list[list[FusedModel | PagedModel]], str, str]:
    """Returns the models by stage and rank, fused if options and family allow it, and the names of attention and products."""
    layers, ranks = split_layers(spec, limits.num_stages, options.layers), split_ranks(spec, options.tensor_parallel)
    shares = [share_of(spec, rank) for rank in ranks]
    chosen = [
        [
            choose_attention(share, kv.block_size, device, options.attention, drafts=limits.max_drafts > 0)
            for share, device in zip(shares, group, strict=True)
        ]
        for group in devices
    ]
    shards = _weights(spec, layers, ranks, devices)
    fused, sizes = _is_fused(spec, options), {"max_rows": limits.max_rows, "max_positions": limits.max_request_tokens}
    no_quack = why_not_quack(spec, devices[0][0]) if fused else "it multiplies in the fused models"
    stages: list[list[FusedModel | PagedModel]] = []
    for part, group, choices in zip(layers, devices, chosen, strict=True):
        exchanges = exchanges_of(spec, limits, part, group) if len(ranks) > 1 else [None]
        stages.append([])
        for weights, share, device, choice, exchange in zip(shards, shares, group, choices, exchanges, strict=True):
            cache, attention = PagedCache(share, kv, device, part), choice.attention
            stages[-1].append(
                FusedModel(weights, share, cache, attention, **sizes, exchange=exchange, quack=not no_quack)
                if fused
                else PagedModel(
                    weights, cache, attention, compiled=options.compiled, send=_sender(devices), greedy=argmax
                )
            )
    return stages, str(chosen[0][0]), f"cuBLAS (no quack: {no_quack})" if no_quack else "quack"


def _load_draft_models(
    spec: ModelSpec, limits: Limits, kv: KVSize, devices: Devices, options: Options
) -> list[FusedModel | PagedModel]:
    """Returns the drafter's model, whole, for each rank of the first stage; empty without one."""
    if (draft := draft_model(options.drafter, spec)) is None:
        return []
    whole, limits = replace(options, tensor_parallel=1, layers=None), replace(limits, num_stages=1)
    return [_load(draft, limits, kv, [[device]], whole)[0][0][0] for device in devices[0]]


def _weights(
    spec: ModelSpec, layers: Sequence[Layers], ranks: Sequence[Rank], devices: Devices
) -> list[PreTrainedModel]:
    lanes = zip(*devices, strict=True)  # each rank's GPU in every stage
    if spec.path is None and spec.weight_bytes > TOO_LARGE:
        return [draw_shard(spec, rank, layers, lane) for rank, lane in zip(ranks, lanes, strict=True)]
    whole = load_model(spec, devices[0][0] if spec.path is None else torch.device("cpu"))
    if len(ranks) > 1:
        return [shard(whole, spec, rank, layers, lane) for rank, lane in zip(ranks, lanes, strict=True)]
    move_stages(whole, layers, next(lanes))
    return [whole]
