"""InferCept's waste of memory, in token-seconds: tokens of KV cache that are held for nothing, times how long."""

from math import ceil


def waste_of_computing(
    tokens: int, budget: int, num_decodes: int, running: int, seconds: float, per_token: float
) -> float:
    """Returns the waste of computing tokens again, in chunks, by the formula of the code.

    budget: tokens of an iteration, which takes `seconds` and `per_token` for each. running: tokens that the decodes hold meanwhile.
    """
    chunk = max(budget - num_decodes, 1)
    more, rest = max(ceil(tokens / chunk) - 1, 0), tokens % chunk
    own = (seconds + per_token * budget) * (1 + more) * more / 2 * chunk
    return own + per_token * (chunk * more * running + rest * (running + rest))


def wastes(tokens: int, others: int, forward: float, pause: float, copies: float | None = None) -> dict[str, float]:
    """Returns the waste of each choice by the formulas of the paper.

    forward, copies: seconds to compute the tokens, and to copy them to host memory and back; None: it has no room.
    others: tokens of the batch beside them.
    """
    kept = {"discard": forward * (tokens + others), "preserve": pause * tokens}
    return kept if copies is None else {**kept, "swap": copies * (tokens + others)}
