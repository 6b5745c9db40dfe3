"""The chunk that the ratio of prompt to output tokens asks for: SARATHI, sections 4.3 and 5.1.3 (arXiv 2308.16369).

Too small a chunk computes prompts inefficiently; too large a one spends the prompts before the decodes, which then run
alone. The paper's optimum balances both: P:D = C / (B - 1). Here each tile-aligned total C is judged by the steady state
it leads to (see `steady_state_seconds`), with iteration times from the cost model, so that the steps of the hardware at
hand - and attention, and a batch that prompts cannot fill - are weighed in. Lengths are those stated, or those seen.
"""

from __future__ import annotations

from collections import deque

from cbatch import BatchShape, ConfigError, CostModel, Limits, Request, View
from policies.chunking.selector import ChunkSelector


class PDAware(ChunkSelector):
    def __init__(self, pd_ratio: float | None = None, window: int = 64, tolerance: float = 0.05) -> None:
        """
        Args:
            pd_ratio: prompt tokens / output tokens of the workload, if known; None = estimate from ended requests.
            window: ended requests that the estimate looks back on.
            tolerance: choose anew when an estimated length has moved by more than this share.
        """
        if pd_ratio is not None and not pd_ratio > 0:
            raise ConfigError(f"chunking.pd_ratio={pd_ratio} must be above 0, or null to estimate it")
        if window < 1 or tolerance < 0:
            raise ConfigError(f"chunking.window={window} and chunking.tolerance={tolerance}: need >= 1 and >= 0")
        self.pd_ratio = pd_ratio
        self.tolerance = tolerance
        self.total = 0  # tokens of an iteration, decodes included; 0 = not chosen yet
        self._seen: deque[tuple[int, int]] = deque(maxlen=window)  # (prompt, output) tokens of ended requests
        self._chosen_for = (0.0, 0.0)
        self._news = True  # lengths were seen that the choice does not know yet

    def num_tokens(self, view: View, num_decodes: int) -> int:
        if self._news:
            self._choose(view)
        return max(self.total - num_decodes, 0)

    def check(self, limits: Limits) -> None:
        if limits.max_tokens < max(limits.tile, limits.max_batch):
            raise ConfigError(f"max_tokens={limits.max_tokens} holds no tile of {limits.tile} tokens beside "
                              f"{limits.max_batch - 1} decodes; raise max_tokens")  # fmt: skip

    def observe(self, request: Request) -> None:
        if request.num_output_tokens:
            self._seen.append((request.num_prompt_tokens, request.num_output_tokens))
            self._news = True

    def _choose(self, view: View) -> None:
        self._news = False
        prompt, output = self._lengths(view)
        if max(_change(prompt, self._chosen_for[0]), _change(output, self._chosen_for[1])) > self.tolerance:
            self.total = best_total(view.cost, view.limits, prompt, output)
            self._chosen_for = prompt, output

    def _lengths(self, view: View) -> tuple[float, float]:
        """Mean prompt and output tokens of a request: of those ended; before the first end, of those at hand."""
        seen = self._seen or [(r.num_prompt_tokens, _expected_output(r)) for r in view.running]
        if not seen:
            seen = [(r.num_prompt_tokens, _expected_output(r)) for r in view.waiting[: view.limits.max_batch]]
        prompt = sum(tokens for tokens, _ in seen) / len(seen) if seen else 1.0
        output = sum(tokens for _, tokens in seen) / len(seen) if seen else 1.0
        return (prompt, output) if self.pd_ratio is None else (prompt, prompt / self.pd_ratio)


def best_total(cost: CostModel, limits: Limits, prompt: float, output: float) -> int:
    """The tokens of an iteration with the highest steady-state throughput, among multiples of the tile.

    Args:
        prompt, output: mean tokens of a request.
    """
    longest = min(limits.max_tokens, prompt + limits.max_batch + limits.tile)
    totals = [total for total in range(limits.tile, int(longest) + 1, limits.tile) if total >= limits.max_batch]
    if not totals:  # the tile is larger than an iteration may be, or than the batch leaves room for
        return limits.max_tokens
    return min(totals, key=lambda total: (steady_state_seconds(cost, total, limits.max_batch, prompt, output), total))


def steady_state_seconds(cost: CostModel, total: int, batch: int, prompt: float, output: float) -> float:
    """Seconds that one request takes of the device when `batch` requests are served without pause.

    A prompt takes k iterations of `total` tokens. If the decodes of the requests before it have not run out by then
    (output >= k (batch - 1)), each of them holds batch - 1 decodes, and a request lives k + output iterations, of which
    (k + output) / batch pass between two ends: k mixed ones, the others with `batch` decodes and no prompt. If they run
    out, k iterations of output / k decodes are all there is, and k = (prompt + output) / total.
    """
    decodes = min(batch - 1, output * total / (prompt + output))
    chunk = max(total - decodes, 1.0)
    num_chunks = prompt / chunk
    context = prompt + output / 2  # of a decode, on average
    full, rest = divmod(prompt, chunk)
    seconds = full * cost.predict(_shape(chunk, (prompt - rest) / 2, decodes, context))
    if rest >= 1:
        seconds += cost.predict(_shape(rest, prompt - rest, decodes, context))
    decode_only = (num_chunks + output) / batch - num_chunks
    if decode_only > 0:
        seconds += decode_only * cost.predict(_shape(0, 0, batch, context))
    return seconds


def _shape(chunk: float, chunk_context: float, decodes: float, decode_context: float) -> BatchShape:
    count = round(decodes)
    chunks = ((round(chunk), round(chunk_context)),) if chunk else ()
    return BatchShape(chunks, count, round(count * decode_context))


def _expected_output(request: Request) -> int:
    return request.predicted_new_tokens or request.max_new_tokens


def _change(new: float, old: float) -> float:
    return abs(new - old) / old if old else float("inf")
