"""Computes the most of each prompt that a prefix cache can hold, assuming that no block is ever evicted."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cbatch.kv import BlockHash
from cbatch.kv.hashes import hashes_outside, num_leading
from cbatch.request import Request, spec_of


class Findable(NamedTuple):
    """Leading prompt tokens that other requests also hold, in whole blocks, and at most all but one of the prompt's tokens.

    earlier: held by prompts and outputs of requests that arrive earlier, or at the same time with a lower id; the other tokens
        are computed after this request has arrived. ever: held by prompts and outputs of any other requests.
    """

    earlier: int
    ever: int


def findable_tokens(requests: Iterable[Request], block_size: int) -> dict[int, Findable]:
    """Returns the most tokens that each request can find in the cache, by id. requests: all requests of a simulated run."""
    by_arrival = sorted(requests, key=lambda request: (request.arrival_time, request.id))
    hashes = [_hashes_of(request, block_size) for request in by_arrival]
    seen: set[BlockHash] = set()
    repeated: set[BlockHash] = set()
    earlier = []
    for blocks in hashes:
        earlier.append(num_leading(blocks, seen))
        repeated.update(blocks[: earlier[-1]])
        seen.update(blocks)
    findable = {}
    for request, blocks, before in zip(by_arrival, hashes, earlier, strict=True):
        most = (request.num_prompt_tokens - 1) // block_size
        ever = num_leading(blocks, repeated)
        findable[request.id] = Findable(min(before, most) * block_size, min(ever, most) * block_size)
    return findable


def _hashes_of(request: Request, block_size: int) -> Sequence[BlockHash]:
    """Returns the hashes of the prompt and output blocks that another request can also have."""
    spec = spec_of(request)
    held = spec.num_prompt_tokens if spec.prompt is not None else len(spec.prefix_hashes) * spec.hash_block
    held = min(held, spec.num_prompt_tokens)
    whole = Request.from_spec(spec)
    if spec.texts:
        whole.num_output_tokens = min(spec.max_new_tokens, spec.true_new_tokens or spec.max_new_tokens)
        held = whole.num_known
    return hashes_outside(whole, block_size, held)
