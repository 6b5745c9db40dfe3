"""The steady state for a total of tokens per iteration: SARATHI, sections 4.3 and 5.1.3 (arXiv 2308.16369).

    B = 3, a prompt in 2 chunks, 4 decodes      iteration   0  1  2  3  4  5  6  7  8  9 10 11
                                                slot 0      P  P  d  d  d  d  P  P  d  d  d  d
                                                slot 1      d  d  P  P  d  d  d  d  P  P  d  d
                                                slot 2      d  d  d  d  P  P  d  d  d  d  P  P

A total that is too small computes prompts inefficiently. A total that is too large finishes the prompts before the decodes,
which then run without prompts. The paper's optimum balances both: P:D = C / (B - 1). This module computes the optimum in whole
iterations with times from the cost model, which include the hardware's tile steps, attention, a nearly empty last chunk, and a
batch that prompts cannot fill.
"""

from collections.abc import Collection
from math import ceil

from cbatch import BatchShape, CostModel, Limits


def best_total(cost: CostModel, limits: Limits, prompts: Collection[float], output: float) -> int:
    """Returns the tokens per iteration with the highest steady-state throughput, among multiples of the tile.

    Args:
        prompts: tokens of typical prompts. The best total for the mean prompt may leave other prompts a nearly empty last chunk.
        output: mean output tokens.
    """
    mean = sum(prompts) / len(prompts)
    longest = min(limits.max_tokens, max(prompts) + limits.max_batch + limits.tile)
    totals = [total for total in range(limits.tile, int(longest) + 1, limits.tile) if total >= limits.max_batch]
    if not totals:  # the tile exceeds an iteration's limit, or the room beside the batch
        return limits.max_tokens

    def seconds(total: int) -> float:
        """Sums over all prompts, each with its share of the decodes."""
        return sum(
            steady_state_seconds(cost, total, limits.max_batch, prompt, 1 + (output - 1) * prompt / mean)
            for prompt in prompts
        )

    return min(totals, key=seconds)


def steady_state_seconds(cost: CostModel, total: int, batch: int, prompt: float, output: float) -> float:
    """Returns the device's seconds per request when `batch` equal requests are served at a time, without pause.

    Prompts come one after the other, each in k iterations of `total` tokens, the last of which samples the first of `output`
    tokens. Either the decodes run out, and the k iterations hold output - 1 decodes, those of one request. Or each iteration has
    batch - 1 decodes, and a request lives k + output - 1 iterations. Then (k + output - 1) / batch iterations pass between two
    ends: k mixed iterations, and the others with `batch` decodes and no prompt.
    """
    later = max(output - 1, 0.0)
    num_chunks = ceil((prompt + later) / total)
    if total >= batch:
        num_chunks = min(num_chunks, ceil(prompt / (total - batch + 1)))
    decodes = min(batch - 1, later / num_chunks)
    context = prompt + output / 2  # mean context of a decode
    chunk = min(total - decodes, prompt)
    last = max(prompt - (num_chunks - 1) * chunk, 1.0)
    seconds = cost.predict(_shape(last, prompt - last, decodes, context))
    if num_chunks > 1:
        seconds += (num_chunks - 1) * cost.predict(_shape(chunk, (num_chunks - 2) * chunk / 2, decodes, context))
    decode_only = (num_chunks + later) / batch - num_chunks
    if decode_only > 0:
        seconds += decode_only * cost.predict(_shape(0, 0, batch, context))
    return seconds


def _shape(chunk: float, chunk_context: float, decodes: float, decode_context: float) -> BatchShape:
    count = round(decodes)
    chunks = ((round(chunk), round(chunk_context)),) if chunk else ()
    return BatchShape(chunks, count, round(count * decode_context))
