"""Computes what replicas cost, how requests are spread over them, and when they are there."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from cbatch.record import Life
from cbatch.request import SERVED
from cbatch.results.gathered import Gathered
from cbatch.results.metrics import Entry, Figures, Floats, Window, mean

COLUMNS = (
    *("replica", "pool", "asked", "ready", "draining", "closed", "requests", "prompt_tokens", "output_tokens"),
    *("prefill_tokens", "paid_seconds", "dollars", "dollars_per_request", "dollars_per_million_tokens"),
)
"""Columns of replicas.csv, which has a row for each lifetime of a replica."""


def paid_shares(lives: Sequence[Life], window: Window, num_replicas: int) -> Floats:
    """Returns the share of the window for which each replica is paid, [replicas]; 1 without lives."""
    if not lives:
        return np.ones(num_replicas)
    paid = np.zeros(num_replicas)
    for life in lives:
        paid[life.replica] += _paid(life, window)
    return paid / (window.seconds or math.nan)


def _paid(life: Life, window: Window) -> float:
    return max(min(life.closed, window.end) - max(life.asked, window.start), 0.0)


def cost(dollars_per_hour: float, window: Window, throughput: Mapping[str, float]) -> Figures:
    """Returns the price of the window, whole and over its requests and tokens; each kind of tokens is charged with all of it."""
    kinds = {"": "total", "prompt_": "prefill", "output_": "decode"}
    rates = {f"million_{name}tokens": throughput[f"{kind}_tokens_per_second"] / 1e6 for name, kind in kinds.items()}
    rates = {"request": throughput["requests_per_second"], **rates}
    return {
        "dollars_per_hour": dollars_per_hour,
        "dollars": dollars_per_hour * window.seconds / 3600,
        **{f"dollars_per_{of}": dollars_per_hour / 3600 / rate if rate else math.nan for of, rate in rates.items()},
    }


def balance(run: Gathered, window: Window, num_replicas: int) -> Figures:
    """Returns how the whole run's requests are spread over the replicas and, with an autoscaler, the replica-seconds of the window.

    Replicas that were never ready are left out and, with roles, pools that end no request, except from those that computed nothing (`idle`).
    """
    counts = np.bincount(np.array([*run.replica_of.values()], int), minlength=num_replicas)
    ran = {life.replica for life in run.lives if life.ready < math.inf} or {*range(num_replicas)}
    idle = len(ran.difference(run.steps["replica"].tolist()))
    ending = {run.pools[replica] for replica in run.replica_of.values() if run.pools}
    if ending and (run.transfers or run.lost):
        ran &= {replica for replica, pool in enumerate(run.pools) if pool in ending}
    counts = counts[sorted(ran)]
    spread: Figures = {"least_requests": int(counts.min()), "most_requests": int(counts.max())}
    spread |= {"idle": idle} if idle else {}
    if not run.lives:
        return spread
    mean = float(paid_shares(run.lives, window, num_replicas).sum())
    return {
        **spread,
        "seconds": mean * window.seconds,
        "mean": mean,
        "most": most_paid(run.lives),
        "lives": len(run.lives),
    }


def most_paid(lives: Iterable[Life]) -> int:
    """Returns the most replicas that are paid at a time."""
    changes = sorted((at, by) for life in lives for at, by in ((life.asked, 1), (life.closed, -1)))
    return int(np.cumsum([by for _, by in changes]).max(initial=0))


def rows_of(run: Gathered, prices: Sequence[float] | None, num_replicas: int) -> Iterator[tuple[object, ...]]:
    """Yields the rows of replicas.csv for the whole run."""
    whole = run.window()
    lives = run.lives or [Life(replica, whole.start, whole.start) for replica in range(num_replicas)]
    closings: dict[int, list[float]] = {replica: [] for replica in range(num_replicas)}
    sums: dict[int, list[list[int]]] = {replica: [] for replica in range(num_replicas)}
    for life in lives:
        closings[life.replica].append(life.closed)
        sums[life.replica].append([0, 0, 0, 0])
    for request in run.ended:
        if request.finish_reason in SERVED:
            replica = run.replica_of[request.id]
            own = sums[replica][bisect_left(closings[replica], request.finished_at)]
            own[0] += 1
            own[2] += request.num_output_tokens
    served = run.served
    prompts = run.prefillers.tolist(), served.first_token.tolist(), served.prompt_tokens.tolist()
    prefills = [run.steps[name].tolist() for name in ("replica", "launched_at", "num_prefill_tokens")]
    for place, columns in ((1, prompts), (3, prefills)):
        for replica, at, number in zip(*columns, strict=True):
            sums[replica][bisect_left(closings[replica], at)][place] += number
    for life in lives:
        own, seconds = sums[life.replica].pop(0), _paid(life, whole)
        dollars = None if prices is None else prices[life.replica] * seconds / 3600
        each = [dollars and over and dollars / over for over in (own[0], (own[1] + own[2]) / 1e6)]
        pool = run.pools[life.replica] if run.pools else ""
        times = (life.asked, life.ready, life.draining, life.closed)
        stated = (None if time == math.inf else time for time in times)
        yield (life.replica, pool, *stated, *own, seconds, dollars, *(value or None for value in each))


def recomputed_after(ended: Collection[Entry]) -> Figures:
    """Returns the parts of `run.recomputed_tokens`, by what the tokens were lost to."""
    moves = sum(request.num_recomputed_after_moves for request in ended)
    leases = sum(request.num_recomputed_after_lost_leases for request in ended)
    return {
        "recomputed_after_preemptions": sum(request.num_recomputed_tokens for request in ended) - moves - leases,
        "recomputed_after_moves": moves,
        "recomputed_after_lost_leases": leases,
    }


def transfers_of(run: Gathered, window: Window) -> Figures:
    """Returns the transfers between replicas that ended in the window.

    waiting_seconds: mean from the first token until the decoder has room. visible_seconds: mean of the seconds after the prefill.
    next_token_seconds: mean from then to the second token. All three are of requests with all their tokens.
    copied_seconds: mean of copies of prefixes before prefills, if there are any. hidden_share: of the bytes, sent during the prefill.
    lost_leases, lost_tokens: requests whose blocks were freed before they could be read, and the tokens of these blocks.
    """
    ended, lost = ([each for each in of if window.start < each.ended <= window.end] for of in (run.transfers, run.lost))
    columns = (getattr(run.served, name).tolist() for name in ("id", "first_token", "second_token"))
    tokens = {id_: times for id_, *times in zip(*columns, strict=True)}
    served = [(sent, *tokens[sent.request]) for sent in ended if sent.request in tokens]
    moves = [each for each in served if each[0].started >= each[1]]
    copied = [sent.ended - sent.started for sent, first, _ in served if sent.started < first]
    waits = [(sent.started - first, sent.ended - sent.started, second - sent.ended) for sent, first, second in moves]
    waiting, visible, following = np.reshape(waits, (-1, 3)).T
    return {
        "number": len(ended),
        "tokens": sum(transfer.num_tokens for transfer in ended),
        "bytes": (num_bytes := sum(transfer.num_bytes for transfer in ended)),
        "waiting_seconds": mean(waiting),
        "visible_seconds": mean(visible),
        "next_token_seconds": mean(following),
        **({"copied_seconds": mean(np.array(copied))} if copied else {}),
        "lost_leases": len(lost),
        "lost_tokens": sum(each.num_tokens for each in lost),
        "hidden_share": sum(each.hidden * each.num_bytes for each in ended) / num_bytes if num_bytes else math.nan,
    }
