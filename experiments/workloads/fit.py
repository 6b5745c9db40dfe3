"""Makes the lengths of a trace fit a model: scaled, and held to a maximum."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from cbatch.errors import WorkloadError
from experiments.workloads.checks import check_choice, check_positive, check_whole
from experiments.workloads.trace import MOST_TOKENS, Ints, Trace

TooLong = Literal["error", "clip", "drop"]


def fit(
    trace: Trace,
    length_scale: float = 1.0,
    max_length: int | None = None,
    too_long: TooLong = "error",
    num_requests: int | None = None,
) -> Trace:
    """The first requests of a trace, with lengths that fit.

    Args:
        length_scale: multiplies prompt and output lengths; rounded, at least 1 token each. For models that are small.
        max_length: most tokens of prompt and output together, after scaling; None for no limit.
        too_long: what to do with a longer request. "error" raises; "drop" leaves it out; "clip" shortens the prompt,
            as a server that truncates prompts does, and the output only where the prompt is down to 1 token.
        num_requests: how many of the requests that are not left out; None for all.

    Raises:
        WorkloadError: a setting out of range, a request too long, or fewer requests than asked for.
    """
    check_positive("length_scale", length_scale, "1 keeps the trace's lengths")
    check_choice("too_long", too_long, get_args(TooLong))
    if max_length is not None:
        check_whole("max_length", max_length, 2)
    if length_scale != 1:
        trace = replace(
            trace,
            prompt_tokens=_scaled(trace.prompt_tokens, length_scale),
            output_tokens=_scaled(trace.output_tokens, length_scale),
        )
    if max_length is not None and too_long == "drop":
        trace = _dropped(trace, max_length)
    trace = trace.first(num_requests)
    if max_length is None:
        return trace
    return _clipped(trace, max_length) if too_long == "clip" else _checked(trace, max_length)


def _scaled(tokens: Ints, scale: float) -> Ints:
    scaled: Ints = np.clip(np.floor(tokens * float(scale) + 0.5), 1, MOST_TOKENS).astype(np.int64)
    return scaled


def _clipped(trace: Trace, max_length: int) -> Trace:
    output_tokens = np.minimum(trace.output_tokens, max_length - 1)
    prompt_tokens = np.minimum(trace.prompt_tokens, max_length - output_tokens)
    return replace(trace, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def _dropped(trace: Trace, max_length: int) -> Trace:
    fits = trace.prompt_tokens + trace.output_tokens <= max_length
    if not fits.any():
        raise WorkloadError(
            f"{trace.source}: every request exceeds max_length={max_length}: raise it, "
            "lower length_scale, or set too_long=clip"
        )
    return trace.select(fits)


def _checked(trace: Trace, max_length: int) -> Trace:
    too_long = np.flatnonzero(trace.prompt_tokens + trace.output_tokens > max_length)
    if len(too_long) == 0:
        return trace
    row = int(too_long[0])
    raise WorkloadError(
        f"{trace.where(row)}: {trace.prompt_tokens[row]} prompt + {trace.output_tokens[row]} output tokens exceed "
        f"max_length={max_length}: raise it, lower length_scale, or set too_long to clip or drop"
    )
