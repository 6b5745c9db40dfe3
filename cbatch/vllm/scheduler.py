"""vLLM's scheduler, with a policy that decides how many tokens each request computes. Everything else is vLLM's.

schedule()              the policy plans over vLLM's state; vLLM's own schedule() carries out the plan (`steering`)
update_from_output()    vLLM takes in the tokens; the policy's hooks report them
"""

import time
from typing import Any

from vllm import __version__ as vllm_version
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from cbatch.errors import ConfigError
from cbatch.limits import Limits
from cbatch.plan import Plan
from cbatch.vllm.planner import Clock, Planner
from cbatch.vllm.request import ServedRequest
from cbatch.vllm.settings import Adapter, Counts
from cbatch.vllm.steering import Steering
from cbatch.vllm.support import check_features, check_seams, check_state, names_of

_BROKEN_OFF = RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR


def make_scheduler(adapter: Adapter, vllm_config: Any, clock: Clock | None = None, **arguments: Any) -> Scheduler:
    """Returns a vLLM scheduler that follows a policy; asynchronous if vLLM is configured so.

    Args:
        vllm_config, arguments: the arguments that vLLM passes to a class named by `--scheduler-cls`.
        clock: returns the seconds since the start of the run; default: since this call.

    Raises:
        ConfigError: a version or feature of vLLM is not supported, or the policy does not fit vLLM's limits.
        PolicyError: the policy's `check` raised another error.
    """
    kind = AsyncPolicyScheduler if vllm_config.scheduler_config.async_scheduling else SyncPolicyScheduler
    check_seams(kind.base, vllm_version)
    check_features(vllm_config, arguments["kv_cache_config"])
    start = time.monotonic()
    return kind(adapter, clock or (lambda: time.monotonic() - start), vllm_config=vllm_config, **arguments)


class _Policed:
    """Overrides methods of vLLM's scheduler; a mixin for its synchronous and asynchronous classes."""

    def __init__(self: Any, adapter: Adapter, clock: Clock, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.follow(adapter, clock)

    def follow(self: Any, adapter: Adapter, clock: Clock) -> None:
        """Follows this policy from now on. The scheduler must have no requests."""
        check_state(self, vllm_version)
        batch = adapter.batch or self.max_num_running_reqs
        if batch > self.max_num_running_reqs:
            remedy = "give a smaller one, or a larger --max-num-seqs"
            raise ConfigError(f"batch={batch}: vLLM runs at most {self.max_num_running_reqs} requests; {remedy}")
        most, longest = self.max_num_scheduled_tokens, self.max_model_len
        limits = Limits(batch, most, longest, adapter.tile, max_drafts=self.num_spec_tokens)
        self._planner = Planner(adapter, self, limits, clock)
        self._steering, self._names = Steering(self), names_of(self)
        self._next_id = 0
        self._refused: list[tuple[int, str, str]] = []  # client, request, reason; sent with the next output

    def leave(self: Any) -> None:
        """Stops following the policy: logs the counts and closes the recording."""
        self._planner.close()

    @property
    def counts(self: Any) -> Counts:
        return self._planner.counts  # type: ignore[no-any-return]

    def add_request(self: Any, request: Any) -> None:
        known = request.request_id in self.requests
        super().add_request(request)  # type: ignore[misc]
        if known:
            return
        now, planner = self._planner.clock(), self._planner
        served = ServedRequest.of(request, self._next_id, now, self.max_model_len, self._num_cached)
        planner.submit(served)
        self._next_id += 1
        why = "cbatch cannot schedule streamed input" if request.resumable else ""
        if not why and planner.mode != "shadow":  # in which vLLM serves what the policy could not
            why = planner.refusal(served)
        if why:
            self._refuse(served, why)
        elif not self._is_blocked_waiting_status(request.status):
            planner.show(served)

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        planner = self._planner
        self._look_at_blocked()
        plan = planner.plan(self._pause_state != PauseState.UNPAUSED)
        if plan is None or planner.mode == "shadow":
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        else:
            output = self._carry_out(plan, *args, **kwargs)
        drafts = {id_: len(tokens) for id_, tokens in output.scheduled_spec_decode_tokens.items()}
        planner.launched(plan, output.num_scheduled_tokens, drafts)
        return output

    def _carry_out(self: Any, plan: Plan, *args: Any, **kwargs: Any) -> Any:
        for request, why in plan.reject:
            self._refuse(request, why)
        steering, planner = self._steering, self._planner
        steering.preempt(plan)
        steering.show(plan, planner.planned, planner.all_decode)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            steering.restore()
        self._add_preempted(output)
        steering.preempted.clear()
        return output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        received_at = self._planner.clock()
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens:
            every = (output for group in outputs.values() for output in group.outputs)
            num_received = {output.request_id: len(output.new_token_ids) for output in every if output.new_token_ids}
            self._planner.received(received_at, num_received)
        for client, request_id, why in self._refused:
            ended = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT, stop_reason=why)
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(ended)
        self._refused.clear()
        return outputs

    def shutdown(self: Any) -> None:
        self.leave()
        super().shutdown()  # type: ignore[misc]

    # -- seams of vLLM's scheduler -------------------------------------------------------------------------------------

    def _mamba_block_aligned_split(self: Any, request: Any, num_new_tokens: int, *computed: int) -> int:
        """Limits the tokens of a request to the plan. vLLM calls this method for each request before scheduling it.

        A newcomer with 0 tokens fetches its blocks from another machine. Returns 1 for it, since vLLM does not fetch at 0.
        """
        counts = self._steering.counts
        if computed and not num_new_tokens:
            return 1
        return num_new_tokens if counts is None else min(num_new_tokens, counts[request.request_id])

    def _try_schedule_encoder_inputs(
        self: Any, request: Any, computed: int, num_new_tokens: int, *budget: Any, **eagle: Any
    ) -> Any:
        """Encodes only images within the planned tokens. vLLM calls this method before `_mamba_block_aligned_split`."""
        count = self._mamba_block_aligned_split(request, num_new_tokens)
        return super()._try_schedule_encoder_inputs(request, computed, count, *budget, **eagle)  # type: ignore[misc]

    def _preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        planned = request.request_id in self._steering.preempted
        self._planner.preempted(self._planner.population.by_id[request.request_id], planned)
        self.counts.unplanned += self._steering.counts is not None
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _build_kv_connector_meta(self: Any, connector: Any, scheduler_output: Any) -> Any:
        self._add_preempted(scheduler_output)
        return super()._build_kv_connector_meta(connector, scheduler_output)  # type: ignore[misc]

    def _free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        why = next((why for _, id_, why in self._refused if id_ == request.request_id), None)
        self._planner.end(request, why, request.status in _BROKEN_OFF)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _add_preempted(self: Any, output: Any) -> None:
        if self._steering.preempted:
            output.preempted_req_ids = (output.preempted_req_ids or set()) | self._steering.preempted

    def _look_at_blocked(self: Any) -> None:
        """Shows or hides requests that wait for other things than computation; vLLM checks them only while it schedules."""
        for source in list(getattr(self, self._names.blocked)):
            request = self._planner.population.by_id[source.request_id]
            if self._is_blocked_waiting_status(source.status) and not getattr(self, self._names.promote)(source):
                self._planner.hide(request)
            else:
                self._planner.show(request)

    def _refuse(self: Any, request: ServedRequest, why: str) -> None:
        """Ends a request unserved; the next output tells its client why."""
        self._refused.append((request.source.client_index, request.vllm_id, why))
        self.finish_requests(request.vllm_id, RequestStatus.FINISHED_ABORTED)

    def _num_cached(self: Any, request: ServedRequest) -> int:
        """Returns the tokens of a waiting request that are in vLLM's prefix cache, or were fetched from another machine."""
        kv = self._planner.view.kv
        return int(request.source.num_computed_tokens) or len(kv.cached_blocks(request)) * kv.block_size


class SyncPolicyScheduler(_Policed, Scheduler):
    """vLLM waits for an iteration before it schedules the next iteration."""

    base = Scheduler


class AsyncPolicyScheduler(_Policed, AsyncScheduler):
    """vLLM schedules an iteration while the preceding iteration is computed."""

    base = AsyncScheduler
