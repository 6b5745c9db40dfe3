"""The figures of summary.json by key: names and units in tables and on axes, and errors for unknown keys."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cbatch import SLO, ConfigError, FinishReason, Request, RunRecord
from cbatch.record import Life, StepRecord, Transfer
from cbatch.results.service import NO_CLIENT
from cbatch.results.summary import summarize
from cbatch.results.utilisation import Machines, ModelWork


class Heading(NamedTuple):
    """How a figure is shown.

    text: name with the unit. axis: text on an axis; empty: same as `text`. factor: multiplies values in the unit of summary.json.
    kind: scale of intervals and axes. better: "higher" or "lower"; empty if neither, as of what a policy spends: the same work with more
        bytes read has a higher MBU, and slower work less power.
    """

    text: str
    factor: float = 1.0
    kind: str = "linear"
    better: str = ""
    axis: str = ""

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest value that a figure may have, where ends of intervals are cut: 0 and 100% of a share."""
        return (0.0, 100.0) if self.kind == "share" else (-math.inf, math.inf)

    @property
    def unit(self) -> str:
        """The unit in summary.json; of counts and rates their name."""
        unit = self.text.partition("[")[2].removesuffix("]") or self.text
        return "share" if self.factor == 100 else unit.removeprefix("m" * (self.factor == 1e3))

    @property
    def on_axis(self) -> str:
        """The text on an axis."""
        return self.axis or self.text


LATENCIES = {
    "ttft_seconds": ("TTFT", "time to first token", 1.0, "s"),
    "scheduling_delay_seconds": ("scheduling delay", "scheduling delay", 1.0, "s"),
    "tbt_seconds": ("TBT", "time between tokens", 1e3, "ms"),
    "longest_gap_seconds": ("longest gap", "longest gap of a request", 1e3, "ms"),
    "tpot_seconds": ("TPOT", "time per output token", 1e3, "ms"),
    "end_to_end_seconds": ("end to end", "end to end", 1.0, "s"),
    "normalized_latency_seconds_per_token": ("normalized latency", "normalized latency", 1e3, "ms/token"),
}
"""Short name, long name, factor and unit of each latency distribution."""

_OF_SESSIONS = {"job": "job time", "busy": "job time without pauses", "turn": "time per turn"}

CAPACITIES = ("capacity.requests_per_second", "capacity.sessions")
OFFERED = "run.offered_requests_per_second"

_HEADINGS = {
    "throughput.total_tokens_per_second": Heading("tokens/s", better="higher", axis="throughput [tokens/s]"),
    **{
        f"throughput.{part}_tokens_per_second": Heading(
            f"{part} tokens/s", better="higher", axis=f"{part} throughput [tokens/s]"
        )
        for part in ("prefill", "decode")
    },
    "throughput.requests_per_second": Heading("requests/s", better="higher", axis="throughput [requests/s]"),
    "goodput.requests_per_second": Heading("goodput [requests/s]", better="higher"),
    "goodput.attained_share": Heading("attained [%]", 100.0, "share", "higher"),
    "attainment.share": Heading("attained [%]", 100.0, "share", "higher"),
    "regret.latency": Heading("latency / bound", better="lower"),
    "regret.makespan": Heading("makespan / bound", better="lower"),
    "regret.violations": Heading("violations over bound", better="lower"),
    "run.seconds": Heading("makespan [s]", better="lower"),
    "run.requests": Heading("requests"),
    "run.rejected_requests": Heading("rejected requests", better="lower"),
    "run.iterations": Heading("iterations"),
    "run.tail_share": Heading("idle tail [%]", 100.0, "share", "lower"),
    "run.preemptions": Heading("preemptions", better="lower"),
    "run.recomputed_share": Heading("recomputed [%]", 100.0, "share", "lower"),
    "run.recomputed_tokens": Heading("recomputed tokens", better="lower"),
    "run.recomputed_after_preemptions": Heading("recomputed after preemptions", better="lower"),
    "run.recomputed_after_moves": Heading("recomputed after moves", better="lower"),
    "run.recomputed_after_lost_leases": Heading("recomputed after lost leases", better="lower"),
    "prefix_cache.hit_share": Heading("found in cache [%]", 100.0, "share", "higher"),
    "prefix_cache.host.hit_share": Heading("found in host memory [%]", 100.0, "share"),
    "prefix_cache.host.waited_seconds": Heading("waited for copies of blocks [s]", better="lower"),
    "prefix_cache.evicted_blocks": Heading("evicted blocks", better="lower"),
    "sessions.completed": Heading("sessions completed", better="higher"),
    "sessions.abandoned": Heading("sessions abandoned", better="lower"),
    "sessions.job_seconds.geometric_mean": Heading("geometric mean job time [s]", kind="log", better="lower"),
    "sessions.per_hour": Heading("sessions/h", better="higher"),
    "sessions.jain_index": Heading("Jain's index of sessions", better="higher"),
    "sessions.cache_lost_share": Heading("repeated, not found [%]", 100.0, "share", "lower"),
    "replicas.least_requests": Heading("least requests of a replica", better="higher"),
    "replicas.most_requests": Heading("most requests of a replica", better="lower"),
    "replicas.seconds": Heading("replica-seconds", better="lower"),
    "replicas.mean": Heading("replicas on average", better="lower"),
    "replicas.most": Heading("most replicas", better="lower"),
    "transfers.number": Heading("transfers between replicas", better="lower"),
    "transfers.tokens": Heading("tokens sent between replicas", better="lower"),
    "transfers.bytes": Heading("bytes sent between replicas", better="lower"),
    "transfers.waiting_seconds": Heading("wait for room at the decoder [s]", better="lower"),
    "transfers.visible_seconds": Heading("transfer after the prefill [s]", better="lower"),
    "transfers.copied_seconds": Heading("copy of a prefix [s]", better="lower"),
    "transfers.next_token_seconds": Heading("second token after the transfer [s]", better="lower"),
    "transfers.lost_leases": Heading("leases lost", better="lower"),
    "transfers.lost_tokens": Heading("tokens lost with leases", better="lower"),
    "transfers.hidden_share": Heading("share of transfers hidden by prefills", better="higher"),
    "service.service_difference.mean": Heading("service difference", better="lower"),
    "service.jain_index.mean": Heading("Jain's index", better="higher"),
    **{
        f"{name}.{phase}": Heading(f"{name.upper()}{of} [%]", 100.0, "share")
        for name in ("mfu", "mbu")
        for phase, of in (("run", ""), ("prefill", " of prefill"), ("decode", " of decode"), ("mixed", " mixed"))
    },
    "cost.dollars": Heading("$", better="lower"),
    "cost.dollars_per_hour": Heading("$/h", better="lower"),
    "cost.dollars_per_request": Heading("$ per request", better="lower"),
    "cost.dollars_per_million_tokens": Heading("$ per 1M tokens", better="lower"),
    "cost.dollars_per_million_prompt_tokens": Heading("$ per 1M prompt tokens", better="lower"),
    "cost.dollars_per_million_output_tokens": Heading("$ per 1M output tokens", better="lower"),
    "energy.joules": Heading("energy [J]", better="lower"),
    "energy.watts": Heading("power [W]"),
    "energy.joules_per_token": Heading("J per output token", better="lower"),
    "energy.at_limit_share": Heading("time at the power limit [%]", 100.0, "share"),
    "iterations.batch_requests": Heading("batch [requests]"),
    "iterations.batch_occupancy": Heading("batch [% of the largest]", 100.0, "share"),
    "iterations.batch_tokens": Heading("batch [tokens]"),
    "iterations.padding_share": Heading("padding [%]", 100.0, "share", "lower"),
    "iterations.host_active_share": Heading("host active [%]", 100.0, "share"),
    "iterations.kv_use_mean": Heading("mean KV cache in use [%]", 100.0, "share"),
    "iterations.kv_use_peak": Heading("KV cache peak [%]", 100.0, "share"),
    "iterations.device_active_share": Heading("device active [%]", 100.0, "share"),
    OFFERED: Heading("offered [requests/s]", axis="offered rate [requests/s]"),
    "capacity.requests_per_second": Heading("capacity [requests/s]", better="higher"),
    "drafts.acceptance_length": Heading("acceptance length"),
    "drafts.accepted_share": Heading("accepted drafts [%]", 100.0, "share"),
    "drafts.drafts": Heading("drafts"),
    "drafts.accepted": Heading("accepted drafts"),
    "drafts.wasted_tokens": Heading("rejected drafts", better="lower"),
    "capacity.sessions": Heading("capacity [sessions]", better="higher"),
}

COLUMNS = (
    *("throughput.total_tokens_per_second", "throughput.requests_per_second"),
    *("goodput.requests_per_second", "goodput.attained_share", "attainment.tiers.*.share"),
    *("ttft_seconds.p50", "ttft_seconds.p99", "tbt_seconds.p50", "tbt_seconds.p99"),
    *("attainment.clients.*.share", "clients.*.ttft_seconds.p99", "clients.*.tpot_seconds.p99"),
    *("regret.latency", "regret.makespan", "regret.violations", "prefix_cache.hit_share", "drafts.acceptance_length"),
    *("sessions.per_hour", "sessions.job_seconds.mean", "sessions.job_seconds.geometric_mean"),
    *("sessions.cache_lost_share", "run.preemptions", "run.recomputed_share", "mfu.run", "mbu.run"),
    *("replicas.seconds", "transfers.visible_seconds", "transfers.hidden_share", "cost.dollars_per_request"),
    *("cost.dollars_per_million_prompt_tokens", "cost.dollars_per_million_output_tokens"),
    "energy.joules_per_token",
)
"""Figures in a sweep's table and in comparisons, by key or pattern, which is left out if it matches more than `MOST_OF_A_PATTERN`."""

MOST_OF_A_PATTERN = 8

MORE_COLUMNS = (
    *("clients.*.ttft_seconds.p50", "clients.*.tpot_seconds.p50"),
    *(OFFERED, "prefix_cache.host.hit_share", "prefix_cache.tiers.*.hit_share", "prefix_cache.evicted_blocks"),
    *("run.recomputed_tokens", "run.recomputed_after_*", "run.seconds", "run.tail_share"),
    *("drafts.drafts", "drafts.accepted", "drafts.accepted_share", "drafts.wasted_tokens"),
    *("longest_gap_seconds.p50", "longest_gap_seconds.p99", "end_to_end_seconds.p50", "end_to_end_seconds.p99"),
    *("sessions.job_seconds.p90", "sessions.busy_seconds.mean", "sessions.turn_seconds.mean"),
    *("sessions.jain_index", "sessions.abandoned", "service.service_difference.mean", "service.jain_index.mean"),
    *("replicas.least_requests", "replicas.most_requests"),
    *("transfers.number", "transfers.tokens", "transfers.bytes", "replicas.mean", "replicas.most"),
    *("transfers.waiting_seconds", "transfers.next_token_seconds", "transfers.copied_seconds"),
    *("transfers.lost_leases", "transfers.lost_tokens"),
    *("iterations.batch_requests", "iterations.kv_use_peak", "iterations.device_active_share"),
    "pools.*.iterations.device_active_share",
    *("mfu.[pdm]*", "mbu.[pdm]*", "cost.dollars", "cost.dollars_per_hour", "cost.dollars_per_million_tokens"),
    *("energy.joules", "energy.watts", "energy.at_limit_share"),
)
"""Additional figures in `experiments.plot table`."""

_MACHINES = Machines(ModelWork(*[1] * len(ModelWork._fields)), np.ones(1), np.ones(1), watts=np.ones((1, 5)))


def heading_of(key: str) -> Heading:
    """Returns the heading of a figure; by default its key."""
    if key in _HEADINGS:
        return _HEADINGS[key]
    if parts := re.fullmatch(r"sessions\.(?:(job|busy|turn)_seconds|ttft_seconds\.([\d-]+))\.(mean|p\d+)", key):
        name = f"TTFT of turn {parts[2]}" if parts[2] else _OF_SESSIONS[parts[1]]
        text = f"mean {name}" if parts[3] == "mean" else f"{name} {parts[3].upper()}"
        return Heading(f"{text} [s]", 1.0, "log", "lower")
    if parts := re.fullmatch(r"(pool|client)s\.(.+)\.((?:\w+_seconds\w*|cost|iterations)\.\w+)", key):
        heading, name = heading_of(parts[3]), parts[2] if parts[2] == NO_CLIENT else f"{parts[1]} {parts[2]}"
        return heading._replace(text=f"{name}: {heading.text}")
    group, _, rank = key.partition(".")
    if group in LATENCIES:
        name, _, factor, unit = LATENCIES[group]
        text = f"mean {name}" if rank == "mean" else f"{name} {rank.upper()}"
        return Heading(f"{text} [{unit}]", factor, "log", "lower")
    if match := re.fullmatch(r"prefix_cache\.(?:tiers|clients)\.(.+)\.hit_share", key):
        return Heading(f"{match[1]} found in cache [%]", 100.0, "share", "higher")
    attained = r"attainment\.(?:(?P<kind>tier|client)s\.(?P<name>.+)\.)?(?:(?P<objective>ttft|tbt|total|tpot)_)?share"
    if parts := re.fullmatch(attained, key):
        name = f"client {parts['name']}:" if parts["kind"] == "client" else parts["name"]
        objective = parts["objective"] and parts["objective"].upper().replace("TOTAL", "end to end")
        return Heading(" ".join(filter(None, [name, objective, "attained [%]"])), 100.0, "share", "higher")
    return Heading(key, axis=key.replace("_", " "))  # an axis breaks its text at spaces


def check_figure(given: str) -> None:
    """Raises ConfigError if no run can have the figure in key=NAME. Names of tiers, pools, clients and turns, and places of drafts, are known after a run only."""
    key, known = given.partition("=")[2], _known_figures()
    named = (re.escape(figure).replace(r"\.NAME\.", r"\..+\.") for figure in known if ".NAME." in figure)
    is_named = any(re.fullmatch(figure, key) for figure in named)
    further = ("service.clients.", "drafts.survivals.", "sessions.ttft_seconds.")
    if key not in known and not is_named and not key.startswith(further):
        raise ConfigError(no_such_figure(given, known))


@cache
def _known_figures() -> Sequence[str]:
    """Returns the dotted keys of all figures that a summary may have, from the summary of a run that served nothing with an iteration of drafts."""
    session: Any = {"session": "any", "turn": 0, "pause": 0.0}
    record = RunRecord()
    for reason in (FinishReason.REJECTED, FinishReason.CANCELLED):  # the first one after a token, which is lost
        request = Request(0, 1, 1, client="NAME", tier="NAME", slo=SLO(1.0, 1.0, 1.0, 1.0), **session)
        request.finish_reason, request.finished_at = reason, 0.0
        request.num_output_tokens = request.num_lost_tokens = int(not record.requests)
        record.requests.append(request)
    record.add_step(StepRecord._make([*[1] * 17, "", 0, 0, 0, 1, 0, 0]), np.zeros(0, np.int64))
    record.replicas, record.replica_of, record.pools = [0], {0: 0}, ["NAME", "NAME"]
    record.lives, record.transfers = [Life(0, 0.0)], [Transfer(0, 0, 1, 0, 0, 0.0, 0.0)]
    record.prefilled_on = {0: 0}
    sizes: dict[str, Any] = {"num_blocks": 1, "max_batch": 1, "num_replicas": 2, "num_evicted_blocks": 0}
    host = {"bytes_out": 0, "bytes_back": 0, "waited_seconds": 0.0}
    summary = summarize(record, **sizes, host=host, prices=[1.0, 1.0], machines=_MACHINES)
    figures = [name for name, _ in flat(summary)]
    of_clients = [name for name in figures if name.startswith(("ttft_seconds.", "tpot_seconds."))]
    return [
        *figures,
        *(f"clients.NAME.{name}" for name in ("counted_requests", *of_clients)),  # of served requests
        *(key for key in _HEADINGS if key.startswith(("regret.", "run.tail_", "transfers.copied_"))),
    ]


def no_such_figure(given: str, known: Sequence[str]) -> str:
    """Returns the error message if NAME in key=NAME is no number in this summary, or a number that only other runs have."""
    key = given.partition("=")[2]
    if key not in known and key in _known_figures():
        lacking = key if key.startswith("run.") else key.partition(".")[0]
        return f"{given}: this run has no {lacking}; docs/metrics.md says which runs have it"
    near = get_close_matches(key, known, 3, 0.3) or list(known)[:3]
    return f"{given}: summary.json has no such number; did you mean {' or '.join(near)}?"


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested values with dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
