"""Computes the attainment of the requests' objectives (`RequestSpec.slo`), also by tier and client, and goodput.

A request attains its objectives if its first token, all gaps between its tokens and its last token are in time. Rejected,
cancelled and unfinished requests attain none and count in the denominator. Otherwise a policy would gain by dropping late
requests, or by letting clients wait until they leave.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, astuple
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.request_spec import NO_SLO, SLO
from cbatch.results.metrics import Entry, Floats, Served, Window, mean

OBJECTIVES = {"ttft": "TTFT", "tbt": "every gap", "tpot": "TPOT", "total": "end to end"}
"""Fields of `SLO` in words."""

MOST_NAMES = 100
"""Tiers or clients with figures of their own. With more, requests.csv has their requests."""

_ALWAYS = Window(-np.inf, np.inf)


class Attained(NamedTuple):
    """Objectives met. met, limits: [objectives, requests]; limit inf: no objective. counted: [requests]; ended in the window."""

    met: NDArray[np.bool_]
    limits: Floats
    counted: NDArray[np.bool_]

    def of(self, members: NDArray[np.bool_]) -> "Attained":
        return Attained(self.met[:, members], self.limits[:, members], self.counted[members])


def attainment(requests: Collection[Entry], served: Served, window: Window) -> dict[str, Any]:
    """Returns attained shares of the requests that have objectives and ended in the window; empty without objectives.

    `share`: requests that attain all their objectives. `ttft_share`, `tbt_share`, `total_share`, `tpot_share`: requests that attain the
    objective, among the requests that have it. `tiers`: the same by tier; `clients`: by client, if requests name theirs.

    requests: all requests of the run, served or not. window: if infinite, also counts requests that did not end.
    """
    requests = [request for request in requests if request.slo != NO_SLO]
    if not requests:
        return {}
    attained = judge(requests, served, window)
    clients = _by_name(attained, [request.client for request in requests])
    tiers = _by_name(attained, [request.tier for request in requests])
    return {**_shares(attained), "tiers": tiers, **({"clients": clients} if clients else {})}


def _by_name(attained: Attained, given: Sequence[str | None]) -> dict[str, dict[str, float]]:
    names = np.array([name or "" for name in given])
    several = np.unique(names[names != ""])
    return {str(name): _shares(attained.of(names == name)) for name in several if len(several) <= MOST_NAMES}


def stated_objectives(requests: Iterable[Entry], others: SLO) -> dict[str, str]:
    """Returns the objectives that all requests of a tier share, as in `TTFT 0.5 s, every gap 0.05 s`, by tier; under "" those of all requests.

    others: default objectives of requests that carry none. Requests that then have none do not count.
    """
    texts: dict[str, set[str]] = {}
    for tier, slo in {(request.tier or "", request.slo) for request in requests}:
        limits = asdict(others if slo == NO_SLO else slo)
        text = ", ".join(f"{OBJECTIVES[name]} {limit:g} s" for name, limit in limits.items() if limit is not None)
        for name in {tier, ""} if text else ():
            texts.setdefault(name, set()).add(text)
    return {name: "".join(shared) for name, shared in texts.items() if len(shared) == 1}


def num_without(requests: Iterable[Entry], others: SLO) -> int:
    """Returns how many requests have no objective, so that goodput leaves them out. others: see `stated_objectives`."""
    return sum({others, request.slo} == {NO_SLO} for request in requests)


def goodput(
    requests: Collection[Entry], served: Served, window: Window, objectives: SLO, seconds: float
) -> dict[str, float]:
    """Returns the requests that attain their objectives, per second and as a share; empty without objectives.

    Args:
        requests, window: see `attainment`; requests without objectives do not count.
        objectives: default objectives of requests that carry none.
        seconds: duration of the measured part of the run.
    """
    requests = [request for request in requests if {objectives, request.slo} != {NO_SLO}]
    if not requests:
        return {}
    judged = judge(requests, served, window, objectives)
    attained = judged.met[:, judged.counted].all(axis=0)
    return {"requests_per_second": float(attained.sum()) / (seconds or float("nan")), "attained_share": mean(attained)}


def judge(requests: Collection[Entry], served: Served, window: Window = _ALWAYS, others: SLO = NO_SLO) -> Attained:
    """Returns which objectives requests met, in the order of `SLO`. Requests outside `served` met none.

    others: default objectives of requests that carry none.
    """
    place = {id_: index for index, id_ in enumerate(served.id.tolist())}
    index = np.array([place.get(request.id, -1) for request in requests], np.intp)
    ends = [np.inf if request.finished_at is None else request.finished_at for request in requests]
    gaps = np.nan_to_num(served.longest_gap), np.nan_to_num(served.tpot)
    measured = np.stack([served.ttft, gaps[0], served.end_to_end, gaps[1]])  # [objectives, served]
    stated = [astuple(others if request.slo == NO_SLO else request.slo) for request in requests]
    limits = np.array([[limit or np.inf for limit in column] for column in zip(*stated, strict=True)])
    met = (index >= 0) & (np.pad(measured, ((0, 0), (0, 1)))[:, index] <= limits)
    return Attained(met, limits, window.holds(np.array(ends)))


def _shares(attained: Attained) -> dict[str, float]:
    met, limits, counted = attained
    shares = {"requests": int(counted.sum()), "share": mean(met[:, counted].all(axis=0))}
    for name, met_one, limit in zip(SLO.__slots__, met, limits, strict=True):
        if np.isfinite(limit).any():
            shares[f"{name}_share"] = mean(met_one[counted & np.isfinite(limit)])
    return shares
