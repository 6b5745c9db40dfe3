"""Sarathi-Serve with waiting requests ordered by their cached prefixes, as in SGLang.

`order` is one of

    lpm         longest prefix match: most cached tokens first
    dfs_weight  depth first through the tree of cached prefixes, branches with most waiting requests first; a request comes after
                requests with longer matches in its branch
    spf         shortest prefill: fewest uncached tokens first
    hrrn        highest response ratio next: tokens computed since the request arrived, divided by its uncached tokens

Ties: arrival. With more than 128 requests waiting, `lpm` and `hrrn` are first come, first served. `in_batch`: among requests that
share an uncached prefix only the first keeps its place, and the others come last (`lpm`: by arrival); default: only for `lpm`.
A plan with `spf` and `in_batch` ranks all waiting requests.

Source: sgl-project/sglang, python/sglang/srt/managers/schedule_policy.py. Differences: whole blocks match; prompts are chunked within
Sarathi-Serve's budget, whose admission depends on free blocks and not on a ratio of declared outputs; ordering the queue does not
refresh cached blocks. Without a prefix cache, `lpm` and `dfs_weight` are first come, first served.
"""

from collections.abc import Iterable
from itertools import chain
from math import inf

from cbatch import ConfigError, Plan, Request, StepRecord, View, is_steady
from policies.chunking import ChunkSelector
from policies.sarathi_serve import SarathiServe
from policies.shared.kept_orders import FewestUncached, KeptOrder
from policies.shared.prefix_tree import DepthFirst
from policies.shared.prefixes import MOST_RANKED, SortedOrder, num_uncached

ORDERS = ("lpm", "dfs_weight", "spf", "hrrn")


class PrefixOrder(SarathiServe):
    depends_on: tuple[str, ...] = ("prefix_cache",)
    steady = False  # set by each plan: True only if no request waits

    def __init__(self, chunking: ChunkSelector, order: str = "lpm", in_batch: bool | None = None) -> None:
        if order not in ORDERS:
            raise ConfigError(f"policy.order={order}: choose one of {', '.join(ORDERS)}")
        super().__init__(chunking)
        self.order, self.in_batch = order, in_batch
        self._computed = 0  # tokens of all ended iterations
        self._computed_before: dict[Request, int] = {}  # tokens computed before the request arrived
        in_batch = order == "lpm" if in_batch is None else in_batch
        most = inf if order == "spf" else MOST_RANKED
        self._kept: KeptOrder | SortedOrder = SortedOrder(self._key, in_batch, most, order == "lpm")
        if order == "dfs_weight":
            self._kept = DepthFirst()
        elif order == "spf" and not in_batch:
            self._kept = FewestUncached()

    def on_arrival(self, request: Request) -> None:
        self._computed_before[request] = self._computed

    def on_wait(self, request: Request) -> None:
        self._kept.expect([request])

    def on_step(self, record: StepRecord) -> None:
        self._computed += record.num_prefill_tokens + record.num_decode_tokens

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        del self._computed_before[request]
        self._kept.discard([request])

    def plan(self, view: View) -> Plan:
        self.steady = is_steady(self.chunking) and not view.waiting
        plan = super().plan(view)
        self._kept.discard(plan.requests)
        return plan

    def prompts(self, view: View) -> Iterable[Request]:
        return chain(view.prefilling, self._kept.in_order(view))

    def _key(self, request: Request) -> float:
        if self.order == "lpm":
            return -request.num_computed
        if self.order == "spf":
            return num_uncached(request)
        return -(self._computed - self._computed_before[request]) / num_uncached(request)
