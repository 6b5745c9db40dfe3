"""From settings to a run: servers, policies, requests."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cbatch import ConfigError, Engine, Request, Server
from cbatch.arrivals import Arrivals, Listed, Streamed, listed
from cbatch.cluster import Cluster, LiveCluster, PoolRouters, ReplicatedServer, Role, Scaling
from cbatch.facts import Facts, facts_of
from cbatch.model.checkpoint import Vocabulary
from cbatch.results.gathered import Gathered
from cbatch.results.service import NO_CLIENT
from cbatch.results.stages import account_stages
from cbatch.results.utilisation import work_of
from cbatch.sim.drafter import CONTEXT, SurvivalsDrafter
from cbatch.sim.provenance import NOT_COMPARED
from cbatch.validation import nearest
from experiments.settings.error_lines import one_line
from experiments.settings.settings import Settings
from experiments.setup.moves import moves_of
from experiments.setup.pools import Setup, pools_of, set_up
from experiments.store.run_folder import Decode
from experiments.text import ends_text
from experiments.workloads import Workload
from experiments.workloads.drawn import Drawn

LARGE = 1e9  # loading at least this many bytes of weights is announced


@dataclass(eq=False)
class Run:
    """Everything that one run needs.

    setups: one per pool; a single one without pools.
    engine: serves `arrivals`; one engine of `server`, or a cluster.
    facts: about all requests. load: share and rate in requests per second, of a workload with a load.
    chosen: what each `auto` was resolved to, and why, by key; printed and stored with the results.
    decode: converts token ids to text, if the checkpoint has a tokenizer that can be loaded.
    gathered: the data of the summary; empty before the run.
    energy: reads the GPUs' energy during the run, an `EnergyMeter`; None where no GPU serves.
    end: set by a server, and stored with the results: `cut` and `refused`, the numbers of requests that it cut and that it refused beyond `max_open`; `error` and `traceback`, if one ended it.
    """

    settings: Settings
    setups: Sequence[Setup]
    server: Server | ReplicatedServer
    engine: Engine | Cluster
    facts: Facts
    decode: Decode | None
    chosen: dict[str, str]
    load: Mapping[str, float] | None = None
    gathered: Gathered = field(default_factory=Gathered)
    energy: Any = None
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Setup:
        """The setup of the first pool; of the run, without pools."""
        return self.setups[0]

    @property
    def prices(self) -> list[float] | None:
        """The dollars per hour of each replica; None unless every pool has a price."""
        prices = [price for setup in self.setups for price in setup.prices]
        known = [price for price in prices if price is not None]
        return known if len(known) == len(prices) else None

    @property
    def about(self) -> dict[str, Any]:
        """Returns what the replicas are, and how they have computed."""
        of_pools = {setup.name: setup.about for setup in self.setups}
        limits = [of_pool["limits"] for of_pool in of_pools.values()]
        return {
            "hardware": "; ".join(dict.fromkeys(pool["hardware"] for pool in of_pools.values())),
            "execution": self._execution(),
            "limits": {key: most for key, most in limits[0].items() if all(other[key] == most for other in limits)},
            **({"pools": of_pools, "policy": _policy_text(of_pools)} if len(of_pools) > 1 else {}),
            "utilisation": self._utilisation(),
            **({"energy": energy} if (energy := self._energy()) else {}),
        }

    def meter(self) -> AbstractContextManager[Any]:
        """Returns the context in which the energy of the GPUs is read."""
        executors = [engine.executor for engine in self.engine.engines]
        return self.settings.backend.meter(executors, self.engine.now)

    def _execution(self) -> dict[str, Any]:
        backend, record, costs = self.settings.backend, self.engine.record, [setup.cost for setup in self.setups]
        executors = [engine.executor for engine in self.engine.engines]
        execution = backend.facts(executors, costs[0], self.settings.runtime.asynchronous)
        if len(costs) > 1:
            execution.pop("topology", None)  # `about.pools` has those of each pool
        if len(costs) > 1 and backend.simulated:
            execution["gpus"] = sum(setup.settings.backend.num_devices for setup in self.setups)
            execution["profile"] = ", ".join(dict.fromkeys(cost.profile.name for cost in costs))
            stated = [cost.provenance(self.settings.runtime.asynchronous)["error"] for cost in costs]
            if len({*stated}) > 1 or "," in execution["profile"]:  # no error is established for unlike replicas
                execution |= {"error": f"{NOT_COMPARED} of unlike pools", "compared": {}}
            execution["iterations_outside_measured_range"] = self.num_outside_and_eager[0]
        if not backend.simulated:
            execution["predictions"]["asked"] = any(cost.asked for cost in costs)
        if record.stages:  # of a real pipeline; a simulated one keeps its own account
            execution["stages"] = [asdict(account) for account in account_stages(record)]
        return execution

    def _utilisation(self) -> dict[str, Any]:
        """Returns the arguments of `machines_of`, or why the peak is unknown."""
        peaks = {setup.name: setup.peak for setup in self.setups}
        if unknown := [f"{name}: {peak}".removeprefix(": ") for name, peak in peaks.items() if isinstance(peak, str)]:
            return {"unknown": "; ".join(unknown)}
        rates = [peaks[setup.name] for setup in self.setups for _ in range(setup.settings.backend.replicas)]
        profiles = [setup.cost.profile for setup in self.setups]
        origins = dict.fromkeys(profile.origin("peak" if profile.peak else "ceilings") for profile in profiles)
        drafter, model, stated = self.settings.drafter, self.settings.model, dict[str, Any]()
        stated |= {"work": work_of(model)._asdict(), "peaks": rates, "from": "; ".join(origins)}
        if isinstance(drafter, SurvivalsDrafter) and (drafter.layers or drafter.model):
            of_passes = work_of(drafter.model or replace(model, num_layers=drafter.layers))._asdict()
            how = {"parallel": drafter.parallel, "context": CONTEXT, "whole": bool(drafter.model)}
            if drafter.model:  # whole on each GPU of the first stage
                how["copies"] = self.settings.backend.tensor_parallel
            stated["drafting"] = {"work": of_passes, **how}
        watts = [power for setup in self.setups for power in setup.watts]
        if not all(watts):
            return stated
        sources = dict.fromkeys(profile.origin("watts") for profile in profiles)
        return stated | {"watts": watts, "watts_from": "; ".join(sources)}

    def _energy(self) -> dict[str, Any]:
        """Returns where the energy is from, or why it is unknown; empty without a meter."""
        if self.energy is None:
            return {}
        if self.energy.problem:
            return {"unknown": self.energy.problem}
        return {"from": "NVML's energy counters", "readings": len(self.energy.readings)}

    @property
    def num_outside_and_eager(self) -> tuple[int, int]:
        """Simulated iterations outside the measured range of their profile, and with prompts that fit no captured graph."""
        costs = [setup.cost for setup in self.setups]
        return sum(cost.num_outside for cost in costs), sum(cost.num_eager for cost in costs)

    @property
    def requests(self) -> Sequence[Request]:
        """All requests; empty if they are made as they arrive, or as others end."""
        arrivals = self.engine.arrivals
        return () if arrivals.follow_ends else arrivals.known

    @property
    def num_requests(self) -> int:
        """Requests of the run, as far as they are known."""
        return max(self.facts.number or 0, len(self.engine.record.requests))


def assemble(
    settings: Settings, log: Callable[[str], None] = lambda line: None, *, largest: Request | None = None
) -> Run:
    """Builds a run; no weights are loaded before everything else is checked. A load must be resolved (`trials.load`).

    log: called with a line before weights are loaded, if that takes long.
    largest: a request as large as any to come, if clients send the requests; None: the workload makes them.
    Raises CbatchError: a setting, workload, policy, model or profile that cannot be used; the message says which and why.
    """
    chosen, backend, spec = dict(settings.chosen), settings.backend, settings.model
    if settings.bounds and not backend.simulated:
        problem = f"bounds=true: lower bounds hold for simulated times, not for backend={backend.name}"
        raise ConfigError(f"{problem}; give backend=sim")
    backend.check_here()
    pools = pools_of(settings)
    vocabulary = backend.vocabulary(spec)
    arrivals: Arrivals = Listed() if largest else _arrivals(settings, vocabulary)
    facts = facts_of([largest]) if largest else arrivals.facts
    if not largest:
        _check_metrics(settings, facts)
    if settings.stream:
        _check_stream(settings, arrivals)
    setups = [set_up(name, of_pool, facts, chosen) for name, of_pool in pools.items()]
    if len(setups) > 1:
        backend.check_number(sum(setup.settings.backend.num_devices for setup in setups))
    if not backend.simulated:
        from transformers.utils import logging  # loaded only where needed

        logging.disable_progress_bar()
        if spec.weight_bytes >= LARGE:
            kind = "random weights" if spec.path is None else f"weights from {spec.path}"
            where = backend.hardware(setups[0].cost.profile)
            log(f"loading {spec.name} on {where}: {spec.weight_bytes / 1e9:.1f} GB of {kind}")
    server = _server(settings, setups, live=largest is not None or not backend.simulated)
    try:
        policies = [setup.policy for setup in setups for _ in range(setup.settings.backend.replicas)]
        if isinstance(server, ReplicatedServer):
            engine: Engine | Cluster = server.engine(policies, arrivals)
        else:
            engine = server.engine(policies[0], arrivals)
        if vocabulary is not None:
            ends = ends_text(vocabulary)  # one for all engines, as requests may move between them
            for part in engine.engines:
                part.state.ends_text = ends
        decode = _decoder(settings, vocabulary, chosen)
    except BaseException:
        server.close()
        raise
    return Run(settings, setups, server, engine, facts, decode, chosen)


def _check_stream(settings: Settings, arrivals: Arrivals) -> None:
    """Raises ConfigError if the run cannot be kept in pieces."""
    obstacles = {
        f"real tokens of backend={settings.backend.name} are kept to the end": not settings.backend.simulated,
        "requests arrive by iteration": bool(arrivals.iterations),
        "requests follow the ends of others": arrivals.follow_ends,
        "bounds=true needs all requests before the run": settings.bounds,
        "backend.transfers.layerwise reads earlier iterations": settings.backend.transfers.layerwise,
    }
    for why in (why for why, met in obstacles.items() if met):
        raise ConfigError(f"stream=on: not possible, as {why}; give stream=off")


def _policy_text(pools: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the policy's text, with the arguments of each pool if they differ: sarathi(large: chunk=256; small: chunk=512)."""
    texts = {name: str(pool["policy"]).partition("(")[::2] for name, pool in pools.items()}
    if len({*texts.values()}) == 1:
        return str(next(iter(pools.values()))["policy"])
    of_each = [f"{name}: {arguments.removesuffix(')')}" for name, (_, arguments) in texts.items()]
    return f"{next(iter(texts.values()))[0]}({'; '.join(of_each)})"


def _arrivals(settings: Settings, vocabulary: Vocabulary | None) -> Arrivals:
    """Returns the requests of the workload, made as they arrive with stream=on."""
    workload: Any = settings.workload
    if isinstance(workload, Workload) and (workload.answers_back or not settings.stream):
        return workload.source(vocabulary)
    requests = workload.requests(vocabulary)
    if not settings.stream or getattr(requests, "iterations", None):  # which a stream cannot count
        return listed(requests)
    in_order = partial(sorted, requests, key=lambda request: (request.arrival_time, request.id))
    return Streamed(requests.stream if isinstance(requests, Drawn) else in_order)


def _server(settings: Settings, setups: Sequence[Setup], live: bool) -> Server | ReplicatedServer:
    """Builds the servers of all pools. live: whether time is real."""
    servers, pools, first_gpu, backend = list[Server](), list[str](), 0, settings.backend
    for setup in setups:
        built = setup.servers(first_gpu)
        servers, pools = servers + built, pools + [setup.name] * len(built)
        first_gpu += len(built) * setup.settings.backend.gpus_per_replica
    roles = [Role(setup.settings.backend.role) for setup in setups for _ in range(setup.settings.backend.replicas)]
    moves = moves_of(settings, setups, roles)
    if live and backend.simulated and moves is not None:
        raise ConfigError("backend.pools: requests do not move between a server's simulated replicas; give role=both")
    scaler = settings.autoscale
    if scaler is None and backend.scaling != type(backend.scaling)():
        raise ConfigError("backend.scaling: has no effect without an autoscaler; give autoscale=NAME")
    if len(servers) == 1:
        return servers[0]
    cluster = LiveCluster if live else Cluster
    scaling = None if scaler is None else Scaling(scaler, **vars(backend.scaling))
    prices = [price for setup in setups for price in setup.prices]
    options = backend.staleness, cluster, scaling, prices, roles, moves
    router = PoolRouters(backend.router, backend.routers) if backend.routers else backend.router
    return ReplicatedServer(servers, router, pools, *options)


def _decoder(settings: Settings, vocabulary: Vocabulary | None, chosen: dict[str, str]) -> Decode | None:
    """Returns a function from token ids to text; None without a tokenizer. `chosen` notes a tokenizer that cannot be loaded."""
    spec = settings.model
    if vocabulary is None or spec.path is None or not (Path(spec.path) / "tokenizer_config.json").is_file():
        return None
    try:
        vocabulary.decode([spec.vocab_size - 1])  # loads the tokenizer
    except Exception as error:
        chosen["text"] = f"none, outputs are token ids ({one_line(error) or repr(error)})"
        return None
    return vocabulary.decode


def _check_metrics(settings: Settings, facts: Facts) -> None:
    clients = {client or NO_CLIENT for client in facts.clients}
    for name in settings.metrics.client_weights or ():
        if name not in clients:
            raise ConfigError(f"metrics.client_weights.{name}: no request has this client; {nearest(name, clients)}")
    warmup, drain = settings.metrics.warmup_requests, settings.metrics.drain_requests
    if facts.number is not None and warmup + drain >= facts.number:
        given = f"metrics.warmup_requests={warmup} and metrics.drain_requests={drain}"
        raise ConfigError(f"{given} leave none of {facts.number} requests; lower them")


def with_workload(settings: Settings, workload: Any) -> Settings:
    """Returns the settings with another workload, for a run that keeps only its record."""
    return replace(settings, workload=workload, timeline=False, decisions=False, stream=False)
