"""The settings of a run as typed values, made once from the keys that Hydra composed; conf/config.yaml explains the keys.

Each error names the key, the value and what to give instead.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, WrapValidator

from cbatch import ConfigError, Eviction, ModelSpec
from cbatch.cluster import Autoscaler
from cbatch.drafts import Drafter, NoDrafter
from cbatch.errors import ProfileError
from cbatch.model.checkpoint import spec_from_checkpoint
from cbatch.request_spec import SLO
from cbatch.stall import Patience
from cbatch.validation import Give, Switch, check_known, not_negative, positive, read, whole
from experiments.progress import Setting
from experiments.settings.backend import Backend
from experiments.settings.backends import Auto, Cuda
from experiments.settings.batch import batch_of, is_auto, with_batch
from experiments.settings.construct import check_eviction, check_evicts, construct
from experiments.settings.drafters import make_drafter
from experiments.settings.hardware import profile_of_gpu
from experiments.settings.identity import columns_of
from experiments.settings.recipe import Recipe, recipe_of
from experiments.settings.runtime import Runtime
from experiments.workloads import ClosedLoop, Workload

GROUPS = (
    *("policy", "chunking", "predictor", "workload", "model"),
    *("runtime", "drafter", "drafting", "eviction", "backend", "autoscale", "experiment"),
)
"""Keys whose value is the name of a file in a folder of conf/."""

_SECTIONS = ("policy", "workload", "model", "runtime", "backend")  # the groups that every run needs

NO_DRAFTER = {"_target_": "cbatch.drafts.NoDrafter"}

MOST_REQUESTS_AT_ONCE = 1_000_000  # far above what any device holds; the engine's tables have a row per request
MOST_TOKENS = 2**31 - 1  # limit of a chunk, an iteration and the KV cache, whose blocks are numbered in 32 bits

_OR_AUTO = WrapValidator(lambda value, accept: None if value == "auto" else accept(value))

_TOKENS = f"a whole number of tokens from 1 to {MOST_TOKENS}, or auto"
Tokens = Annotated[int | None, whole(1, MOST_TOKENS), _OR_AUTO, Give(_TOKENS)]  # None means auto

_REQUESTS = f"a whole number from 1 to {MOST_REQUESTS_AT_ONCE}, or auto"
Requests = Annotated[int | None, whole(1, MOST_REQUESTS_AT_ONCE), _OR_AUTO, Give(_REQUESTS)]  # None means auto

_SWITCHED = BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value)
OnOffAuto = Annotated[Setting, _SWITCHED, Give("on, off or auto")]
Text = Annotated[str, BeforeValidator(str)]
Count = Annotated[int, whole(0)]
Weight = Annotated[float, positive("clients without a weight have 1")]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Which requests count, the objectives, and weights of clients: see `cbatch.results.summary.summarize`."""

    warmup_requests: Count
    drain_requests: Count
    objectives: SLO
    client_weights: dict[str, Weight] | None = None


@dataclass(frozen=True, kw_only=True)
class KV:
    """Memory in addition to the KV cache. host_tokens: tokens of evicted blocks that host memory keeps for the prefix cache."""

    host_tokens: Count = 0


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The root keys that are not groups."""

    chunk: Tokens
    batch: Annotated[int, whole(1, MOST_REQUESTS_AT_ONCE)]
    max_running: Requests
    seed: Count
    hardware: Text
    price: Annotated[float, not_negative("dollars per hour of one GPU")] | None = None
    kv_tokens: Tokens
    block_size: Tokens
    max_tokens: Tokens
    prefix_cache: Switch = False
    kv: KV = KV()
    patience: Patience
    metrics: Metrics
    output: Text | None
    sweep: Text
    other_code: Annotated[Literal["rerun", "keep"], Give("rerun or keep")]
    progress: OnOffAuto
    stream: Switch = False
    tables: Switch = True
    timeline: Switch
    decisions: Switch
    bounds: Switch = False
    traces: Text

    without_effect: ClassVar[tuple[str, ...]] = (
        *("output", "sweep", "other_code", "progress", "stream", "tables", "timeline", "decisions"),
        *("chunk", "traces"),  # parts of the objects that read them
    )
    """Keys that change no figure."""


@dataclass(frozen=True)
class Composed:
    """Hydra's composition for one run.

    keys: the run's keys, resolved. overrides: of its command line. choices: the chosen option of each group.
    named: the overrides in its folder's name in a sweep, with short keys. number: its place in its sweep.
    swept: the values that its experiment sweeps, by key; those of `keys` are the defaults.
    unused: keys that no section refers to, such as `chunk` with a policy without chunks.
    """

    keys: Mapping[str, Any]
    overrides: Sequence[str] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    named: Sequence[str] = ()
    number: int | None = None
    swept: Mapping[str, str] = field(default_factory=dict)
    unused: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Its folder's name in a sweep, before it is shortened."""
        return ",".join(self.named)

    def given(self) -> dict[str, str]:
        """Returns the text of the command line that sets each key, arguments of options included."""
        given = {text.lstrip("+~").partition("=")[0]: text for text in self.overrides}
        for group, option in self.choices.items():
            given |= {f"{group}.{key}": f"{group}={option}" for key in re.findall(r"[(,]([\w.]+)=", option)}
        return given


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """All settings of a run.

    eviction: of the prefix cache; None without one. autoscale: None: all replicas are always there.
    chosen: what each `auto` of a group was resolved to, and why, by key. composed: the source of the settings.
    """

    policy: Recipe
    workload: Workload
    model: ModelSpec
    runtime: Runtime
    backend: Backend
    drafter: Drafter = field(default_factory=NoDrafter)
    eviction: Eviction | None = None
    autoscale: Autoscaler | None = None
    chosen: Mapping[str, str] = field(compare=False)
    composed: Composed = field(compare=False, repr=False)

    @property
    def draft_kv_bytes(self) -> int:
        """Returns the bytes of a token's keys and values of a draft model; 0 without one."""
        return self.drafter.model.kv_bytes_per_token if self.drafter.model else 0

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that the run depends on but its code, nested keys joined by ".": plain values, as JSON keeps them.

        A stored run counts as finished if its identity and code equal the wanted ones.
        The key `policy` has the policy's text, `sarathi(chunk=256)`; the keys that begin with `policy.` have its arguments.
        """
        columns = {"policy": repr(self.policy), **dict(columns_of("policy", self.policy.section))}
        for name in [part.name for part in fields(self)]:
            if name not in ("policy", "chosen", "composed", *self.without_effect):
                columns.update(columns_of(name, getattr(self, name), self.composed.keys.get(name)))
        return columns


S = TypeVar("S", bound=Settings)

_RATES = ("workload.rate", "workload.rate_scale", "workload.arrivals.rate")

PLANS_BY = ("policy", "chunking", "drafting", "predictor", "chunk", "seed", "metrics")
"""The keys that describe a policy: the files in conf/policy refer to them."""

ROOT_KEYS = (*(key.name for key in fields(Keys)), *GROUPS)  # all keys of a configuration outside its sections


def read_settings(composed: Composed) -> Settings:
    """Returns the settings of a run. Raises as `read_as`."""
    return read_as(Settings, Keys, composed)


def read_as(kind: type[S], keys: type[Keys], composed: Composed) -> S:
    """Returns the settings of a command with root keys of its own. kind: of the settings, with the fields of `keys`.

    Raises ConfigError: an unknown or missing key, a value out of range, an object that cannot be built; CbatchError:
    raised by an object of a group.
    """
    if is_auto(composed.keys):
        batch, why = batch_of(read_as(kind, keys, replace(composed, keys=with_batch(composed.keys, 1))))
        settings = read_as(kind, keys, replace(composed, keys=with_batch(composed.keys, batch)))
        return replace(settings, chosen={**settings.chosen, "batch": why})
    config, names = composed.keys, [key.name for key in fields(keys)]
    check_known(config, (*names, *GROUPS))
    for key in _SECTIONS:
        if key not in config:
            raise ConfigError(f"{key}: is missing; give {key}=NAME")
    root = read(keys, {key: config[key] for key in names if key in config})
    chosen: dict[str, str] = {}
    model = _model(config["model"], "model.dtype" in composed.given(), chosen)
    workload: Workload = construct("workload", config["workload"], needs=("requests",))
    workload = workload.within(model.max_positions) if isinstance(workload, Workload) else workload
    _check_effects(composed.given(), model, workload, root.prefix_cache)
    if root.kv.host_tokens and not root.prefix_cache:
        problem = f"kv.host_tokens={root.kv.host_tokens}: has no effect with prefix_cache=false, which keeps no block"
        raise ConfigError(f"{problem}; give prefix_cache=true")
    backend = _backend(config["backend"], chosen)
    if "autoscale" in config:
        check_scaling(backend)
    unnamed = "hardware" not in composed.given() and root.hardware == Cuda.predicts_with
    if unnamed and isinstance(backend, Cuda) and (profile := profile_of_gpu()):
        with suppress(ProfileError):  # it lacks the links of several GPUs
            backend.cost(profile, model, root.batch)
            chosen["hardware"] = f"{profile} (the GPU here)"
            root, composed = replace(root, hardware=profile), replace(composed, keys={**config, "hardware": profile})
    return kind(
        **{name: getattr(root, name) for name in names},
        backend=backend,
        runtime=construct("runtime", config["runtime"], needs=("asynchronous", "graphs", "compile")),
        model=model,
        workload=workload,
        policy=recipe_of(config["policy"], config["chunk"], chosen, config.get("drafting")),
        drafter=make_drafter(config.get("drafter", NO_DRAFTER), model, backend.simulated),
        eviction=check_eviction(construct("eviction", config["eviction"]), True) if root.prefix_cache else None,
        autoscale=construct("autoscale", config["autoscale"], needs=("wanted",)) if "autoscale" in config else None,
        chosen=chosen,
        composed=composed,
    )


def check_scaling(backend: Backend) -> None:
    """Raises ConfigError for replicas that no autoscaler can start and stop."""
    if backend.replicas == 1:
        remedy = "give backend.replicas=, the most that there may be"
        raise ConfigError(f"autoscale: needs several replicas to start and stop; {remedy}")
    fewest = min([pool.replicas or 1 for pool in (backend.pools or {}).values()], default=backend.replicas)
    if backend.scaling.least > fewest:
        problem = f"backend.scaling.least={backend.scaling.least}: exceeds the {fewest} replicas of a pool"
        raise ConfigError(f"{problem}; give at most {fewest}")


def _backend(section: object, chosen: dict[str, str]) -> Backend:
    backend: Backend | Auto = construct("backend", section, needs=("name",))
    if isinstance(backend, Auto):
        backend, why = backend.choose()
        chosen["backend"] = f"{backend.name} ({why})"
    return backend


def _model(section: object, has_dtype: bool, chosen: dict[str, str]) -> ModelSpec:
    """Returns the model's shape, from its checkpoint if `model.path` names one. has_dtype: whether the command line states the dtype."""
    spec: ModelSpec = construct("model", section, needs=ModelSpec.__slots__)
    if spec.path is not None:
        dtype = spec.dtype if has_dtype else None
        spec = replace(spec_from_checkpoint(Path(spec.path).expanduser(), dtype), seed=spec.seed)
        chosen["model"] = f"{spec.name} (of model.path)"
    return spec


def _check_effects(given: Mapping[str, str], model: ModelSpec, workload: Workload, prefix_cache: bool) -> None:
    """Raises ConfigError for a key of the command line that another key leaves without effect."""
    without: dict[str, str] = {}
    if model.path is not None:
        read = ("model.path", "model.seed", "model.dtype")
        shape = [key for key in given if key.startswith("model.") and key not in read]
        shape += ["model"] * ("model" in given and "model.path" in given)
        without |= dict.fromkeys(shape, f"model.path={model.path}, where the model's shape is read")
    if (load := getattr(workload, "load", None)) is not None:
        without |= dict.fromkeys(_RATES, f"workload.load={load:g}, which sets the rate")
    arrivals = [key for key in given if f"{key}.".startswith("workload.arrivals.")]
    if arrivals and isinstance(workload, ClosedLoop) and None not in (workload.sessions, workload.arrivals):
        kept = f"workload.sessions={workload.sessions}, as a session begins when one ends"
        raise ConfigError(f"{arrivals[0]}: has no effect beside {kept}; leave it out, or give workload.sessions=null")
    if evictions := [text for key, text in given.items() if key.partition(".")[0] == "eviction"]:
        check_evicts(evictions[0], prefix_cache)
    for key, other in without.items():
        if key in given:
            raise ConfigError(f"{key}: {given[key]} has no effect beside {other}; leave it out")
