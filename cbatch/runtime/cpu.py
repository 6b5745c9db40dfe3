"""Real tokens on a CPU: worker threads for streams, plain PyTorch for attention."""

import os
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from cbatch.drafts import Drafter, draft_model
from cbatch.errors import CapacityError, ConfigError
from cbatch.kv import KVSize
from cbatch.limits import Limits
from cbatch.model import Layers, ModelSpec, Rank, split_layers
from cbatch.model.topology import share_of, split_ranks
from cbatch.runtime.attention import Attention, PagedCache, ReferenceAttention
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.gpu.ranks import Meetings
from cbatch.runtime.gpu.shards import ShardedModel, shard
from cbatch.runtime.host_memory import check_host_memory, machine_memory, stage_copies
from cbatch.runtime.iteration import EagerIteration, make_drafting
from cbatch.runtime.model import PagedModel
from cbatch.runtime.options import Options
from cbatch.runtime.slots import make_slots
from cbatch.runtime.stage_model import Model
from cbatch.runtime.streams import Streams, ThreadStream, stream_names
from cbatch.runtime.weights import load_model

CPU = torch.device("cpu")


def build(spec: ModelSpec, limits: Limits, kv: KVSize, options: Options = Options()) -> StreamExecutor:
    """Returns an executor that computes `spec` on this machine's CPU: one thread per stage, which runs the stage's ranks in turn.

    Option `compiled` requires a C++ compiler.

    Raises:
        ModelError: the model cannot be built or loaded.
        ConfigError: stages or ranks do not divide the model, requests may be longer than the model's positions, or the draft model has
            another vocabulary.
        CapacityError: weights and KV cache exceed the machine's memory.
    """
    check_fits(spec, limits, kv, drafter=options.drafter)
    layers = split_layers(spec, limits.num_stages, options.layers)
    ranks = split_ranks(spec, options.tensor_parallel)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(min(torch.get_num_threads(), max(cores - 1, 1)))  # one core is left to the host for planning
    models = make_models(load_model(spec, CPU), spec, kv, layers, ranks, ReferenceAttention(), options)
    return assemble(models, limits, options, make_draft_models(options, spec, kv))


def make_draft_models(options: Options, spec: ModelSpec, kv: KVSize) -> list[PagedModel]:
    """Returns the drafter's model for each rank of the first stage, each with its own KV cache; empty without one."""
    if (draft := draft_model(options.drafter, spec)) is None:
        return []
    weights, attention = load_model(draft, CPU), ReferenceAttention()
    caches = [PagedCache(draft, kv, CPU) for _ in range(options.tensor_parallel)]
    return [PagedModel(weights, cache, attention, compiled=options.compiled) for cache in caches]


def make_models(
    weights: PreTrainedModel,
    spec: ModelSpec,
    kv: KVSize,
    layers: Sequence[Layers],
    ranks: Sequence[Rank],
    attention: Attention,
    options: Options = Options(),
) -> list[list[PagedModel]]:
    """Returns the models by stage and rank, each with its part of the KV cache."""
    if len(ranks) == 1:
        caches = [PagedCache(spec, kv, CPU, part) for part in layers]
        return [[PagedModel(weights, cache, attention, compiled=options.compiled)] for cache in caches]
    shards = [shard(weights, spec, rank, layers, [CPU] * len(layers)) for rank in ranks]
    stages: list[list[PagedModel]] = []
    for part in layers:
        meetings = Meetings(len(ranks))
        stages.append(
            [
                ShardedModel(model, cache, attention, rank, meetings, compiled=options.compiled)
                for rank, model in zip(ranks, shards, strict=True)
                for cache in [PagedCache(share_of(spec, rank), kv, CPU, part)]
            ]
        )
    return stages


def assemble(
    stages: Sequence[Sequence[PagedModel]],
    limits: Limits,
    options: Options = Options(),
    draft_models: Sequence[PagedModel] = (),
) -> StreamExecutor:
    """Returns a CPU executor for these models. stages: one model per rank, for each stage. draft_models: see `make_draft_models`."""
    streams = Streams.of([ThreadStream(name) for name in stream_names(len(stages))])
    first = stages[0][0]
    devices = [[CPU] * len(models) for models in stages]
    slots = make_slots(limits, first.cache.size.block_size, devices, streams, first.hidden_size)
    iterations = [
        EagerIteration(
            models,
            drafting=make_drafting(options.drafter, models, () if stage else draft_models, limits, first.vocab_size),
        )
        for stage, models in enumerate(stages)
    ]
    executor = StreamExecutor(streams, slots, iterations, options.drafter)
    executor.times_copies = options.times_copies
    executor.caches = caches_of(stages, draft_models)
    executor.host_copies = stage_copies(executor.caches, lambda stage: ThreadStream(f"blocks {stage}"), len(slots))
    return executor


def caches_of(stages: Sequence[Sequence[Model]], draft_models: Sequence[Model]) -> list[list[PagedCache]]:
    """Returns the KV caches of each stage's ranks; in the first stage those of the draft models follow."""
    first, *others = ([model.cache for model in models] for models in stages)
    return [first + [model.cache for model in draft_models], *others]


def check_fits(
    spec: ModelSpec, limits: Limits, kv: KVSize, num_replicas: int = 1, drafter: Drafter | None = None
) -> None:
    """Raises the ConfigError or CapacityError that `num_replicas` calls of `build` would raise, before weights are loaded."""
    specs = check_models(spec, limits, kv, drafter, num_replicas)
    weights = num_replicas * sum(each.weight_bytes for each in specs)
    cache = num_replicas * kv.num_tokens * sum(each.kv_bytes_per_token for each in specs)
    if weights + cache > (memory := machine_memory()):
        several = num_replicas > 1
        whose = f"{num_replicas} replicas of model {spec.name} need" if several else f"model {spec.name} needs"
        fewer = "lower backend.replicas, " if several else ""
        raise CapacityError(
            f"{whose} {weights / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB for the KV cache, this machine has "
            f"{memory / 1e9:.1f} GB; {fewer}choose a smaller model (model=tiny) or lower kv_tokens"
        )


def check_models(
    spec: ModelSpec, limits: Limits, kv: KVSize, drafter: Drafter | None, num_replicas: int = 1
) -> list[ModelSpec]:
    """Returns the shapes of the model and of any draft model. Raises the errors of `check_fits`, but for the device's memory."""
    draft = draft_model(drafter, spec)
    specs = [spec, *([] if draft is None else [draft])]
    for each in specs:
        if limits.max_request_tokens > each.max_positions:
            raise ConfigError(
                f"max_request_tokens={limits.max_request_tokens} exceeds the {each.max_positions} positions of model "
                f"{each.name}, or its sliding window; lower it or choose another model"
            )
    check_host_memory(specs, kv, num_replicas)
    return specs
