"""The title of a run: policy, workload, model, and how GPUs share the work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbatch.described import class_name, describe, text_of

_GPUS = {"tensor_parallel": "tensor parallelism {}", "pipeline_stages": "{} pipeline stages"}
_SCALING = {"backend.scaling.tick": "decisions every {} s", "backend.scaling.start_seconds": "{} s to start"}


def title_of(about: Mapping[str, Any]) -> str:
    """Describes a run on one line, with the file that its workload reads, its prefix cache, and its GPUs if there are several."""
    identity, limits = about["identity"], about["limits"]
    paths = [identity.get(key) for key in ("workload.path", "workload.lengths.path")]
    files = [f"({Path(path).name})" for path in paths if path]
    what = [f"{about['policy']} on {' '.join([about['workload'], *files])}", about["model"], about["runtime"]]
    if identity.get("prefix_cache"):
        same = {"kv_blocks", "block_size"} <= limits.keys()  # unlike pools may differ
        size = f" in {limits['kv_blocks'] * limits['block_size']:,} tokens" if same else ""
        what.append(f"{identity['eviction']}{size}")
    return ", ".join([*what, *gpus_texts(identity, about.get("pools"))])


def gpus_texts(settings: Mapping[str, Any], pools: Mapping[str, Any] | None = None) -> list[str]:
    """Describes how several GPUs share the work: backend settings other than 1, and the router if there are several replicas.

    pools: see `about.pools`. An empty `autoscale` stands for any autoscaler.
    """
    values = {key: str(settings.get(f"backend.{key}", 1)) for key in _GPUS}
    texts = [words.format(values[key]) for key, words in _GPUS.items() if values[key] != "1"]
    scaler = settings.get("autoscale")
    if (replicas := str(settings.get("backend.replicas", 1))) != "1":
        roles = {name: settings.get(f"backend.pools.{name}.role") for name in pools or {}}
        named = {name: f"{name} ({role})" if role else name for name, role in roles.items()}
        unlike = " and ".join(f"{pool['replicas']} {named[name]}" for name, pool in (pools or {}).items())
        texts.append(f"{'at most ' * (scaler is not None)}{unlike or replicas} replicas")
        if settings.get("backend.router"):
            routers = {name: settings.get(f"backend.pools.{name}.router") for name in pools or {}}
            own = "; ".join(f"{name}: {given}" for name, given in routers.items() if given)
            is_one_for_each = sorted(map(str, roles.values())) == ["decode", "prefill"]
            if all(routers.values()) and is_one_for_each:  # then the cluster's router is not asked
                texts.append(f"routers {own}")
            else:
                texts.append(f"router {_object_text(settings, 'backend.router')}" + f" ({own})" * bool(own))
        if (age := text_of(settings.get("backend.staleness", 0))) != "0":
            texts.append(f"reports {age} s old")
        if scaler is not None:
            texts += [f"autoscaler {_object_text(settings, 'autoscale')}"] * bool(scaler)
            texts += [words.format(text_of(settings[key])) for key, words in _SCALING.items() if key in settings]
    return texts


def shares_gpus(about: Mapping[str, Any]) -> bool:
    """Returns whether several GPUs share the work of a replica."""
    one = {key: about["identity"].get(f"backend.{key}", 1) for key in _GPUS}
    return any(int(pool[key]) > 1 for pool in about.get("pools", {"": one}).values() for key in _GPUS)


def _object_text(settings: Mapping[str, Any], key: str) -> str:
    """Returns an object as text with its arguments, which are settings of their own; a seed is left out."""
    names = [name for name in settings if name.startswith(f"{key}.") and name != f"{key}.seed"]
    return describe(class_name(str(settings[key])), {name.removeprefix(f"{key}."): settings[name] for name in names})
