"""The conditions under which a profile's error was established, and the runs outside them."""

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from cbatch.sim import load_profile
from cbatch.sim.profile_file import profile_names
from cbatch.sim.provenance import IN_GRAPHS
from experiments.report.headings import LATENCIES

About = Mapping[str, Any]  # the part `about` of a summary

_NOT_COMPARED = {
    "prefix cache": ("prefix_cache", False),
    "host memory": ("kv.host_tokens", 0),
    "drafts": ("drafter", "none"),
    "several replicas": ("backend.replicas", 1),
    "roles": ("backend.*role", "both"),
    "pipeline stages": ("backend.*pipeline_stages", 1),
    "planning time": ("backend.host_seconds", "auto"),
    "server_seconds": ("backend.server_seconds", 0),
}
"""What a run may use that no run with a stated error has used: patterns of settings (`about.identity`), and the value without it."""

_NAMES = {name: of[0] for name, of in LATENCIES.items()} | {
    "job_seconds": "busy",
    "busy_seconds": "busy",
    "turn_seconds": "turn",
}
"""Names of latencies and of the times of sessions in `Compared.largest_error_of_ratios`."""

_OF_VLLM = "-vllm"  # end of the names of profiles of vLLM, which is another engine


def _uses(about: About, name: str) -> bool:
    """Returns whether a run uses one of `_NOT_COMPARED`; a drafter that makes no drafts is in `about.lacks`."""
    (pattern, without), settings = _NOT_COMPARED[name], about.get("identity", {})
    used = any(settings[key] not in (None, without) for key in fnmatch.filter(settings, pattern))
    return used and name not in about.get("lacks", ())


def beyond_text(abouts: Iterable[About]) -> str:
    """Counts simulated runs whose batch or load is outside the range of the profile's error, and those that use `_NOT_COMPARED`; empty if none.

    The load is known only with `workload.load`, a share of B3, and compared with `Compared.shares_of_bound`; its `loads` are
    shares of what a policy serves, which is less. Requests that are queued from the start have no load.
    """
    known = [about for about in abouts if about["simulated"] and about["execution"].get("compared")]
    waiting = [about["mean_waiting"] for about in known if is_overloaded(about)]

    def several(number: int) -> str:
        return "" if number == len(known) else f" in {number} of {len(known)} runs"

    texts = []
    for name, key, form in (("batch", "batches", "d"), ("load", "shares_of_bound", ".0%")):
        found, compared = [], set[str]()
        for about in known:
            values = {of.get(name) for of in [*(pool["limits"] for pool in _pools(about)), about.get("load") or {}]}
            ends = about["execution"]["compared"].get(key)
            if outside := {value for value in values if value and ends and not ends[0] <= value <= ends[1]}:
                found.append(outside)
                compared.add(" to ".join(dict.fromkeys(format(end, form) for end in ends)))
        if found:
            each = [format(value, form) for value in sorted(set().union(*found))]
            shown = ", ".join(each) if len(each) <= 3 else f"{each[0]} to {each[-1]}"
            text = f"{name} {shown}"
            if name == "load":
                text = f"offered rate {shown} of B3 (compared: {' and '.join(sorted(compared))})"
            texts.append(f"{text}{several(len(found))}")
    using = {name: sum(_uses(about, name) for about in known) for name in _NOT_COMPARED}
    texts += [f"{name}{several(number)}" for name, number in using.items() if number]
    if queued := sum(bool(about.get("queued")) for about in known):
        texts.append(f"all requests queued from the start{several(queued)}")
    if waiting:
        most = f"{max(waiting):,.0f} requests waiting on average until the last arrival"
        texts.append(f"overload{several(len(waiting))}, {'at most ' * (len(known) > 1)}{most}")
    which = "that error" if len({about["execution"]["profile"] for about in known}) < 2 else "their profiles' errors"
    return f"outside the conditions of {which}: {'; '.join(texts)}" if texts else ""


def in_graphs(abouts: Iterable[About]) -> bool:
    """Returns whether every iteration with prompts of these runs fitted a captured graph, as far as is known."""
    return all(about["execution"].get("eager_iterations") == 0 for about in abouts)


def profiles_of(abouts: Iterable[About]) -> set[str]:
    """Returns the profiles by which runs were simulated; empty if none was, and with "" for a measured run beside simulated ones."""
    profiles = {str(about["execution"].get("profile", "")) * about["simulated"] for about in abouts}
    return profiles if any(profiles) else set()


def ratio_error(key: str, all_in_graphs: bool, profiles: Collection[str]) -> float:
    """Returns the largest error of the simulated ratio of two policies in a figure of summary.json, rounded up to whole percents; 0: no known error.

    all_in_graphs: whether both were `in_graphs`. profiles: see `profiles_of`; errors are of two runs by one profile.
    The time of a session is given the error of its time without pauses, which is larger.
    """
    group, _, rank = key.rpartition(".")
    name = _NAMES.get(group.rpartition(".")[2], "")
    others = {"throughput": "throughput", "run": "total time" * (rank == "seconds")}
    figure = others.get(group, f"{name} {rank.replace('p', 'P')}")
    errors = (
        _ratio_errors(all_in_graphs, all(name.endswith(_OF_VLLM) for name in profiles)) if len(profiles) == 1 else {}
    )
    return math.ceil(100 * errors.get(figure, 0)) / 100


@cache
def _ratio_errors(all_in_graphs: bool, of_vllm: bool) -> Mapping[str, float]:
    """Returns the largest errors of ratios in the shipped profiles of one engine, of one GPU in the asynchronous loop, of which there are enough pairs."""
    names = [name for name in profile_names() if name.endswith(_OF_VLLM) == of_vllm]
    loop = "async" + IN_GRAPHS * (all_in_graphs and not of_vllm)
    profiles = [load_profile(name).compared.get(loop) for name in names]
    stated = [item for of in profiles if of for item in of.largest_error_of_ratios.items()]
    return dict(sorted(stated, key=lambda item: item[1]))  # of equal names the largest


def is_stated_overload(about: About) -> bool:
    """Returns whether `beyond_text` counts a run as overloaded."""
    return bool(about["simulated"] and about["execution"].get("compared") and is_overloaded(about))


def is_extrapolated(about: About) -> bool:
    """Returns whether a simulated run has iterations outside the measured range."""
    return bool(about["simulated"] and about["execution"]["iterations_outside_measured_range"])


def is_overloaded(about: About) -> bool:
    """Returns whether the queue of a server grows, see `Waits.grow`, or more requests wait, on average, than may run."""
    replicas = about.get("identity", {}).get("backend.replicas", 1)
    most = sum(pool["limits"]["batch"] * pool.get("replicas", replicas) for pool in _pools(about))
    return bool(about.get("queue_grows")) or about.get("mean_waiting", 0) > most


def _pools(about: About) -> Iterable[About]:
    pools: Mapping[str, About] = about.get("pools", {"": about})
    return pools.values()
