"""The figure of summary.json that a command names: what a search improves, what a comparison compares."""

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from cbatch import SLO, ConfigError, FinishReason, Request, RunRecord
from cbatch.results.summary import summarize
from experiments.store.text import flat


def objective_of(summary: Mapping[str, Any], key: str) -> float:
    """Returns a number of a summary by its dotted key, as in "ttft_seconds.p99".

    Raises:
        ConfigError: there is no such number, or it has no value in this run.
    """
    numbers = {
        name: value
        for name, value in flat(summary)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
    if key not in numbers:
        raise ConfigError(no_such_figure(f"objective={key}", list(numbers)))
    value = numbers[key]
    if value is None or not math.isfinite(value):
        raise ConfigError(f"objective={key}: has no value in this run; choose another figure of summary.json")
    return float(value)


def check_figure(given: str, others: tuple[str, ...] = ()) -> None:
    """Raises ConfigError if no run has the figure that key=NAME names. others: beginnings of further names; those by tier and client
    show at the end of a run.
    """
    key, known = given.partition("=")[2], _known_figures()
    if key not in known and not key.startswith(("attainment.tiers.", "service.clients.", *others)):
        raise ConfigError(no_such_figure(given, known))


def _known_figures() -> list[str]:
    """Returns the dotted keys of every figure that a summary may have, from the summary of a run that served nothing."""
    request, record = Request(0, 1, 1, client="any", slo=SLO(1.0, 1.0, 1.0)), RunRecord()
    request.finish_reason, request.finished_at = FinishReason.REJECTED, 0.0
    record.requests.append(request)
    return [name for name, _ in flat(summarize(record, num_blocks=1, max_batch=1))]


def no_such_figure(given: str, known: Sequence[str]) -> str:
    """Returns the message for a key=NAME that names no number of a summary, or one that other runs have."""
    key = given.partition("=")[2]
    if key not in known and key in _known_figures():
        return f"{given}: this run has no {key.partition('.')[0]}; docs/metrics.md says of which requests it is"
    near = get_close_matches(key, known, 3, 0.3) or list(known)[:3]
    return f"{given}: summary.json has no such number; did you mean {' or '.join(near)}?"
