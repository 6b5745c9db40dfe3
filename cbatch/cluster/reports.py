"""Dated reports: what a replica tells the router about itself, at each launch and each end of an iteration."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from cbatch.kv import BlockHash
from cbatch.request import Ints


class Report(NamedTuple):
    """The state of a replica at one time.

    at: seconds. ids: the admitted requests, [admitted]. computed: `lag` more than the tokens in the KV cache of each.
    num_free: free KV blocks. ended: ids of the requests that have ended since the report before, and their output tokens.
    left: ids of those that another replica continues.
    changed: the block hashes that the prefix cache has gained (True) or lost since the report before.
    """

    at: float
    ids: Ints
    computed: Ints
    lag: int
    num_free: int
    ended: Sequence[tuple[int, int]] = ()
    changed: Mapping[BlockHash, bool] = MappingProxyType({})
    left: Sequence[int] = ()
