"""Makes vLLM's own `schedule()` carry out a plan by showing it only the planned requests.

    order, admission   `running`, `waiting` and vLLM's side queue hold only the planned requests, in the order of the plan
    token counts       `_mamba_block_aligned_split`, the only hook that vLLM calls with each request's number of tokens
    reservations       `num_lookahead_tokens` of `allocate_slots`
    preemption         `_preempt_request`, before `schedule()`

After `schedule()` the state is restored, except for vLLM's own changes.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from cbatch.plan import Plan
from cbatch.request import Status
from cbatch.vllm.request import served
from cbatch.vllm.support import names_of


class Steering:
    """Shows a plan to vLLM's scheduler. counts: tokens by vLLM's id while a plan is carried out; else None."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._side = names_of(scheduler).side
        self.counts: dict[str, int] | None = None
        self._hidden: tuple[Any, ...] | None = None  # vLLM's state to restore
        self.preempted: set[str] = set()  # by the plan; reported in the same iteration's output

    def preempt(self, plan: Plan) -> None:
        for request in served(plan.preempt):
            self.preempted.add(request.vllm_id)
            self._scheduler.running.remove(request.source)
            self._scheduler._preempt_request(request.source, time.monotonic())

    def show(self, plan: Plan, counts: dict[str, int], all_decode: bool) -> None:
        """Makes vLLM see only the plan from now on.

        counts: tokens by vLLM's id. all_decode: whether the plan is one token of each running request, as vLLM itself would
            decide if no request waits.
        """
        scheduler, planned = self._scheduler, served(plan.requests)
        real = scheduler.running, scheduler.waiting, getattr(scheduler, self._side)
        self.counts = counts
        if all_decode and not real[1] and not real[2]:
            return
        newcomers = [] if all_decode else [request.source for request in planned if request.status is Status.WAITING]
        self._hidden = *real, newcomers, scheduler.scheduler_reserve_full_isl
        if not all_decode:
            running = [request.source for request in planned if request.status is Status.RUNNING]
            scheduler.running = real[0] if running == real[0] else running  # vLLM's own list needs no restoring
        scheduler.waiting = FCFSRequestQueue(newcomers)
        setattr(scheduler, self._side, FCFSRequestQueue())
        scheduler.need_mamba_block_aligned_split = not all_decode
        scheduler.scheduler_reserve_full_isl = False
        if plan.reserve or scheduler.connector is not None:
            ids = [request.vllm_id for request in served(plan.reserve)]
            self._reserve(dict(zip(ids, plan.reserve.values(), strict=True)))

    def restore(self) -> None:
        """Shows vLLM all requests again, in the queues to which vLLM has moved them."""
        self.counts = None
        if self._hidden is None:
            return
        (running, waiting, side, newcomers, fits_whole), self._hidden = self._hidden, None
        scheduler = self._scheduler
        vars(scheduler.kv_cache_manager).pop("allocate_slots", None)
        scheduler.need_mamba_block_aligned_split = False
        scheduler.scheduler_reserve_full_isl = fits_whole
        shown, left, put_off = scheduler.running, scheduler.waiting, getattr(scheduler, self._side)
        scheduler.waiting = waiting
        setattr(scheduler, self._side, side)
        if shown is not running:
            known = set(running)
            admitted = [source for source in shown if source not in known]
            scheduler.running = [source for source in running if source.status == RequestStatus.RUNNING] + admitted
        for source in newcomers:
            if source.status == RequestStatus.RUNNING or source in put_off:
                (waiting if source in waiting else side).remove_request(source)
        if put_off:
            side.prepend_requests(put_off)
        for source in reversed([source for source in left if source.status == RequestStatus.PREEMPTED]):
            if source not in newcomers:
                waiting.prepend_request(source)

    def _reserve(self, reserve: Mapping[str, int]) -> None:
        """Allocates the blocks of reserved tokens, as if these were lookahead tokens."""
        manager = self._scheduler.kv_cache_manager
        allocate: Callable[..., Any] = manager.allocate_slots

        def allocate_reserved(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("delay_cache_blocks"):  # only fetches the blocks that another machine has
                return allocate(request, 0, *args, **kwargs)
            found = kwargs.get("num_new_computed_tokens", 0) + kwargs.get("num_external_computed_tokens", 0)
            ahead = reserve.get(request.request_id, 0) - request.num_computed_tokens - found - num_new_tokens
            kwargs["num_lookahead_tokens"] = max(ahead, kwargs.get("num_lookahead_tokens", 0))
            return allocate(request, num_new_tokens, *args, **kwargs)

        manager.allocate_slots = allocate_reserved
