"""Summary of one run: every metric of `metrics`, over the measured window of the run."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.record import RunRecord
from cbatch.request import FinishReason
from cbatch.request_spec import NO_SLO, SLO
from cbatch.results import metrics
from cbatch.results.attainment import MOST_NAMES, attainment, goodput
from cbatch.results.gathered import Gathered
from cbatch.results.metrics import Entry, Figures, Floats, Served, StepColumns, Window, statistics
from cbatch.results.replicas import balance, cost, most_paid, paid_shares, recomputed_after, transfers_of
from cbatch.results.service import fairness, service_of, waits_of_clients
from cbatch.results.sessions import session_figures
from cbatch.results.utilisation import Machines, energy, utilisation

Most = int | NDArray[np.int64]  # a limit of all iterations, or of each
_OF_HOST = ("planned_at", "launched_at"), ("received_at", "done_at")  # columns with begins and ends of its work


def summarize(
    record: RunRecord | Gathered,
    *,
    num_blocks: Most,
    max_batch: Most,
    overshoot_tokens: int = 0,
    warmup_requests: int = 0,
    drain_requests: int = 0,
    objectives: SLO = NO_SLO,
    client_weights: Mapping[str, float] | None = None,
    num_evicted_blocks: int | None = None,
    host: Mapping[str, float] | None = None,
    num_replicas: int = 1,
    num_warming: int = 0,
    block_size: int = 1,
    prices: Sequence[float] | None = None,
    machines: Machines | None = None,
    readings: Floats | None = None,
    outcomes: Floats | None = None,
) -> dict[str, Any]:
    """Returns all metrics of a run, by group; times in seconds, shares from 0 to 1, NaN where nothing was measured.

    Args:
        num_blocks, max_batch: size of the KV cache, and limit of a batch; an array by iteration if replicas differ.
        overshoot_tokens: `State.num_overshoot_tokens`.
        warmup_requests, drain_requests: see `Gathered.window`. A request counts if its end lies in the window.
        objectives: for `goodput`, of requests without objectives of their own.
        client_weights: see `service_of`.
        num_evicted_blocks: cached blocks that were overwritten; None without a prefix cache.
        host: bytes copied and seconds waited, for `prefix_cache.host`; None without host memory for the cache.
        num_replicas: for `replicas`, of which there must be several.
        num_warming: `Facts.num_warming`; these requests are left out in addition to `warmup_requests`.
        block_size: tokens per block of the prefix cache.
        machines: None: unknown, without `mfu` and `mbu`; without watts no predicted `energy`.
        readings: of the energy counters, for a measured `energy`, see `measured_energy`; None: none.
        outcomes: of drafts by place in the whole run, see `Shares.counts`, for `drafts.survivals`; None: unknown.
        prices: US dollars per hour of each replica; None: unknown, without `cost`.
    """
    run = Gathered(record) if isinstance(record, RunRecord) else record
    requests, steps, ended = run.served, run.steps, run.ended
    window = run.window(warmup_requests, drain_requests, num_warming)
    begins_later = warmup_requests or num_warming
    ends = Window(window.start if begins_later else -math.inf, window.end if drain_requests else math.inf)
    measured = [request for request in ended if ends.start < request.finished_at <= ends.end]
    present = paid_shares(run.lives, window, num_replicas)
    paid = None if prices is None else np.array(prices) * present
    throughput = _throughput(requests, run.prompts(window), window)
    service = service_of(ended, requests, client_weights)
    clients = waits_of_clients(service, requests, window) if service and len(service.clients) <= MOST_NAMES else None
    cached_by = None if num_evicted_blocks is None else block_size
    shares = {} if machines is None else utilisation(machines, steps, window, present)
    return _known(
        run=_run(run, window, overshoot_tokens, num_replicas),
        throughput=throughput,
        **_latencies(requests, window),
        clients=clients,
        iterations=_iterations(steps, window, num_blocks, max_batch, present),
        drafts=_drafts(steps, window, outcomes) if steps["num_drafts"].any() else None,
        mfu=shares.get("mfu"),
        mbu=shares.get("mbu"),
        goodput=goodput(ended, requests, ends, objectives, window.seconds),
        attainment=attainment(ended, requests, ends),
        service={} if service is None else fairness(service),
        prefix_cache=None if num_evicted_blocks is None else _prefix_cache(measured, num_evicted_blocks, host),
        sessions=session_figures(run, ends, window.seconds, num_warming, cached_by),
        cost=None if paid is None else cost(float(paid.sum()), window, throughput),
        energy=energy(machines, readings, steps, window, present),
        replicas=balance(run, window, num_replicas) if num_replicas > 1 else None,
        transfers=transfers_of(run, window) if run.transfers or run.lost else None,
        pools=_pools(run, window, paid, present, num_blocks, max_batch),
    )


def _known(**figures: Any) -> dict[str, Any]:
    """Leaves out the groups and figures that this run does not have, which are None."""
    return {name: value for name, value in figures.items() if value is not None}


def _latencies(requests: Served, window: Window) -> Figures:
    counts = window.holds(requests.last_token)
    return {
        "ttft_seconds": statistics(requests.ttft[counts]),
        "tbt_seconds": requests.gap_statistics(window),
        "longest_gap_seconds": statistics(requests.longest_gap[counts]),
        "tpot_seconds": statistics(requests.tpot[counts]),
        "scheduling_delay_seconds": statistics(requests.scheduling_delay[counts]),
        "end_to_end_seconds": statistics(requests.end_to_end[counts]),
        "normalized_latency_seconds_per_token": statistics(requests.normalized_latency[counts]),
    }


def _pools(
    run: Gathered, window: Window, paid: Floats | None, present: Floats, num_blocks: Most, max_batch: Most
) -> dict[str, dict[str, Any]] | None:
    """Returns what each pool served and computed in the whole run, its replicas together, and the latencies, iterations and cost of the window.

    paid: mean dollars per hour of each replica. present: see `utilisation`.
    """
    figures = dict[str, dict[str, Any]]()
    for pool, of_pool in run.of_pool.items():
        members, served = run.members(pool), of_pool.served
        most = most_paid(life for life in run.lives if run.pools[life.replica] == pool)
        throughput = _throughput(served, run.prompts(window, members), window)
        figures[pool] = _known(
            replicas=run.pools.count(pool),
            mean_replicas=float(present[members].sum()) if run.lives else None,
            most_replicas=most if run.lives else None,
            requests=len(of_pool.ended),
            output_tokens=sum(request.num_output_tokens for request in of_pool.ended),
            prefill_tokens=int(of_pool.steps["num_prefill_tokens"].sum()),
            counted_requests=int(window.holds(served.last_token).sum()),
            **_latencies(served, window),
            iterations=_iterations(run.steps, window, num_blocks, max_batch, present * members),
            cost=None if paid is None else cost(float(paid[members].sum()), window, throughput),
        )
    return figures or None


def _prefix_cache(ended: Collection[Entry], num_evicted: int, host: Mapping[str, float] | None) -> dict[str, Any]:
    """Returns the figures of requests that end in the measured part: of all, and by tier and client where requests name them."""
    return _known(
        **hits_of(ended),
        evicted_blocks=num_evicted,
        tiers=_hits_by("tier", ended) or None,
        clients=_hits_by("client", ended) or None,
        host=None if host is None else {**hits_of(ended, "num_host_tokens"), **host},
    )


def _hits_by(attribute: str, requests: Iterable[Entry]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[Entry]] = {}
    for request in requests:
        if (name := getattr(request, attribute)) is not None:
            groups.setdefault(name, []).append(request)
    return {name: hits_of(groups[name]) for name in sorted(groups)}


def hits_of(requests: Iterable[Entry], found: str = "num_cached_tokens") -> dict[str, float]:
    """Returns the tokens that requests found in the prefix cache at their first admission, and separately those found later.

    found: the attribute with the tokens of the first admission; of a tier, the tokens found later are unknown.
    """
    admitted = [request for request in requests if request.admitted_at is not None]
    cached: int = sum(getattr(request, found) for request in admitted)
    looked_up = sum(request.num_prompt_tokens for request in admitted)
    hits = {"hit_share": cached / looked_up if looked_up else float("nan"), "cached_tokens": cached}
    if found == "num_cached_tokens":
        hits["cached_again_tokens"] = sum(request.num_cached_again for request in admitted)
    return hits


def _run(run: Gathered, window: Window, overshoot_tokens: int, num_replicas: int) -> Figures:
    """Returns figures of the whole run, warm-up and drain included; `counted_*` describe the window."""
    ended, requests, steps = run.ended, run.served, run.steps
    computed = float(steps["num_prefill_tokens"].sum() + steps["num_decode_tokens"].sum())
    lost = sum(request.num_lost_tokens for request in ended)
    recomputed = sum(request.num_recomputed_tokens for request in ended)
    num_cancelled = sum(request.finish_reason is FinishReason.CANCELLED for request in ended)
    rejected = (request for request in ended if request.finish_reason is FinishReason.REJECTED)
    num_broken_off = sum(request.num_output_tokens > 0 for request in rejected)
    offered = offered_rate(ended)
    return _known(
        requests=len(ended),
        rejected_requests=len(ended) - len(requests.id) - num_cancelled - num_broken_off,
        broken_off_requests=num_broken_off or None,
        cancelled_requests=num_cancelled or None,
        counted_requests=int(window.holds(requests.last_token).sum()),
        iterations=len(steps["done_at"]),
        seconds=float(steps["done_at"][-1] - metrics.began(steps, requests)) if len(steps["done_at"]) else 0.0,
        counted_seconds=window.seconds,
        preemptions=sum(request.num_preemptions for request in ended),
        lost_tokens=lost if lost != recomputed else None,
        recomputed_tokens=recomputed,
        recomputed_share=recomputed / computed if computed else math.nan,
        **(recomputed_after(ended) if run.prefilled_on else {}),
        offered_requests_per_second=offered,
        overshoot_tokens=overshoot_tokens,
        tail_share=_tail_share(steps, window) if num_replicas == 1 and math.isnan(offered) else None,
    )


def _tail_share(steps: StepColumns, window: Window) -> float:
    """Returns the share of the window after the last iteration in which as many requests ran or waited as ever ran together."""
    running = steps["num_running"]
    full = steps["ended"][running + steps["num_waiting"] >= running.max(initial=0)]
    start = max(float(full[-1]) if len(full) else window.start, window.start)
    return max(window.end - start, 0.0) / window.seconds if window.seconds else math.nan


def offered_rate(submitted: Collection[Entry]) -> float:
    """Returns the requests that arrive per second from the first to the last arrival, the first one not counted; NaN if all arrive at once."""
    times = np.array([request.arrival_time for request in submitted])
    span = float(np.ptp(times)) if len(times) else 0.0
    return (len(times) - 1) / span if span > 0 else math.nan


def _throughput(requests: Served, prompts: int, window: Window) -> dict[str, float]:
    """Returns useful work per second: served requests and their tokens, as docs/metrics.md defines them. prompts: see `Gathered.prompts`."""
    seconds = window.seconds or float("nan")
    prefill = prompts / seconds
    decode = requests.num_tokens(window) / seconds
    return {
        "total_tokens_per_second": prefill + decode,
        "prefill_tokens_per_second": prefill,
        "decode_tokens_per_second": decode,
        "requests_per_second": int(window.holds(requests.last_token).sum()) / seconds,
    }


def _iterations(steps: StepColumns, window: Window, num_blocks: Most, max_batch: Most, present: Floats) -> Figures:
    """Returns unweighted means over the iterations whose tokens arrived within the window, at replicas that are present: see `utilisation`."""
    inside = window.holds(steps["received_at"]) & (present > 0)[steps["replica"]]
    averaged = ("num_requests", "num_prefill_tokens", "num_decode_tokens", "num_padding_tokens")
    batch, prefill, decode, padding = (metrics.mean(steps[name][inside]) for name in averaged)
    occupied = _shares(steps["num_requests"], max_batch, inside)
    held = _shares(steps["kv_blocks_used"], num_blocks, inside)
    tokens = prefill + decode + padding
    return {
        "batch_requests": batch,
        "batch_occupancy": occupied[0],
        "batch_tokens": tokens,
        "padding_share": padding / tokens,
        "kv_use_mean": held[0],
        "kv_use_peak": held[1],
        "device_active_share": _active_share(steps, window, present, ("started", "ended")),
        "host_active_share": _active_share(steps, window, present, *_OF_HOST),
    }


def _active_share(steps: StepColumns, window: Window, present: Floats, *spans: tuple[str, str]) -> float:
    """Returns the share of the window, and of the time for which replicas are present, in which they are busy. spans: columns with begins and ends."""
    each = (steps["replica"] == one for one in np.flatnonzero(present))
    busy = sum(metrics.busy_seconds(steps[begin][own], steps[end][own], window) for own in each for begin, end in spans)
    return busy / (window.seconds * float(present.sum()) or math.nan)


def _drafts(steps: StepColumns, window: Window, outcomes: Floats | None) -> Figures:
    """Returns figures of the speculation in the iterations whose tokens arrived within the window, and survivals over the whole run."""
    inside, tried = window.holds(steps["received_at"]), np.zeros((2, 0)) if outcomes is None else outcomes
    accepted_of, tried_of = tried[:, tried[1] > 0]
    survivals = {str(place): share for place, share in enumerate((accepted_of / tried_of).cumprod().tolist(), 1)}
    requests, drafts, accepted = (int(steps[f"num_{name}"][inside].sum()) for name in ("drafted", "drafts", "accepted"))
    return _known(
        drafts=drafts,
        accepted=accepted,
        wasted_tokens=drafts - accepted,
        accepted_share=accepted / drafts if drafts else math.nan,
        acceptance_length=1 + accepted / requests if requests else math.nan,
        survivals=survivals or None,
    )


def _shares(counts: NDArray[Any], most: Most, inside: NDArray[np.bool_]) -> tuple[float, float]:
    """Returns the mean and the largest share of `most` over the iterations inside the window; NaN without any."""
    if not inside.any():
        return math.nan, math.nan
    if isinstance(most, int):
        return metrics.mean(counts[inside]) / most, float(counts[inside].max() / most)
    shares = counts[inside] / most[inside]
    return metrics.mean(shares), float(shares.max())
