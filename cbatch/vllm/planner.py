"""Calls the policy for plans over vLLM's state, reports events to the policy, and counts vLLM's deviations from the plans."""

from collections import deque
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from cbatch.arrivals import check_fits
from cbatch.errors import CbatchError, TooLongError, WorkloadError, call
from cbatch.limits import Limits
from cbatch.plan import Plan
from cbatch.policy import HOOKS, check_policy, ignore, is_steady, name_of, optional_method, tokens_at_once
from cbatch.record import StepRecord
from cbatch.request import Request, Status
from cbatch.stall import StallWatch
from cbatch.vllm.drafts import VllmDrafts
from cbatch.vllm.plan_check import check_plan
from cbatch.vllm.recording import Recording
from cbatch.vllm.request import Population, ServedRequest, served
from cbatch.vllm.settings import Adapter, Counts, log, warn_at_times
from cbatch.vllm.view import Launched, VllmView

_VLLM_ID = attrgetter("vllm_id")

Clock = Callable[[], float]


class Planner:
    """The policy's side of the adapter. Reads vLLM's scheduler only through `VllmView`.

    planned: tokens of the latest plan, by vLLM's ids.
    all_decode: whether the latest plan is exactly one token of each running request, and vLLM proposes no drafts.
    """

    def __init__(self, adapter: Adapter, scheduler: Any, limits: Limits, clock: Clock) -> None:
        policy = adapter.policy
        check_policy(policy, limits)
        self.mode, self.clock, self.counts = adapter.mode, clock, Counts()
        self.population = Population()
        self.view = VllmView(scheduler, self.population, limits, adapter.cost)
        self.view.update(drafts=VllmDrafts(scheduler, self.population, self.counts))
        self._policy, self._name, self._stall_watch = policy, name_of(policy), StallWatch(adapter.patience)
        self._num_preempted = 0
        self.planned: dict[str, int] = {}
        self.all_decode = False
        # a steady policy's latest plan, the plan's decodes, and the free blocks after the plan
        self._latest: tuple[Plan, list[Request], int] | None = None
        self._begun = deque[ServedRequest]()  # to wait, of which the policy is told before the next plan
        self._ended: list[ServedRequest] = []
        recorder = adapter.recorder
        self._recording = None if recorder is None else Recording(recorder, self.view)
        hooks = (*(optional_method(policy, name) for name in HOOKS), tokens_at_once(policy))
        self._on_arrival, self._on_wait, self._on_tokens, self._on_step, self._on_finish, self._num_at_once = hooks
        self._counts_steps = self._on_step is not ignore or recorder is not None
        unseen = self._on_tokens is self._on_step is ignore and recorder is None and self.mode != "shadow"
        self._leaps = unseen and is_steady(policy)

    # -- before an iteration -------------------------------------------------------------------------------------------

    def refusal(self, request: ServedRequest) -> str:
        """Returns why the policy could never plan a request; empty if the policy could."""
        view = self.view
        try:
            num_at_once = self._call(self._num_at_once, request)
            check_fits(request, view.limits, view.kv.num_tokens, self._name, num_at_once)
        except WorkloadError as error:
            return str(error)
        except CbatchError as error:
            self._failed(error)
        return ""

    def submit(self, request: ServedRequest) -> None:
        self.population.submit(request)
        if self._recording is not None:
            self._recording.arrived(request)

    def show(self, request: ServedRequest) -> None:
        """Shows the request to the policy, which can plan the request from now on."""
        if request.status is Status.PENDING:
            self.population.wait(request)
            self._begun.append(request)

    def hide(self, request: ServedRequest) -> None:
        """Hides a request that vLLM cannot compute yet, for lack of its grammar or of KV blocks from another machine."""
        if request.status is Status.WAITING:
            self.population.waiting.remove(request)
            request.status = Status.PENDING

    def preempted(self, request: ServedRequest, planned: bool) -> None:
        """Records that vLLM is about to preempt a request. planned: by the plan, as every policy knows."""
        self.population.preempt(request)
        self._num_preempted += 1
        if not planned or self._on_wait is not ignore:
            self._begun.append(request)
        if self._recording is not None:
            self._recording.preempted(request)

    def plan(self, paused: bool) -> Plan | None:
        """Returns the policy's plan for this iteration; None if vLLM decides: when paused, or after a failure outside strict mode.

        paused: vLLM is pausing, and decides without the policy.
        """
        population, view = self.population, self.view
        view.update(now=self.clock())
        view.look_again()
        if self._recording is not None:
            self._recording.look()
        if not paused and (repeated := self._repeated()):
            return repeated
        self.planned, self.all_decode = {}, False
        if paused:
            return None
        try:
            self._announce()
            if not (population.waiting or population.running):
                self._stall_watch.note_progress(view.now)
                return Plan()
            plan: Plan = self._call(self._policy.plan, view)
            check_plan(plan, view, self._name)
            if not (plan.requests or plan.preempt or plan.reject or view.in_flight):
                self._stall_watch.check(view.now, view, self._where)
        except CbatchError as error:
            if isinstance(error, TooLongError) and view.is_waiting(error.request):
                self._begun.extend(served(population.waiting))
                plan = Plan()
                plan.reject = [(error.request, str(error))]
                return plan
            if self.mode == "strict":
                raise
            self.counts.fallbacks += 1
            warn_at_times(self.counts.fallbacks, "vLLM decides iterations by its own rule (%d so far): %s", error)
            self._begun.extend(served(population.waiting))  # the policy may consider them admitted
            return None
        self.planned = dict(zip(map(_VLLM_ID, plan.requests), plan.num_tokens, strict=True))
        more = plan.preempt or plan.reject or plan.reserve or view.drafts.most
        self.all_decode = not more and len(plan) == len(population.running) and plan.requests == view.decodes
        return plan

    def _repeated(self) -> Plan | None:
        """Returns a steady policy's latest plan if the policy would repeat it (`cbatch.leap`); None if the policy must plan."""
        if self._latest is None or self.population.waiting:
            return None
        plan, decodes, num_free = self._latest
        same = decodes is self.view.decodes and self.view.kv.num_free == num_free >= len(decodes)
        return plan if same and (plan.wake_at is None or self.view.now < plan.wake_at) else None

    # -- an iteration was scheduled ------------------------------------------------------------------------------------

    def launched(self, plan: Plan | None, scheduled: Mapping[str, int], drafts: Mapping[str, int]) -> None:
        """Records an iteration that vLLM scheduled. scheduled, drafts: tokens by vLLM's id, drafts included. plan: the policy's plan."""
        view, population = self.view, self.population
        view.look_again()
        decodes, self._latest = view.decodes, None
        as_planned = self.planned == scheduled
        if plan is not None and not as_planned:
            self._compare(self.planned, scheduled)
        carried_out = None if self.mode == "shadow" else plan
        if carried_out is None:
            requests = [population.by_id[id_] for id_ in scheduled]
            for request in requests:
                self.show(request)  # it may have become ready since the plan was made
        else:
            requests = served(carried_out.requests)
            if not as_planned:
                requests = [request for request in requests if request.vllm_id in scheduled]
        if self._recording is not None:
            self._recording.launched(carried_out, requests, scheduled)
        view.drafts.launched(scheduled, drafts, self.mode == "shadow")
        if not scheduled:
            return
        num_decodes = sum(request in population.decoding for request in requests) if self._counts_steps else 0
        population.advance(requests, scheduled, view.now)
        population.leave_ending()
        num_free, note = view.kv.num_free, "" if plan is None else plan.note
        if plan is not None and self._leaps and self.all_decode:
            self._latest = plan, decodes, num_free
        state = 0, 0, 0, 0
        if self._counts_steps:
            used = view.kv.num_blocks - num_free
            state = self._num_preempted, used, len(population.waiting), len(population.running)
        times = (view.now, self.clock())
        view.in_flight.append(Launched(view.iteration, requests, scheduled, drafts, *times, num_decodes, state, note))
        view.update(iteration=view.iteration + 1)
        self._num_preempted = 0
        self.counts.iterations += 1

    def _compare(self, planned: Mapping[str, int], scheduled: Mapping[str, int]) -> None:
        """Counts tokens that vLLM has not granted. The policy is told that planned requests still wait."""
        counts = self.counts
        counts.different += self.mode == "shadow"
        for id_, count in planned.items():
            granted = scheduled.get(id_, 0)
            if granted < count and self.mode != "shadow":
                counts.short += 1
                counts.short_tokens += count - granted
                message = "vLLM granted fewer tokens than planned (%d times so far), to request %s"
                warn_at_times(counts.short, message, id_)
            if not granted and (request := self.population.by_id.get(id_)) and request.status is Status.WAITING:
                self._begun.append(request)

    # -- an iteration has ended ----------------------------------------------------------------------------------------

    def received(self, received_at: float, num_received: Mapping[str, int]) -> None:
        """Records the end of the oldest iteration in flight. num_received: tokens that requests received, by vLLM's id."""
        view, launched = self.view, self.view.in_flight.popleft()
        view.look_again()
        requests = launched.requests
        if launched.drafts:
            view.drafts.received(launched.drafts, num_received)
            requests = [request for request in requests for _ in range(num_received.get(request.vllm_id, 0))]
        elif len(num_received) < len(requests):
            requests = [request for request in requests if request.vllm_id in num_received]
        for request in requests:
            request.receive(received_at)
        started = max(launched.launched_at, view.last_ended_at)
        view.update(last_ended_at=received_at)
        if requests:
            self._stall_watch.note_progress(received_at)
        if self._recording is not None:
            record = self._record(launched, started, received_at, num_received)
            self._recording.ended(record, requests, self._ended)
        try:
            if self._on_tokens is not ignore and requests:
                self._call(self._on_tokens, requests)
            if self._on_step is not ignore:
                self._call(self._on_step, self._record(launched, started, received_at, num_received))
            self._tell_ended(launched)
        except CbatchError as error:
            self._failed(error)

    def end(self, source: Any, rejected: str | None, cancelled: bool) -> None:
        """Records that vLLM has ended a request. `on_finish` is called after the hooks for the request's tokens.

        For the arguments, see `Population.end`.
        """
        ended = self.population.end(source, rejected, cancelled, self.clock())
        self._ended.append(ended)
        if self._recording is not None:
            self._recording.finished(ended)

    def close(self) -> None:
        log.info("cbatch: %s", self.counts)
        if self._recording is not None:
            self._recording.close()

    def _tell_ended(self, launched: Launched | None = None) -> None:
        ended, self._ended = self._ended, []
        if len(ended) > 1 and launched is not None:
            places = {request: place for place, request in enumerate(launched.requests)}
            ended.sort(key=lambda request: places.get(request, -1))
        for request in ended:
            if request.announced:
                self._call(self._on_finish, request)

    def _record(
        self, launched: Launched, started: float, received_at: float, num_received: Mapping[str, int]
    ) -> StepRecord:
        num_tokens, at, drafts = sum(launched.num_tokens.values()), launched.launched_at, launched.drafts.values()
        times = (launched.planned_at, at, at, received_at, self.clock(), started, received_at)
        num_decodes, num_sampled = launched.num_decodes + sum(drafts), sum(num_received.values())
        batch = (len(launched.requests), num_tokens - num_decodes, num_decodes, 0, num_sampled)
        num_drafted = len(launched.drafts.keys() & num_received.keys())
        drafted = num_drafted, sum(drafts), num_sampled - len(num_received), max(drafts, default=0)
        return StepRecord(launched.index, *times, *batch, *launched.state, launched.note, 0, 0, *drafted)

    # -- calls of the policy -------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Tells the policy who has ended, arrived and begun to wait. Without `on_wait`, a request that waits again ends and arrives."""
        self._tell_ended()
        while self._begun:
            request = self._begun.popleft()
            waits = request.status is Status.WAITING
            if waits and request.announced and self._on_wait is ignore and self._on_arrival is not ignore:
                request.announced = False
                self._call(self._on_finish, request)
            if not request.announced and (waits or request.status is Status.RUNNING):
                request.announced = True
                self._call(self._on_arrival, request)
            if waits:
                self._call(self._on_wait, request)

    def _failed(self, error: CbatchError) -> None:
        """Raises or logs the failure of a hook, which makes no decision."""
        if self.mode == "strict":
            raise error
        log.warning("the policy failed, and vLLM goes on: %s", error)

    def _where(self) -> str:
        return f"policy {self._name}, iteration {self.view.iteration}"

    def _call(self, method: Callable[[Any], Any], argument: Any) -> Any:
        """Calls the policy, and converts an exception in the policy to an error that names the policy."""
        return call(self._where, method, argument)
