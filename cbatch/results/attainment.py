"""Attainment of the objectives that requests carry (`RequestSpec.slo`): shares of all that were asked for, by tier.

A request attains its objectives if its first token, every gap between its tokens and its last token are all in time. A
request that was rejected, or had not ended when the run did, attains none and counts: leaving it out would reward a
policy that drops late requests.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.request import Request
from cbatch.request_spec import NO_SLO
from cbatch.results.metrics import Floats, Served, Window, mean

_OBJECTIVES = ("ttft", "tbt", "total")


def attainment(asked: Sequence[Request], served: Served, window: Window) -> dict[str, Any]:
    """Shares of the requests that have objectives and ended, or were rejected, in the window; empty if none has any.

    `share`: all objectives together; `ttft_share`, `tbt_share`, `total_share`: each objective, over the requests that
    have it; `tiers`: the same by tier.

    Args:
        asked: every request of the run. window: up to infinity, it counts requests that did not end.
    """
    asked = [request for request in asked if request.slo != NO_SLO]
    if not asked:
        return {}
    place = {id_: index for index, id_ in enumerate(served.id.tolist())}
    index = np.array([place.get(request.id, -1) for request in asked])
    ends = [np.inf if request.finished_at is None else request.finished_at for request in asked]
    counted = window.holds(np.array(ends))
    measured = np.stack([served.ttft, np.nan_to_num(served.longest_gap), served.end_to_end])  # [objectives, served]
    limits = np.array([[getattr(request.slo, name) or np.inf for request in asked] for name in _OBJECTIVES])
    met = (index >= 0) & (np.pad(measured, ((0, 0), (0, 1)))[:, index] <= limits)
    tiers = np.array([request.tier or "" for request in asked])
    members = {str(tier): tiers == tier for tier in np.unique(tiers[tiers != ""])}
    by_tier = {tier: _shares(met[:, own], limits[:, own], counted[own]) for tier, own in members.items()}
    return {**_shares(met, limits, counted), "tiers": by_tier}


def _shares(met: NDArray[np.bool_], limits: Floats, counted: NDArray[np.bool_]) -> dict[str, float]:
    """met, limits: [objectives, requests], limits infinite where there is none. counted: [requests]."""
    shares = {"requests": int(counted.sum()), "share": mean(met[:, counted].all(axis=0))}
    for name, each, limit in zip(_OBJECTIVES, met, limits, strict=True):
        if np.isfinite(limit).any():
            shares[f"{name}_share"] = mean(each[counted & np.isfinite(limit)])
    return shares
