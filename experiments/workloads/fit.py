"""Makes the lengths of a trace fit a model: scaled, and capped."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from cbatch import WorkloadError
from cbatch.validation import positive, whole
from experiments.workloads.trace import MOST_TOKENS, Ints, Trace


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fields of every workload that takes lengths from a file.

    length_scale: multiplies prompt and output lengths, rounded, at least 1 token each. For small models.
    max_length: most tokens of prompt and output together, after scaling; None for no limit.
    too_long: for a longer request, "error" raises, "drop" leaves it out, "clip" shortens the prompt, as a server that
        truncates prompts does, and the output only once the prompt is down to 1 token.
    """

    length_scale: Annotated[float, positive("1 keeps the lengths of the trace")] = 1.0
    max_length: Annotated[int, whole(2)] | None = None
    too_long: Literal["error", "clip", "drop"] = "error"

    def fit(self, trace: Trace, num_requests: int | None = None) -> Trace:
        """The first requests of a trace that are not dropped, with lengths that fit; None takes all.

        Raises:
            WorkloadError: a request is too long, or there are fewer requests than asked for.
        """
        if self.length_scale != 1:
            columns = trace.prompt_tokens, trace.output_tokens
            prompts, outputs = (_scale(tokens, self.length_scale) for tokens in columns)
            trace = replace(trace, prompt_tokens=prompts, output_tokens=outputs)
        if self.max_length is None:
            return trace.first(num_requests)
        if self.too_long == "drop":
            return _drop(trace, self.max_length).first(num_requests)
        trace = trace.first(num_requests)
        return _clip(trace, self.max_length) if self.too_long == "clip" else _check(trace, self.max_length)


def _scale(tokens: Ints, scale: float) -> Ints:
    scaled: Ints = np.clip(np.floor(tokens * float(scale) + 0.5), 1, MOST_TOKENS).astype(np.int64)
    return scaled


def _clip(trace: Trace, max_length: int) -> Trace:
    output_tokens = np.minimum(trace.output_tokens, max_length - 1)
    prompt_tokens = np.minimum(trace.prompt_tokens, max_length - output_tokens)
    fields = dict(trace.fields)
    if "prefix_hashes" in fields:
        shares = prompt_tokens / trace.prompt_tokens
        fields["prefix_hashes"] = fields["prefix_hashes"].copy()
        for row in np.flatnonzero(shares < 1):
            hashes = fields["prefix_hashes"][row]
            fields["prefix_hashes"][row] = hashes[: int(np.ceil(len(hashes) * shares[row]))]
    return replace(trace, prompt_tokens=prompt_tokens, output_tokens=output_tokens, fields=fields)


def _drop(trace: Trace, max_length: int) -> Trace:
    fits = trace.prompt_tokens + trace.output_tokens <= max_length
    if not fits.any():
        remedy = "raise it, lower length_scale, or set too_long=clip"
        raise WorkloadError(f"{trace.source}: every request exceeds max_length={max_length}; {remedy}")
    return trace.select(fits)


def _check(trace: Trace, max_length: int) -> Trace:
    too_long = trace.prompt_tokens + trace.output_tokens > max_length
    if not too_long.any():
        return trace
    row = int(np.argmax(too_long))
    lengths = f"{trace.prompt_tokens[row]} prompt + {trace.output_tokens[row]} output tokens"
    remedy = "raise it, lower length_scale, or set too_long to clip or drop"
    raise WorkloadError(f"{trace.where(row)}: {lengths} exceed max_length={max_length}; {remedy}")
