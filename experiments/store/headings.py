"""What figures of summary.json are called in tables and on axes, and in which unit they stand there."""

import re
from typing import NamedTuple


class Heading(NamedTuple):
    """text: with the unit. factor: from the unit of summary.json. kind: how intervals and axes are scaled."""

    text: str
    factor: float = 1.0
    kind: str = "linear"


LATENCIES = {
    "ttft_seconds": ("TTFT", "time to first token", 1.0, "s"),
    "scheduling_delay_seconds": ("scheduling delay", "scheduling delay", 1.0, "s"),
    "tbt_seconds": ("TBT", "time between tokens", 1e3, "ms"),
    "longest_gap_seconds": ("longest gap", "longest gap of a request", 1e3, "ms"),
    "tpot_seconds": ("TPOT", "time per output token", 1e3, "ms"),
    "end_to_end_seconds": ("end to end", "end to end", 1.0, "s"),
    "normalized_latency_seconds_per_token": ("normalized latency", "normalized latency", 1e3, "ms/token"),
}
"""Short and long name, factor and unit of each distribution of latencies."""

CAPACITY = "capacity.requests_per_second"

_HEADINGS = {
    "throughput.total_tokens_per_second": Heading("tokens/s"),
    "throughput.requests_per_second": Heading("requests/s"),
    "goodput.requests_per_second": Heading("goodput [requests/s]"),
    "goodput.attained_share": Heading("attained [%]", 100.0, "share"),
    "attainment.share": Heading("attained [%]", 100.0, "share"),
    "regret.latency": Heading("latency / bound"),
    "regret.makespan": Heading("makespan / bound"),
    "regret.violations": Heading("violations over bound"),
    "run.preemptions": Heading("preemptions"),
    "run.recomputed_share": Heading("recomputed [%]", 100.0, "share"),
    "run.recomputed_tokens": Heading("recomputed tokens"),
    "service.service_difference.mean": Heading("service difference"),
    "service.jain_index.mean": Heading("Jain's index"),
    "iterations.batch_requests": Heading("batch [requests]"),
    "iterations.kv_use_peak": Heading("KV cache peak [%]", 100.0, "share"),
    "iterations.device_active_share": Heading("device active [%]", 100.0, "share"),
    CAPACITY: Heading("capacity [requests/s]"),
}

COLUMNS = (
    "throughput.total_tokens_per_second",
    "throughput.requests_per_second",
    "goodput.requests_per_second",
    "goodput.attained_share",
    "attainment.tiers.*.share",
    "ttft_seconds.p50",
    "ttft_seconds.p99",
    "tbt_seconds.p50",
    "tbt_seconds.p99",
    "regret.latency",
    "regret.makespan",
    "regret.violations",
    "run.preemptions",
    "run.recomputed_share",
)
"""Figures in the table of a sweep and in comparisons, by key or pattern."""

MORE_COLUMNS = (
    "run.recomputed_tokens",
    "longest_gap_seconds.p50",
    "longest_gap_seconds.p99",
    "end_to_end_seconds.p50",
    "end_to_end_seconds.p99",
    "service.service_difference.mean",
    "service.jain_index.mean",
    "iterations.batch_requests",
    "iterations.kv_use_peak",
    "iterations.device_active_share",
)
"""Figures that `experiments.plot table` adds."""

_ATTAINMENT = re.compile(r"attainment\.(?:tiers\.(?P<tier>.+)\.)?(?:(?P<objective>ttft|tbt|total)_)?share")


def heading_of(key: str) -> Heading:
    """Returns the heading of a figure; of one that has none, its key."""
    if key in _HEADINGS:
        return _HEADINGS[key]
    group, _, rank = key.partition(".")
    if group in LATENCIES:
        name, _, factor, unit = LATENCIES[group]
        return Heading(f"{name} {rank} [{unit}]", factor, "log")
    if parts := _ATTAINMENT.fullmatch(key):
        objective = parts["objective"] and parts["objective"].upper().replace("TOTAL", "end to end")
        return Heading(" ".join(filter(None, [parts["tier"], objective, "attained [%]"])), 100.0, "share")
    return Heading(key)
