"""The text that commands print of a run: all its figures, line by line, and tables of latencies."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tabulate import tabulate

from cbatch.results.metrics import PERCENTILES
from cbatch.results.utilisation import PHASES
from experiments.report.headings import LATENCIES
from experiments.report.notes import notes_of, tail_text
from experiments.report.text import Summary, count_text, format_number, format_share
from experiments.report.titles import shares_gpus, title_of

_RANKS = ["mean", *(f"p{rank}" for rank in PERCENTILES)]


def run_text(summary: Summary) -> str:
    """Returns a run in full: all metrics, and the latency percentiles that rest on at least one request, with a warning if on few."""
    about, counted = summary["about"], summary["run"]["counted_requests"]
    title = "\n".join([title_of(about), *notes_of([about])])
    figures = tabulate(_figures(summary), tablefmt="plain", disable_numparse=True)
    tables, shares = [_latencies("", summary, counted)], {"": counted}
    for pool, part in summary.get("pools", {}).items():
        if 0 < (number := part["counted_requests"]) < counted:  # a pool that ends all has the run's latencies
            tables.append(_latencies(f"pool {pool}: ", part, number))
            shares[f" in pool {pool}"] = number
    if sessions := summary.get("sessions"):
        by_turn = sessions["ttft_seconds"].items()
        shares |= {f" in turn{'s' * ('-' in turn)} {turn}": of["turns"] for turn, of in by_turn}
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
    """Returns mean and percentiles of `number` values, those that rest on less than one value as a dash: a P99 rests on a hundredth of them."""
    num_stated = 1 + sum(number * (100 - rank) >= 100 for rank in PERCENTILES)
    texts = [format_number(values[rank], factor) for rank in _RANKS[:num_stated]]
    return [*texts, *["-"] * (len(_RANKS) - num_stated)]


def _figures(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yields the lines of a run. If a warm-up or drain is left out, figures over the whole run are marked."""
    whole = "whole run: " * (summary["run"]["counted_requests"] < _num_served(summary["run"]))
    yield from _requests(summary, whole)
    yield from _objectives(summary, whole)
    yield from _replicas(summary, whole)
    yield from _iterations(summary, whole)
    yield from _sessions(summary)
    yield from _machines(summary)


def _num_served(run: Mapping[str, Any]) -> int:
    not_served = ("rejected_requests", "broken_off_requests", "cancelled_requests")
    num_served: int = run["requests"] - sum(run.get(key, 0) for key in not_served)
    return num_served


def _requests(summary: Summary, whole: str) -> Iterator[tuple[str, str]]:
    """Yields how many requests and tokens were served, and how fast."""
    run, speed, number = summary["run"], summary["throughput"], format_number
    counted, seconds = run["counted_requests"], number(run["counted_seconds"])
    if whole:
        served = f"{counted:,} of {_num_served(run):,} served"
        yield "counted", f"{served}, {seconds} of {number(run['seconds'])} s{_steady(summary)}"
    total, prefill, decode = (number(speed[f"{part}_tokens_per_second"]) for part in ("total", "prefill", "decode"))
    yield "tokens/s", f"{total}, of them {prefill} prefill and {decode} decode"
    cancelled, broken_off = run.get("cancelled_requests", 0), run.get("broken_off_requests", 0)
    lost = f"{'; ' if whole else ', '}{whole}{run['rejected_requests']:,} rejected"
    lost += f", {cancelled:,} cancelled" * bool(cancelled)
    lost += f", {broken_off:,} ended by the policy after their first tokens" * bool(broken_off)
    if (offered := number(run.get("offered_requests_per_second"))) != "-":
        lost += f", {offered} per second offered"
    yield "requests/s", f"{number(speed['requests_per_second'])}: {counted:,} served in {seconds} s{lost}"


def _objectives(summary: Summary, whole: str) -> Iterator[tuple[str, str]]:
    """Yields what clients asked for and got: objectives, fair service, and how close to the best possible."""
    number, share, objectives = format_number, format_share, summary["about"].get("objectives", {})
    if goodput := summary["goodput"]:
        attained = f"{share(goodput['attained_share'])} attain {objectives.get('', 'their objectives')}"
        if without := summary["about"].get("without_objective"):
            attained += f"; {without:,} of {summary['run']['requests']:,} requests have no objective"
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


def _replicas(summary: Summary, whole: str) -> Iterator[tuple[str, str]]:
    """Yields how the pools and the replicas share the work."""
    number, share = format_number, format_share
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


def _iterations(summary: Summary, whole: str) -> Iterator[tuple[str, str]]:
    """Yields what iterations compute and what the KV cache holds."""
    run, mean, transfers = summary["run"], summary["iterations"], summary.get("transfers")
    number, share = format_number, format_share
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


def _machines(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yields how far the machines are used, and what they cost."""
    mean, number, share = summary["iterations"], format_number, format_share
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
            watts += f"; {share(energy['at_limit_share'])} of the device's time at the power limit"
        if summary["about"]["simulated"] and shares_gpus(summary["about"]):
            watts += "; with several GPUs per replica not compared with measurements"
        yield "energy", f"{number(energy['joules_per_token'])} J per output token, {watts}"
    elif problem := summary["about"].get("energy", {}).get("unknown"):
        yield "energy", f"not measured: {problem}"
    shares = f"device {share(mean['device_active_share'])}, host {share(mean['host_active_share'])}"
    yield "active", shares + ", means over the replicas" * ("replicas" in summary)


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


def _sessions(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yields the lines of sessions in closed loop."""
    if not (figures := summary.get("sessions")):
        return
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
