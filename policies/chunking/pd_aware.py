"""The best chunk for the workload's P:D ratio: SARATHI, sections 4.3 and 5.1.3 (arXiv 2308.16369).

Each tile-aligned total is rated by its steady state (`steady_state`), with iteration times from the cost model and without a
sweep. Lengths are configured, or estimated from ended requests.
"""

from collections import deque
from collections.abc import Iterable

from cbatch import SERVED, ConfigError, Limits, Request, View
from policies.chunking.selector import ChunkSelector
from policies.chunking.steady_state import best_total

TYPICAL = 8
"""Number of prompts that represent all observed lengths; the time to choose a total grows with it."""


class PDAware(ChunkSelector):
    steady = True

    def __init__(self, pd_ratio: float | None = None, window: int = 32, tolerance: float = 0.05) -> None:
        """
        Args:
            pd_ratio: prompt tokens / output tokens of the workload, if known; None = estimate from ended requests.
            window: number of ended requests in the estimate.
            tolerance: choose again when an estimated length has changed by more than this share.
        """
        if pd_ratio is not None and not pd_ratio > 0:
            raise ConfigError(f"chunking.pd_ratio={pd_ratio} must be above 0, or null to estimate it")
        if window < 1 or tolerance < 0:
            raise ConfigError(f"chunking.window={window} and chunking.tolerance={tolerance}: need >= 1 and >= 0")
        self.pd_ratio, self.window, self.tolerance = pd_ratio, window, tolerance
        self.total = 0  # tokens of an iteration, including decodes; 0 = not chosen yet
        self._seen: deque[tuple[int, int]] = deque(maxlen=window)  # (prompt, output) tokens of ended requests
        self._chosen_for = (0.0, 0.0)
        self._news = True  # whether requests have ended since the last choice

    def num_tokens(self, view: View, num_decodes: int) -> int:
        if self._news:
            self._choose(view)
        return max(self.total - num_decodes, 0)

    def check(self, limits: Limits) -> None:
        if limits.max_tokens < max(limits.tile, limits.max_batch):
            raise ConfigError(
                f"max_tokens={limits.max_tokens} has no room for a tile of {limits.tile} tokens beside "
                f"{limits.max_batch - 1} decodes; raise max_tokens"
            )

    def observe(self, request: Request) -> None:
        if request.finish_reason in SERVED:
            self._seen.append((request.num_prompt_tokens, request.num_output_tokens))
            self._news = True

    def _choose(self, view: View) -> None:
        """Chooses a total if the mean prompt or output has changed since the last choice."""
        self._news = False
        # before the first request ends, use the lengths of running or waiting requests
        lengths = self._seen or _expected(view.running) or _expected(view.waiting[: view.limits.max_batch]) or [(1, 1)]
        prompts = [prompt for prompt, _ in lengths]
        prompt = sum(prompts) / len(prompts)
        output = prompt / self.pd_ratio if self.pd_ratio else sum(tokens for _, tokens in lengths) / len(lengths)
        change = max(_change(prompt, self._chosen_for[0]), _change(output, self._chosen_for[1]))
        if not self.total or change > self.tolerance:
            self.total = best_total(view.cost, view.limits, _typical(prompts), output)
            self._chosen_for = prompt, output


def _expected(requests: Iterable[Request]) -> list[tuple[int, int]]:
    """Returns the (prompt, output) tokens expected before the requests end."""
    return [(request.num_prompt_tokens, request.predicted_new_tokens or request.max_new_tokens) for request in requests]


def _typical(lengths: list[int]) -> list[int]:
    """Returns the median of each eighth by length; one length if all are equal."""
    if min(lengths) == max(lengths):
        return lengths[:1]
    ordered = sorted(lengths)
    return [ordered[(2 * place + 1) * len(ordered) // (2 * TYPICAL)] for place in range(TYPICAL)]


def _change(new: float, old: float) -> float:
    return abs(new - old) / old if old else float("inf")
