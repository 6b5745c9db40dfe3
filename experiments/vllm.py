"""The scheduler for `vllm serve MODEL --scheduler-cls experiments.vllm.PolicyScheduler`: vLLM's scheduler with a policy.

The CBATCH variable describes the policy by command-line overrides: CBATCH="policy=sarathi_serve chunk=512". With model=NAME (and
hardware=NAME) the policy's predictions come from that model's profile, and with --config-dir=FOLDER settings are there, as for
experiments.run. conf/vllm.yaml lists the keys.

    python -m experiments.vllm                                       checks the variable, without vLLM
    python -m experiments.vllm "policy=sarathi_serve chunk=512"      checks this text

The command serves three simulated requests, and prints the policy, or in one line why the text cannot be used; its exit status is then 2. What only vLLM's own options
decide, such as the largest batch and whether drafts are proposed, is checked when vLLM starts.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import Any

import yaml

from cbatch import ConfigError
from cbatch.model.topology import Topology
from cbatch.sim import ProfileCost
from cbatch.sim.profile_file import profile_names
from cbatch.validation import Switch, nearest, read
from cbatch.vllm import Adapter
from cbatch.vllm.settings import Mode
from experiments.check.scenario import Ending, predicts, trial
from experiments.settings.command_line import HELP, run
from experiments.settings.compose import compose
from experiments.settings.error_lines import one_line
from experiments.settings.hardware import cost_model, profile_of_gpu
from experiments.settings.overrides import check_given_once, log_unused, values_by_key, with_search_path
from experiments.settings.settings import Composed, Settings, read_settings
from experiments.store.decisions_file import DecisionsWriter
from experiments.store.run_folder import CONFIG, DECISIONS

_log = getLogger("vllm.cbatch")  # vLLM formats and shows child loggers of its own

VARIABLE = "CBATCH"

_KEYS = (
    *("policy", "chunking", "predictor", "drafting", "chunk", "batch"),
    *("model", "hardware", "patience", "metrics", "vllm"),
)
"""The keys, or first parts of keys, that describe a policy. vLLM decides everything else about a run."""


@dataclass(frozen=True, kw_only=True)
class VllmKeys:
    """The section `vllm` of conf/vllm.yaml."""

    mode: Mode
    record: str | None
    simulate: Switch


class PolicyScheduler:
    """Replaces vLLM's scheduler class: a call returns a scheduler that follows the policy in the CBATCH variable."""

    def __new__(cls, *, vllm_config: Any, **arguments: Any) -> Any:
        from cbatch.vllm import make_scheduler  # imports vLLM

        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # like `python -m`, so that policies in files can be imported
        with variable() as overrides:
            speculates = vllm_config.speculative_config is not None
            adapter = make_adapter(overrides, vllm_config.parallel_config.tensor_parallel_size, speculates)
            return make_scheduler(adapter, vllm_config, **arguments)


@contextmanager
def variable() -> Iterator[list[str]]:
    """Yields the overrides in CBATCH. A user's error becomes one line that begins with CBATCH and its value."""
    value = os.environ.get(VARIABLE, "")
    try:
        overrides = with_search_path(shlex.split(value))
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}={value}: {error}; close it") from None
    try:
        yield overrides
    except Exception as error:
        message = one_line(error)
        if message is None:
            raise
        raise ConfigError(f"{VARIABLE}={value!r}: {message}") from None


def make_adapter(
    overrides: Sequence[str], tensor_parallel: int = 1, speculates: bool = True, *, records: bool = True
) -> Adapter:
    """Returns the adapter that the overrides describe.

    tensor_parallel: vLLM's degree, for predictions. speculates: whether vLLM proposes drafts. records: whether to begin the recording of `vllm.record`.
    Without `hardware`, predictions are for vLLM on this machine's GPU, or an H200.
    Raises CbatchError if an override cannot be used; the message names the override and the reason.
    """
    values, keys, settings = _compose(overrides, tensor_parallel)
    if "policy" not in values:
        raise ConfigError("policy: is missing; give policy=NAME")
    log_unused(overrides, settings.composed.unused, _log.warning)
    if "drafting" in settings.policy.section and not speculates:
        remedy = "give vllm --speculative-config too, or leave drafting out"
        raise ConfigError(f"drafting: vLLM proposes no drafts; {remedy}")
    if "model" not in values and predicts(settings.policy):
        raise ConfigError("model: is missing; the policy predicts iterations: give model=NAME and hardware=NAME")
    batch = settings.batch if "batch" in values else None
    recorder = None if keys.record is None or not records else _recorder(Path(keys.record), settings.composed)
    adapter = Adapter(settings.policy(), keys.mode, batch=batch, patience=settings.patience, recorder=recorder)
    if "model" not in values:
        return adapter
    cost = cost_model(settings.hardware, settings.model, Topology(tensor_parallel), max_batch=batch)
    return replace(adapter, cost=cost, tile=cost.profile.ceilings.tile)


def predictions(overrides: Sequence[str], batch: int) -> ProfileCost:
    """Returns the cost model for iterations of at most `batch` requests on one GPU. Raises CbatchError like `make_adapter`."""
    values, _, settings = _compose(overrides)
    if "model" not in values:
        raise ConfigError("model: is missing; give model=NAME, and hardware=NAME of a profile")
    return cost_model(settings.hardware, settings.model, max_batch=batch)


def _compose(
    overrides: Sequence[str], tensor_parallel: int = 1
) -> tuple[Mapping[str, Sequence[str]], VllmKeys, Settings]:
    """Returns the overrides' values by key, the section `vllm`, and a run's settings, with the `hardware` for predictions."""
    values = values_by_key(overrides)
    check_given_once(overrides)
    for key in values:
        if key.partition(".")[0] in ("hardware", "model") and "model" not in values:
            raise ConfigError(f"{key}={values[key][-1]}: predicts nothing without a model; give model=NAME too")
        if key.startswith("metrics.") and not key.startswith("metrics.client_weights"):
            raise ConfigError(f"{key}: has no effect here, as vLLM measures; leave it out")
        if key in VllmKeys.__dataclass_fields__:
            raise ConfigError(f"{key}: no such key; did you mean vllm.{key}?")
        if (first := key.partition(".")[0].partition("@")[0]) not in _KEYS and key != "hydra.searchpath":
            raise ConfigError(f"{key}: is decided by vLLM, or unknown; {nearest(first, _KEYS)}")
    composed = compose(*overrides, name="vllm")
    config = dict(composed.keys)
    keys = read(VllmKeys, config.pop("vllm"), "vllm.")
    settings = read_settings(Composed(config, overrides, unused=composed.unused))
    if "model" in values and "hardware" not in values:
        gpu = profile_of_gpu() or "h200"
        inside = f"{gpu}-vllm"  # this profile lacks links between GPUs
        hardware = inside if inside in profile_names() and tensor_parallel == 1 else gpu
        _log.info("predictions: hardware=%s", hardware)
        keys_of_run = replace(settings.composed, keys={**config, "hardware": hardware})
        settings = replace(settings, hardware=hardware, composed=keys_of_run)
    return values, keys, settings


def _recorder(folder: Path, composed: Composed) -> DecisionsWriter:
    """Writes config.yaml, and returns a writer for the decisions next to it."""
    if (folder / DECISIONS).exists():
        raise ConfigError(f"vllm.record={folder}: holds a recording; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(yaml.safe_dump(dict(composed.keys), sort_keys=False), encoding="utf-8")
    return DecisionsWriter(folder / DECISIONS, [text for text in composed.overrides if not text.startswith("vllm.")])


def _check() -> None:
    with variable() as overrides:
        adapter, policy = make_adapter(overrides, records=False), _compose(overrides)[2].policy
        history = trial(policy)
        # vLLM's limits may suit a policy that refuses these
        if history.ending not in (Ending.COMPLETE, Ending.REFUSED):
            raise ConfigError(f"in a trial with three requests: {history.why}")
    batch = "vLLM's batch" if adapter.batch is None else f"batch={adapter.batch}"
    print(f"{VARIABLE} can be used: {policy}, {batch}, vllm.mode={adapter.mode}")


if __name__ == "__main__":
    given = sys.argv[1:]
    if given and not HELP & {*given}:
        os.environ[VARIABLE], given = given[0] if len(given) == 1 else shlex.join(given), []
    sys.exit(run(_check, given, lambda: str(__doc__), bare=True))
