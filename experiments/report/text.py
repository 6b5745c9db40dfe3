"""Text that commands print: a run in full or on one line, a comparison, a figure."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tabulate import tabulate

from cbatch.results.metrics import PERCENTILES
from cbatch.results.utilisation import PHASES
from experiments.report.headings import LATENCIES, flat
from experiments.report.intervals import Compared, Mean, significant
from experiments.report.notes import notes_of, tail_text
from experiments.report.titles import shares_gpus, title_of

Summary = Mapping[str, Any]

_RANKS = ["mean", *(f"p{rank}" for rank in PERCENTILES)]


def run_text(summary: Summary) -> str:
    """Returns a run in full: all metrics, and the latency percentiles that at least one request lies beyond, with a warning if few do."""
    about, counted = summary["about"], summary["run"]["counted_requests"]
    title = "\n".join([title_of(about), *notes_of([about])])
    figures = tabulate(_figures(summary), tablefmt="plain", disable_numparse=True)
    tables, shares = [_latencies("", summary, counted)], {"": counted}
    for pool, part in summary.get("pools", {}).items():
        if 0 < (number := part["counted_requests"]) < counted:  # a pool that ends all has the run's latencies
            tables.append(_latencies(f"pool {pool}: ", part, number))
            shares[f"in pool {pool} "] = number
    if sessions := summary.get("sessions"):
        by_turn = sessions["ttft_seconds"].items()
        shares |= {f"in turn{'s' * ('-' in turn)} {turn} ": of["turns"] for turn, of in by_turn}
        rows = [[f"{turn} ({of['turns']:,} requests)", *_ranks(of, of["turns"])] for turn, of in by_turn]
        tables.append(("time to first token of turns [s]", rows))
    aligned = ("left", *["right"] * len(_RANKS))
    heads = [rank.replace("p", "P") for rank in _RANKS]
    texts = [tabulate(rows, [head, *heads], colalign=aligned, disable_numparse=True) for head, rows in tables if rows]
    with_p99 = [(number, part) for part, number in shares.items() if number >= 100]
    tail = tail_text([[number for number, _ in with_p99]], min(with_p99, default=(0, ""))[1])
    return "\n\n".join(filter(None, [title, figures, *texts, tail]))


def _latencies(whose: str, figures: Summary, counted: int) -> tuple[str, list[list[str]]]:
    """Returns the head and the rows of a table of latencies."""
    rows = []
    for key, (_, name, factor, unit) in LATENCIES.items():
        number = math.inf if key == "tbt_seconds" else counted
        rows.append([f"{name} [{unit}]", *_ranks(figures[key], number, factor)])
    return f"{whose}latencies of {count_text(counted, 'request')}", rows


def _ranks(values: Summary, number: float, factor: float = 1.0) -> list[str]:
    """Returns mean and percentiles of `number` values; those that none of these values lies beyond as a dash."""
    num_stated = 1 + sum(number * (100 - rank) >= 100 for rank in PERCENTILES)
    texts = [format_number(values[rank], factor) for rank in _RANKS[:num_stated]]
    return [*texts, *["-"] * (len(_RANKS) - num_stated)]


def _figures(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yields the lines of a run. If a warm-up or drain is left out, figures over the whole run are marked."""
    run, speed, mean, goodput = (summary[key] for key in ("run", "throughput", "iterations", "goodput"))
    number, share = format_number, format_share
    rejected, cancelled, counted = run["rejected_requests"], run.get("cancelled_requests", 0), run["counted_requests"]
    broken_off = run.get("broken_off_requests", 0)
    served, seconds, whole = run["requests"] - rejected - broken_off - cancelled, number(run["counted_seconds"]), ""
    if counted < served:
        whole = "whole run: "
        yield "counted", f"{counted:,} of {served:,} served, {seconds} of {number(run['seconds'])} s{_steady(summary)}"
    total, prefill, decode = (number(speed[f"{part}_tokens_per_second"]) for part in ("total", "prefill", "decode"))
    yield "tokens/s", f"{total}, of them {prefill} prefill and {decode} decode"
    lost = f"{'; ' if whole else ', '}{whole}{rejected:,} rejected" + f", {cancelled:,} cancelled" * bool(cancelled)
    lost += f", {broken_off:,} ended by the policy after their first tokens" * bool(broken_off)
    if (offered := number(run.get("offered_requests_per_second"))) != "-":
        lost += f", {offered} per second offered"
    yield "requests/s", f"{number(speed['requests_per_second'])}: {counted:,} served in {seconds} s{lost}"
    objectives = summary["about"].get("objectives", {})
    if goodput:
        attained = f"{share(goodput['attained_share'])} attain {objectives.get('', 'their objectives')}"
        if without := summary["about"].get("without_objective"):
            attained += f"; {without:,} of {run['requests']:,} requests have no objective"
        yield "goodput", f"{number(goodput['requests_per_second'])} requests/s, {attained}"
    if attained := summary["attainment"]:
        by_tier = attained["tiers"].items()
        named = {tier: f" ({objectives[tier]})" if tier in objectives else "" for tier in ("", *attained["tiers"])}
        tiers = "".join(f"; {tier} {share(of['share'])}{named[tier]}" for tier, of in by_tier)
        with_slo = count_text(attained["requests"], "request")
        yield "SLOs", f"{share(attained['share'])} of {with_slo} attain theirs{named['']}{tiers}"
    service = summary["service"]
    if service and (jain := number(service["jain_index"]["mean"])) != "-":
        worst, usual = (number(service["service_difference"][key]) for key in ("max", "mean"))
        clients = count_text(len(service["clients"]), "client")
        yield "service", f"{whole}{clients}; difference {usual} per s, at most {worst}; Jain's index {jain}"
    if regret := summary.get("regret"):
        bound = f"its lower bound of {number(regret['latency_bound'])} s"
        line = f"mean latency {number(regret['latency'])} x {bound}, makespan {number(regret['makespan'])} x"
        if "violations" in regret:
            line += f"; {count_text(regret['violations'], 'violation')} over the lower bound of {regret['violations_bound']}"
        yield "regret", whole + line
    pools, transfers = summary.get("pools", {}), summary.get("transfers")
    for pool, figures in pools.items():
        served = f"{count_text(figures['requests'], 'request')}, {figures['output_tokens']:,} output tokens"
        if transfers:
            served = f"{figures['prefill_tokens']:,} tokens prefilled" + f"; {served}" * (figures["requests"] > 0)
        setup = summary["about"]["pools"][pool]
        each = f"{setup['policy']}, batch {setup['limits']['batch']}, {setup['hardware']}"
        price = f"; {_price_text(figures['cost'])}" if "cost" in figures else ""
        by = count_text(figures["replicas"], "replica")
        if "most_replicas" in figures:
            by = f"at most {figures['most_replicas']} of {by}, {number(figures['mean_replicas'])} on average"
        active = f"device active {share(figures['iterations']['device_active_share'])}"
        yield f"pool {pool}", f"{served} by {by}: {each}; {active}{price}"
    if balance := summary.get("replicas"):
        least, most = balance["least_requests"], balance["most_requests"]
        paid = ""
        if "seconds" in balance:
            paid = f"; {number(balance['mean'])} on average, at most {balance['most']}: {number(balance['seconds'])} replica-seconds"
        ending = [pool for pool, figures in pools.items() if figures["requests"]]
        those = f", in {' and '.join(ending)}" if transfers and len(ending) < len(pools) else ""
        range_ = f"{least:,} to " * (least != most) + count_text(most, "request")
        idle = f"; {count_text(balance['idle'], 'replica')} computed nothing" if "idle" in balance else ""
        each = " each" * (not those or sum(pools[pool]["replicas"] for pool in ending) > 1)
        yield "replicas", f"{whole}{range_}{each}{those}{paid}{idle}"
    if transfers:
        timed = {"visible_seconds": "left after the prefill", "copied_seconds": "for the copy of a prefix"}
        means = {what: number(transfers.get(key), 1e3) for key, what in timed.items()}
        seen = ", ".join(f"{average} ms {what}" for what, average in means.items() if average != "-")
        line = f"{transfers['number']:,}, together {number(transfers['bytes'] / 1e9)} GB{f'; on average {seen}' * bool(seen)}"
        lost = f"; {count_text(transfers.get('lost_leases', 0), 'lease')} ended unread, of {number(transfers.get('lost_tokens', 0))} tokens"
        hidden = f"{share(transfers['hidden_share'])} of the bytes hidden during prefills"
        yield "transfers", f"{line}, {hidden}{lost * (transfers.get('lost_leases', 0) > 0)}"
    batch = f"{number(mean['batch_requests'])} requests ({share(mean['batch_occupancy'])} of the batch)"
    tokens = f"{number(mean['batch_tokens'])} tokens ({share(mean['padding_share'])} padding)"
    each, num = f"{batch} and {tokens}", run["iterations"]
    yield "iterations", f"{each}; {whole}{count_text(num, 'iteration')}" if whole else f"{num:,} of {each}"
    used = f"{share(mean['kv_use_mean'])} used, at most {share(mean['kv_use_peak'])}"
    again = f"{number(run.get('recomputed_tokens'))} tokens recomputed ({share(run.get('recomputed_share'))})"
    cause = "moves or preemptions" if transfers and run["preemptions"] else "moves" if transfers else "preemptions"
    again += _causes_text(run)
    yield "KV cache", f"{used}; {whole}{count_text(run['preemptions'], 'preemption')}, {again}"
    if cache := summary.get("prefix_cache"):
        cached, again = number(cache["cached_tokens"]), number(cache["cached_again_tokens"])
        found = f"{share(cache['hit_share'])} of prompt tokens found ({cached}), {again} after {cause}"
        yield "prefixes", f"{found}; {whole}{number(cache['evicted_blocks'])} blocks evicted"
        if host := cache.get("host"):
            found = f"{share(host['hit_share'])} of prompt tokens found ({number(host['cached_tokens'])})"
            copied = f"{number(host['bytes_out'] / 1e9)} GB copied out, {number(host['bytes_back'] / 1e9)} GB back"
            yield "host memory", f"{found}; {whole}{copied}, {number(host['waited_seconds'])} s waited"
    if drafts := summary.get("drafts"):
        accepted, made = number(drafts["accepted"]), number(drafts["drafts"])
        counts = f"{accepted} of {made} accepted ({share(drafts['accepted_share'])})"
        yield "drafts", f"{counts}; acceptance length {number(drafts['acceptance_length'])}, with the base token"
    if sessions := summary.get("sessions"):
        yield from _sessions(sessions)
    if mfu := summary.get("mfu"):
        present = [phase for phase in PHASES if share(mfu[phase]) != "-"]
        parts = [f"{phase} {share(mfu[phase])} and {share(summary['mbu'][phase])}" for phase in present]
        yield "utilisation", f"MFU {share(mfu['run'])}, MBU {share(summary['mbu']['run'])}; {'; '.join(parts)}"
    if cost := summary.get("cost"):
        prompt, output = (number(cost[f"dollars_per_million_{kind}_tokens"]) for kind in ("prompt", "output"))
        kinds = f"${prompt} per million prompt tokens, or ${output} per million output tokens"
        yield "cost", f"${number(cost['dollars'])}, {_price_text(cost)}: {kinds}"
    if energy := summary.get("energy"):
        watts = f"{number(energy['watts'])} W on average"
        if "at_limit_share" in energy:
            watts += f"; {format_share(energy['at_limit_share'])} of the device's time at the power limit"
        if summary["about"]["simulated"] and shares_gpus(summary["about"]):
            watts += "; with several GPUs per replica not compared with measurements"
        yield "energy", f"{number(energy['joules_per_token'])} J per output token, {watts}"
    elif problem := summary["about"].get("energy", {}).get("unknown"):
        yield "energy", f"not measured: {problem}"
    shares = f"device {share(mean['device_active_share'])}, host {share(mean['host_active_share'])}"
    yield "active", shares + ", means over the replicas" * bool(balance)


def _steady(summary: Summary) -> str:
    """Returns how a steady start changes the number of requests; empty without one."""
    about, requests = summary["about"], summary["run"]["requests"]
    if not (warming := about.get("warming")):
        return ""
    asked = about["identity"].get("workload.num_requests") or requests
    more = f", so that there are {requests:,} and not {asked:,} requests" * (asked != requests)
    return f"; the first {warming:,} compute what sessions said before{more}"


def _causes_text(run: Mapping[str, Any]) -> str:
    """Returns what lost the recomputed tokens; if there are several causes, with the tokens of each."""
    parts = {key: tokens for key, tokens in run.items() if key.startswith("recomputed_after_") and tokens}
    causes = {key.removeprefix("recomputed_").replace("_", " "): format_number(parts[key]) for key in parts}
    if len(causes) > 1:
        return ": " + ", ".join(f"{tokens} {cause}" for cause, tokens in causes.items())
    return "".join(f" {cause}" for cause in causes)


def _price_text(cost: Mapping[str, Any]) -> str:
    units = {"hour": "/h", "request": " per request", "million_tokens": " per million tokens"}
    texts = [(format_number(cost[f"dollars_per_{key}"]), unit) for key, unit in units.items()]
    return ", ".join(f"${text}{unit}" for text, unit in texts if text != "-")  # a pool of prefillers ends no request


def _sessions(figures: Summary) -> Iterator[tuple[str, str]]:
    """Yields the lines of sessions in closed loop."""
    number = format_number
    job, busy, turn = (number(figures[f"{of}_seconds"]["mean"]) for of in ("job", "busy", "turn"))
    ended = f"{figures['completed']:,} completed, {figures['abandoned']:,} abandoned"
    if figures["completed"]:
        jain = number(figures["jain_index"])
        yield "sessions", f"{ended}, {number(figures['per_hour'])} per hour; Jain's index {jain}"
        yield "job time", f"{job} s on average, {busy} s of them without pauses, {turn} s per turn"
    else:
        yield "sessions", f"{ended}: no times of jobs, as no session begins in the measured part and completes"
    if (lost := figures.get("cache_lost_share")) is not None:
        repeated = f"{format_share(lost)} of the tokens that turns repeat"
        yield "repeated", f"{repeated} were not found in the prefix cache where they ran"


def run_line(name: str, summary: Summary) -> str:
    """Describes one run of a sweep on one line."""
    rate = format_number(summary["throughput"]["total_tokens_per_second"])
    mark = "simulated" if summary["about"]["simulated"] else "measured"
    return f"{name}: {rate} tokens/s, TTFT P50 {format_number(summary['ttft_seconds']['p50'])} s ({mark})"


def count_text(number: int, noun: str) -> str:
    """Returns a number with its noun, as in 1 request or 2 requests."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_mean(mean: Mean, is_share: bool = False) -> str:
    """Returns a mean, with half the width of its interval if it has one; with the ends, cut at 0 and 100, of a share's that passes them."""
    low, high = mean.mean - mean.half, mean.mean + mean.half
    if is_share and (low < 0 or high > 100):
        return f"{format_number(mean.mean)} [{format_number(max(low, 0))}, {format_number(min(high, 100))}]"
    half = f"{mean.half:,.0f}" if mean.half >= 99.5 else f"{mean.half:.2g}"
    return format_number(mean.mean) + (f" ± {half}" if mean.half > 0 else "")


def disagree(compared: Compared) -> bool:
    """Returns whether the intervals disagree: only one of them excludes equality (ratio 1, difference 0)."""
    low, high = compared.ratio[1:]
    return low <= high and compared.significant == (low <= 1 <= high)


def values_text(compared: Compared) -> list[str]:
    """Returns the ratio and the difference as text."""
    ratio, difference = compared.ratio[0], compared.difference[0]
    return ["-" if math.isnan(ratio) else f"{ratio:.4g}x", "+" * (difference > 0) + format_number(difference)]


def intervals_text(compared: Compared, most: float = math.inf, error: float = 0.0) -> list[str]:
    """Returns the ratio and the difference with their intervals, and whether the difference is significant.

    most: the largest difference that there can be, as between shares; the ends of its interval are cut there.
    error: of simulated ratios; the remark says if the difference is smaller.
    """
    ratio, difference = values_text(compared)
    ends = [f"{end:.4g}" for end in compared.ratio[1:]]
    low, high = (format_number(min(max(end, -most), most)) for end in compared.difference[1:])
    ratio += f" [{', '.join(ends)}]" * (ratio != "-")
    remark = "significant" if compared.significant else not_significant(compared)
    remark += f"; below {error:.0%}" * (compared.significant and 1 / (1 + error) < compared.ratio[0] < 1 + error)
    return [ratio, f"{difference} [{low}, {high}]", remark]


def not_significant(compared: Compared) -> str:
    """Returns the remark that a difference is not significant, and how many replications would show a difference of this size."""
    if compared.difference == (0, 0, 0):
        return "equal in every replication"
    number = f"about {math.ceil(compared.needed):,}" if compared.needed < 1_000_000 else "more than 1,000,000"
    return f"not significant; {number} replications would show this difference (80% power)"


def figures_text(summary: Summary) -> str:
    """Returns all figures of a run as text, which is equal for runs that differ only by rounding."""
    figures = flat({key: value for key, value in summary.items() if key != "about"})
    rounded = {key: significant(value) if isinstance(value, float) else value for key, value in figures}
    return json.dumps(rounded, sort_keys=True, default=str)


def format_number(value: float | None, factor: float = 1.0) -> str:
    """Returns value x factor with three significant digits, or all digits before the decimal point: 30,960 or 4.76 or 0.0384."""
    if value is None or math.isnan(value):
        return "-"
    scaled = factor * value
    return f"{scaled:,.0f}" if abs(scaled) >= 999.5 else f"{scaled:.3g}"


def format_share(value: float | None) -> str:
    """Returns a share in percent with one decimal; small shares above 0 with two significant digits."""
    if value is None or math.isnan(value):
        return "-"
    return f"{100 * value:.2g}%" if 0 < value < 0.0005 else f"{100 * value:.1f}%"
