"""Text that commands print about results: one run in full, a sweep as a table."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from cbatch.results.metrics import PERCENTILES
from experiments.store.intervals import Mean, mean_of
from experiments.store.notes import notes_of, tail_text

Summary = Mapping[str, Any]

COLUMNS = {
    "tokens/s": ("throughput.total_tokens_per_second", 1.0),
    "requests/s": ("throughput.requests_per_second", 1.0),
    "goodput [requests/s]": ("goodput.requests_per_second", 1.0),
    "attained [%]": ("goodput.attained_share", 100.0),
    "TTFT p50 [s]": ("ttft_seconds.p50", 1.0),
    "TTFT p99 [s]": ("ttft_seconds.p99", 1.0),
    "TBT p50 [ms]": ("tbt_seconds.p50", 1e3),
    "TBT p99 [ms]": ("tbt_seconds.p99", 1e3),
    "latency / bound": ("regret.latency", 1.0),
    "makespan / bound": ("regret.makespan", 1.0),
    "violations over bound": ("regret.violations", 1.0),
    "preemptions": ("run.preemptions", 1.0),
    "recomputed [%]": ("run.recomputed_share", 100.0),
}
"""Columns of a table of runs: key of the figure in summary.json, and the factor of its unit."""

ONE_REPLICATION = (
    "the seed changes nothing here: 1 replication, no interval; draw from a trace's lengths "
    "(workload=traces/azure_conv_lengths), or compare capacities"
)

MORE_COLUMNS = {
    "recomputed tokens": ("run.recomputed_tokens", 1.0),
    "longest gap p50 [ms]": ("longest_gap_seconds.p50", 1e3),
    "longest gap p99 [ms]": ("longest_gap_seconds.p99", 1e3),
    "end to end p50 [s]": ("end_to_end_seconds.p50", 1.0),
    "end to end p99 [s]": ("end_to_end_seconds.p99", 1.0),
    "service difference": ("service.service_difference.mean", 1.0),
    "Jain's index": ("service.jain_index.mean", 1.0),
    "batch [requests]": ("iterations.batch_requests", 1.0),
    "KV cache peak [%]": ("iterations.kv_use_peak", 100.0),
    "device active [%]": ("iterations.device_active_share", 100.0),
}

REFERENCE = re.compile(r"(?<==)(?:\$\{\w+\}|_\w+_)(?=[,)])")
"""An argument of an option that refers to a key: `${chunk}`, which is `_chunk_` in the option's stored name."""

_TIER = re.compile(r"attainment\.tiers\.(.+)\.share")

_LATENCIES = {
    "time to first token": ("ttft_seconds", 1.0, "s"),
    "scheduling delay": ("scheduling_delay_seconds", 1.0, "s"),
    "time between tokens": ("tbt_seconds", 1e3, "ms"),
    "longest gap of a request": ("longest_gap_seconds", 1e3, "ms"),
    "time per output token": ("tpot_seconds", 1e3, "ms"),
    "end to end": ("end_to_end_seconds", 1.0, "s"),
    "normalized latency": ("normalized_latency_seconds_per_token", 1e3, "ms/token"),
}


def name_of(about: Summary) -> str:
    """A run's name in tables and legends: the policy (a user's own by its class), and its chunk if it has one."""
    policy = policy_name(about["policy"])
    chunk = "" if about.get("chunk") is None else f" {about['chunk']}"
    usual = about["chunking"] in (None, "tile_aligned") or "chunking=" in policy
    return f"{policy}{chunk}" if usual else f"{policy}{chunk}, {about['chunking']}"


def policy_name(option: str) -> str:
    """An option of the group `policy`, with a class in place of its import path."""
    path, bracket, arguments = option.partition("(")
    return f"{path.rpartition('.')[2]}{bracket}{arguments}"


def family(policy: str, chunk: object) -> str:
    """A policy with `${chunk}` in place of arguments that have the chunk's value: the same at all chunks."""
    return re.sub(rf"={re.escape(str(chunk))}(?=[,)])", "=${chunk}", policy)


def is_named(given: str, label: str, about: Summary) -> bool:
    """Whether a text names a run: by its label, its policy and chunk, or its policy, whose arguments may be `${chunk}`."""
    pattern = "[^,)]*".join(map(re.escape, REFERENCE.split(policy_name(given))))
    return given in (label, name_of(about)) or re.fullmatch(pattern, policy_name(about["policy"])) is not None


def title_of(about: Summary) -> str:
    """A run in a line, with the file given to its workload: `workload=sharegpt` may read the lengths of another trace."""
    given = dict(override.lstrip("+").partition("=")[::2] for override in about.get("overrides", ()))
    files = [Path(given[key]).name for key in ("workload.path", "workload.lengths.path") if key in given]
    workload = " ".join([str(about["workload"]), *(f"({name})" for name in files)])
    return f"{name_of(about)} on {workload}, {about['model']}, {about['runtime']}"


def run_text(summary: Summary) -> str:
    """A run in full: every metric."""
    about = summary["about"]
    title = "\n".join([title_of(about), *notes_of([about])])
    figures = tabulate(_figures(summary), tablefmt="plain", disable_numparse=True)
    ranks = ["mean", *(f"p{rank}" for rank in PERCENTILES)]
    rows = [
        [f"{name} [{unit}]", *(format_number(scale(summary[key][rank], factor)) for rank in ranks)]
        for name, (key, factor, unit) in _LATENCIES.items()
    ]
    aligned = ("left", *["right"] * len(ranks))
    return f"{title}\n\n{figures}\n\n{tabulate(rows, ['', *ranks], colalign=aligned, disable_numparse=True)}"


def _figures(summary: Summary) -> Iterator[tuple[str, str]]:
    run, speed, mean, goodput = (summary[key] for key in ("run", "throughput", "iterations", "goodput"))
    rates = [speed[f"{part}_tokens_per_second"] for part in ("total", "prefill", "decode")]
    total, prefill, decode = map(format_number, rates)
    yield "tokens/s", f"{total}, of them {prefill} prefill and {decode} decode"
    requests, rejected = run["requests"] - run["rejected_requests"], run["rejected_requests"]
    rate, seconds = format_number(speed["requests_per_second"]), format_number(run["seconds"])
    yield "requests/s", f"{rate}: {requests} served in {seconds} s, {rejected} rejected"
    if goodput:
        rate, attained = format_number(goodput["requests_per_second"]), format_share(goodput["attained_share"])
        yield "goodput", f"{rate} requests/s, {attained} attain the objectives"
    batch, tokens = format_number(mean["batch_requests"]), format_number(mean["batch_tokens"])
    occupancy, padding = format_share(mean["batch_occupancy"]), format_share(mean["padding_share"])
    iterations = f"{run['iterations']} of {batch} requests ({occupancy} of the batch)"
    if attained := summary["attainment"]:
        tiers = "".join(f"; {tier} {format_share(of['share'])}" for tier, of in attained["tiers"].items())
        yield "SLOs", f"{format_share(attained['share'])} of {attained['requests']} requests attain theirs{tiers}"
    service = summary["service"]
    if service and (jain := format_number(service["jain_index"]["mean"])) != "-":
        worst, usual = (format_number(service["service_difference"][key]) for key in ("max", "mean"))
        clients = len(service["clients"])
        yield "service", f"{clients} clients; difference {usual} per s, at most {worst}; Jain's index {jain}"
    if regret := summary.get("regret"):
        latency, bound = format_number(regret["latency"]), format_number(regret["latency_bound"])
        line = f"mean latency {latency} x its lower bound of {bound} s, makespan {format_number(regret['makespan'])} x"
        if "violations" in regret:
            line += f"; {regret['violations']} violations over the lower bound of {regret['violations_bound']}"
        yield "regret", line
    yield "iterations", f"{iterations} and {tokens} tokens ({padding} padding)"
    used, peak = format_share(mean["kv_use_mean"]), format_share(mean["kv_use_peak"])
    again, share = format_number(run.get("recomputed_tokens")), format_share(run.get("recomputed_share"))
    preempted = f"{run['preemptions']} preemptions, {again} tokens recomputed ({share})"
    yield "KV cache", f"{used} used, at most {peak}; {preempted}"
    device, host = format_share(mean["device_active_share"]), format_share(mean["host_active_share"])
    yield "active", f"device {device}, host {host}"


def run_line(name: str, summary: Summary) -> str:
    """One run of a sweep in one line."""
    rate = format_number(summary["throughput"]["total_tokens_per_second"])
    mark = "simulated" if summary["about"]["simulated"] else "measured"
    return f"{name}: {rate} tokens/s, TTFT p50 {format_number(summary['ttft_seconds']['p50'])} s ({mark})"


def sweep_text(
    runs: Sequence[tuple[str, Summary]],
    notes: str = "",
    columns: Mapping[str, tuple[str, float]] = COLUMNS,
    tablefmt: str = "simple",
) -> str:
    """A table of runs, (label, summary) each, `notes`, and where the times come from.

    Runs with the same label, such as those of several seeds, share a row: means and their 95% intervals.

    Attainment has a column for each tier; columns that no run has are left out, such as goodput.
    """
    summaries = [summary for _, summary in runs]
    figures = [dict(flat(summary)) for summary in summaries]
    known = {key for row in figures for key in row}
    tiers = [found for found in map(_TIER.fullmatch, sorted(known)) if found]
    shown = {}
    for head, (key, factor) in columns.items():
        if key in known:
            shown[head] = key, factor
        if key == "goodput.attained_share":
            shown |= {f"{tier[1]} attained [%]": (tier[0], factor) for tier in tiers}
    groups: dict[str, list[Summary]] = {}
    for (label, _), row in zip(runs, figures, strict=True):
        groups.setdefault(label, []).append(row)
    rows = [[label, *(_cell(own, key, factor) for key, factor in shown.values())] for label, own in groups.items()]
    aligned = ("left", *["right"] * len(shown))
    table = tabulate(rows, ["run", *shown], tablefmt=tablefmt, colalign=aligned, disable_numparse=True)
    end = "" if tablefmt == "simple" else "\n"  # Markdown ends a table with an empty line
    tail = tail_text([row["run.counted_requests"] for row in group] for group in groups.values())
    origins = notes_of(summary["about"] for summary in summaries)
    return "\n".join(filter(None, [table + end, _repeats_text(groups.values()), tail, notes, *origins]))


def _cell(rows: Sequence[Summary], key: str, factor: float) -> str:
    """A figure of runs in a table: of several the mean and half of its interval's width."""
    values = [scale(row.get(key), factor) for row in rows]
    return format_mean(mean_of([math.nan if value is None else value for value in values]))


def format_mean(found: Mean) -> str:
    """A mean with half of its interval's width, if it has one."""
    half = f"{found.half:,.0f}" if found.half >= 99.5 else f"{found.half:.2g}"
    return format_number(found.mean) + (f" ± {half}" if found.half > 0 else "")


def _repeats_text(groups: Iterable[Sequence[Summary]]) -> str:
    """Explains rows that average several runs; empty if there are none."""
    several = [group for group in groups if len(group) > 1]
    sizes = [len(group) for group in several if not all_equal(group)]
    equal = len(several) - len(sizes)
    note = f"{ONE_REPLICATION}; so in {equal} of {len(several)} rows" if equal and sizes else ONE_REPLICATION
    if not sizes:
        return note if equal else ""
    number = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    text = f"mean ± half of the 95% interval over {number} runs; percentiles are those of each run, averaged"
    return f"{text}\n{note}" if equal else text


def all_equal(summaries: Sequence[Summary]) -> bool:
    """Whether several runs have all figures in common: they are one replication."""
    return len(summaries) > 1 and len(set(map(figures_text, summaries))) == 1


def figures_text(summary: Summary) -> str:
    """All figures of a run, by nested or by dotted keys, as text."""
    figures = {key: value for key, value in summary.items() if key.partition(".")[0] != "about"}
    return json.dumps(figures, sort_keys=True, default=str)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def format_number(value: float | None) -> str:
    """Three significant digits, or all before the decimal point: 30,960 or 4.76 or 0.0384."""
    if value is None or value != value:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def format_share(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.1f}%"


def scale(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
