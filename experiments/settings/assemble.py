"""From settings to a server, a policy and requests. All automatic choices are made, and noted, here."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cbatch import ConfigError, Engine, KVSize, Limits, ModelSpec, Request, Server
from cbatch.bounds import Bounds, Minorant, findable_tokens, minorants_of
from cbatch.cluster import Cluster, LiveCluster, ReplicatedServer
from cbatch.model.checkpoint import Vocabulary
from cbatch.policy import check_policy
from cbatch.results.service import NO_CLIENT
from cbatch.results.streamed import StreamedRun
from cbatch.runtime.options import Options
from cbatch.sim import Profile, ProfileCost
from cbatch.validation import nearest
from experiments.settings.backend import Backend
from experiments.settings.error_lines import one_line
from experiments.settings.recipe import Recipe
from experiments.settings.settings import Composed, Settings
from experiments.store.run_folder import Decode
from experiments.text import ends_text
from experiments.trials.replications import Replication, Together, num_recorded
from experiments.workloads import TraceReplay, Workload
from experiments.workloads.drawn import Drawn, Totals, totals_of

LARGE = 1e9
"""Loading at least this many bytes of weights is announced."""

LARGEST_ITERATION = 32768
"""Tokens that `max_tokens=auto` does not exceed for a whole batch of prompts."""


BoundsOf = Callable[[Sequence[Request]], Bounds]
"""Returns the lower bounds of requests."""


@dataclass(eq=False)
class Run:
    """Everything that one run needs.

    engine: has the requests submitted, unless the run streams; one engine of `server`, or one per replica.
    chosen: what each `auto` was resolved to, and why, by key; printed and stored with the results.
    rate: requests per second of a workload with a load. totals: facts about all requests.
    decode: converts token ids to text, if the checkpoint has a tokenizer that can be loaded.
    streamed: the data of the summary, gathered during a run that streams; None before its start.
    end: of a server: the number of requests that it cut, `cut`, and the `error` and `traceback` that ended it; stored with the results.
    """

    settings: Settings
    cost: ProfileCost
    limits: Limits
    kv: KVSize
    server: Server | ReplicatedServer
    engine: Engine | Cluster
    requests: Sequence[Request]
    rate: float | None
    totals: Totals
    decode: Decode | None
    chosen: dict[str, str] = field(default_factory=dict)
    streamed: StreamedRun | None = None
    end: dict[str, Any] = field(default_factory=dict)


def assemble(
    settings: Settings, say: Callable[[str], None] = lambda line: None, *, largest: Request | None = None
) -> Run:
    """Builds a run; no weights are loaded before everything else is checked.

    say: called with a line before weights are loaded, if that takes long.
    largest: a request as large as any to come, if clients send the requests; None: the workload makes them.
    Raises CbatchError: a setting, workload, policy, model or profile that cannot be used; the message says which and why.
    """
    chosen = dict(settings.chosen)
    backend, runtime, spec = settings.backend, settings.runtime, settings.model
    if settings.bounds and not backend.simulated:
        problem = f"bounds=true: lower bounds hold for simulated times, not for backend={backend.name}"
        raise ConfigError(f"{problem}; give backend=sim")
    if settings.decisions and backend.replicas > 1:
        raise ConfigError("decisions=true records the decisions of one replica; set backend.replicas=1")
    backend.check_here()
    options = Options(compiled=runtime.compile, graphs=runtime.graphs, times_copies=settings.timeline)
    cost = backend.cost(settings.hardware, spec, settings.batch)
    profile = cost.profile
    here, there = backend.hardware(profile), profile.hardware
    if here not in (there, there.partition(",")[0]):
        chosen["view.cost"] = f"{profile.name} (predictions are for {there}, this is {here})"
    policy = settings.policy()
    vocabulary = backend.vocabulary(spec)
    rate, requests = None, list[Request]()
    if largest is None:
        workload, rate = _at_load(settings, chosen)
        requests = workload.requests(vocabulary)
        totals = totals_of(requests.stream() if settings.stream and isinstance(requests, Drawn) else requests)
        _check_metrics(settings, totals, len(requests))
    else:
        totals = totals_of([largest])
    if settings.stream:
        obstacles = {
            f"real tokens of backend={backend.name} are kept to the end": not backend.simulated,
            "several replicas are not served in turn": backend.replicas > 1,
            "requests arrive by iteration": totals.by_iteration,
        }
        for why in (why for why, met in obstacles.items() if met):
            raise ConfigError(f"stream=on: not possible, as {why}; give stream=off")
    limits = _limits(settings, totals, spec, backend.tile(profile), backend.pipeline_stages, chosen)
    check_policy(policy, limits)
    kv = _kv_size(settings, backend, spec, profile, limits, chosen)
    if not backend.simulated:
        backend.check_fits(spec, limits, kv)
        from transformers.utils import logging  # loaded only where needed

        logging.disable_progress_bar()
        if spec.weight_bytes >= LARGE:
            kind = "random weights" if spec.path is None else f"weights from {spec.path}"
            say(f"loading {spec.name} on {backend.hardware(profile)}: {spec.weight_bytes / 1e9:.1f} GB of {kind}")
    servers: list[Server] = []
    for replica in range(backend.replicas):
        with backend.place(replica):
            executor = backend.executor(spec, cost, limits, kv, options, runtime.asynchronous)
            loop = runtime.asynchronous, settings.patience, settings.eviction
            servers.append(Server(executor, limits, cost, kv, *loop))
    server: Server | ReplicatedServer = servers[0]
    if len(servers) > 1:
        server = ReplicatedServer(servers, backend.router, cluster=Cluster if backend.simulated else LiveCluster)
    try:
        engine = server.engine(policy, () if settings.stream else requests)
        if settings.stream:
            for request in (totals.longest, totals.longest_prompt):
                engine.engines[0].check_fits(request)
        if vocabulary is not None:
            for part in engine.engines:
                part.state.ends_text = ends_text(vocabulary)
        decode = _decoder(settings, vocabulary, chosen)
    except BaseException:
        server.close()
        raise
    return Run(settings, cost, limits, kv, server, engine, requests, rate, totals, decode, chosen)


def _decoder(settings: Settings, vocabulary: Vocabulary | None, chosen: dict[str, str]) -> Decode | None:
    """Returns a function from token ids to text; None without a tokenizer, and noted where that cannot be loaded."""
    spec = settings.model
    if vocabulary is None or spec.path is None or not (Path(spec.path) / "tokenizer_config.json").is_file():
        return None
    try:
        vocabulary.decode([spec.vocab_size - 1])  # loads the tokenizer
    except Exception as error:
        chosen["text"] = f"none, outputs are token ids ({one_line(error) or repr(error)})"
        return None
    return vocabulary.decode


def _check_metrics(settings: Settings, totals: Totals, num_requests: int) -> None:
    clients = {client or NO_CLIENT for client in totals.clients}
    for name in settings.metrics.client_weights or ():
        if name not in clients:
            raise ConfigError(f"metrics.client_weights.{name}: no request has this client; {nearest(name, clients)}")
    warmup, drain = settings.metrics.warmup_requests, settings.metrics.drain_requests
    if warmup + drain >= num_requests:
        given = f"metrics.warmup_requests={warmup} and metrics.drain_requests={drain}"
        raise ConfigError(f"{given} leave none of {num_requests} requests; lower them")


def _limits(
    settings: Settings, totals: Totals, spec: ModelSpec, tile: int, num_stages: int, chosen: dict[str, str]
) -> Limits:
    """Returns the limits of an iteration. Automatic: a whole batch of the longest prompts, and any one request, fit."""
    longest = min(totals.longest.max_tokens, spec.max_positions)
    batch, max_tokens = settings.batch, settings.max_tokens
    if max_tokens is None:
        prompts = batch * totals.longest_prompt.num_prompt_tokens
        max_tokens = max(8192, longest, min(prompts, LARGEST_ITERATION))
        chosen["max_tokens"] = str(max_tokens)
    if max_tokens < batch:
        raise ConfigError(
            f"max_tokens={max_tokens} is below batch={batch}, a token per decode; raise it or lower batch"
        )
    if settings.chunk is not None and settings.chunk > max_tokens:
        raise ConfigError(f"chunk={settings.chunk} exceeds max_tokens={max_tokens}; lower chunk or raise max_tokens")
    if settings.max_running is not None and settings.max_running < batch:
        raise ConfigError(f"max_running={settings.max_running} is below batch={batch}; raise it or lower batch")
    return Limits(batch, max_tokens, longest, tile=tile, num_stages=num_stages, max_running=settings.max_running or 0)


def _kv_size(
    settings: Settings, backend: Backend, spec: ModelSpec, profile: Profile, limits: Limits, chosen: dict[str, str]
) -> KVSize:
    block_size, kv_tokens = settings.block_size, settings.kv_tokens
    if block_size is None:
        block_size = backend.block_size
        chosen["block_size"] = str(block_size)
    if kv_tokens is None:
        kv_tokens, why = backend.kv_tokens(spec, profile, limits, block_size)
        chosen["kv_tokens"] = f"{kv_tokens} ({why})"
    elif kv_tokens % block_size:
        chosen["kv_tokens"] = f"{kv_tokens // block_size * block_size} (whole blocks of {block_size})"
    if kv_tokens < block_size:
        remedy = "raise kv_tokens" if settings.kv_tokens else "choose a smaller model, or lower block_size"
        raise ConfigError(f"kv_tokens={kv_tokens} is less than one block of block_size={block_size}; {remedy}")
    return KVSize(kv_tokens // block_size, block_size)


def bounds_of(run: Run) -> BoundsOf:
    """Returns a function that computes the lower bounds of some of a run's requests. Raises ConfigError where they are not valid."""
    cost, replicas = run.cost, run.cost.topology.replicas
    machine = pickle.dumps((cost.profile, cost.spec, cost.topology, cost.max_batch))
    lines = _minorants(machine, run.limits)
    found = findable_tokens(run.requests, run.kv.block_size) if run.settings.prefix_cache else None

    def bounds(requests: Sequence[Request]) -> Bounds:
        return Bounds(requests, lines, run.limits, run.kv.num_tokens, replicas, found)

    bounds(run.requests)  # raises before anything is served
    return bounds


@lru_cache(maxsize=8)
def _minorants(machine: bytes, limits: Limits) -> list[Minorant]:
    """Fits the minorants of a cost model, pickled as its arguments. It takes a second, and the runs of a sweep share machines."""
    return minorants_of(ProfileCost(*pickle.loads(machine)), limits)


def bounds_together(settings: Settings, replications: int, num_requests: int) -> Bounds:
    """Returns the lower bounds of the requests of several replications. Raises as `bounds_of`."""
    run = assemble(with_workload(settings, Together(settings.workload, replications, num_requests)))
    return bounds_of(run)(run.requests)


def with_workload(settings: Settings, workload: Any) -> Settings:
    """Returns the settings of a run that serves a workload and keeps only its record."""
    return replace(settings, workload=workload, timeline=False, decisions=False, stream=False)


def _at_load(settings: Settings, chosen: dict[str, str]) -> tuple[Any, float | None]:
    """Returns the replication that `workload.load` and `workload.seed` describe, and its rate; without a load, the workload.

    The rate is the load times the highest rate that any policy can sustain on the replications 0 to `workload.replications` - 1
    together: all policies, seeds and objectives have the same rate.
    Raises ConfigError: the backend is not simulated, the workload has no rate, or too few requests for its replications.
    """
    load = getattr(settings.workload, "load", None)
    if load is None:
        return settings.workload, None
    if not settings.backend.simulated:
        problem = f"workload.load={load}: is a share of a simulated rate, unknown for backend={settings.backend.name}"
        raise ConfigError(f"{problem}; give backend=sim, or a rate")
    workload, number, num_requests = _replication_of(settings.workload)
    # equal for all policies and objectives
    others: dict[str, Any] = {"composed": Composed({}), "chosen": {}, "sweep": "", "output": None}
    others |= {
        "policy": Recipe({"_target_": "policies.orca.Orca"}),
        "workload": replace(workload, slo=None, tiers=None),
    }
    highest = _highest_rate(pickle.dumps(replace(settings, **others)), settings.workload.replications, num_requests)
    chosen["rate"] = f"{load * highest:.4g} (load {load:g} of at most {highest:.4g} requests/s)"
    return Replication(workload, number, load * highest, num_requests), load * highest


def _replication_of(workload: Workload) -> tuple[Workload, int, int]:
    """Returns a workload without a load, which of its replications the settings describe, and their number of requests."""
    plain, pieces = replace(workload, load=None, replications=1), workload.replications
    if not isinstance(plain, TraceReplay):
        if plain.num_requests is None:
            raise ConfigError(f"workload.load={workload.load}: needs a number of requests; give workload.num_requests=")
        return replace(plain, seed=0), workload.seed, plain.num_requests
    whole = replace(plain, num_requests=None)
    recorded = num_recorded(whole) or 0
    if not recorded // pieces:
        raise ConfigError(f"workload.replications={pieces}: the trace has {recorded} requests; give fewer replications")
    num_requests = min(plain.num_requests or recorded, recorded // pieces)
    if pieces == 1:
        return whole, 0, num_requests
    if workload.seed >= pieces:
        problem = f"workload.seed={workload.seed}: selects one of workload.replications={pieces} pieces of the trace"
        raise ConfigError(f"{problem}; give at most {pieces - 1}")
    return replace(whole, seed=0), workload.seed, num_requests


@lru_cache(maxsize=16)
def _highest_rate(pickled: bytes, replications: int, num_requests: int) -> float:
    """pickled: settings, which cannot be hashed."""
    return bounds_together(pickle.loads(pickled), replications, num_requests).rate
