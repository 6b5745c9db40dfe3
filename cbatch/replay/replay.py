"""Replays recorded decisions: another policy plans at the recorded views, and its plans are compared with the recorded plans.

No engine runs, and the other policy's plans are not carried out. The same views thus appear in the same order on any machine, for
any host that served the requests. A policy that counts on its plans, beyond what `on_wait` tells it, may decide wrongly here.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cbatch.cost import BatchShape, CostModel
from cbatch.drafts import Drafter
from cbatch.errors import CbatchError, ReplayError
from cbatch.kv import Eviction, Freed, KVView
from cbatch.plan_check import check_rules
from cbatch.policy import Policy, check_policy, name_of
from cbatch.record import StepRecord
from cbatch.replay.cached import CachedReplay, Hooked
from cbatch.replay.decisions import Decided, Decision, Ids, Recorded, StepEnd, read
from cbatch.replay.drafts import ReplayedDrafts, drafts_of
from cbatch.request import FinishReason, Request, Status, leaves_at, spec_of
from cbatch.request_spec import RequestSpec
from cbatch.view import View, predict_end


class ReplayComparison(NamedTuple):
    """A recorded decision, and another policy's plan from the same view.

    problem: why the other plan is illegal or the policy failed; empty if the plan could be carried out.
    """

    recorded: Decision
    decided: Decided
    problem: str

    @property
    def same(self) -> bool:
        """Returns whether both plans are equal, ignoring notes."""
        return self._same(note="")

    @property
    def same_but_reserves(self) -> bool:
        """Returns whether the plans differ, but only in notes and reserved KV cache."""
        return not self.same and self._same(note="", reserve=())

    def _same(self, **but: Any) -> bool:
        return not self.problem and self.decided._replace(**but) == self.recorded.decided._replace(**but)


def replay(
    recorded: Recorded,
    requests: Sequence[Request],
    policy: Policy,
    cost: CostModel,
    report: Callable[[ReplayComparison], None],
    eviction: Eviction | None = None,
    drafter: Drafter | None = None,
) -> None:
    """Calls `report` with the plan of `policy` at each recorded view.

    Args:
        requests: the requests of the run, which are not modified. cost: the cost model of the run, for `View.cost`.
        eviction: a new instance of the run's eviction; None: the run had no prefix cache. drafter: of the run, for `Drafts.seconds`.

    Raises:
        ConfigError: the policy refuses the limits of the run. PolicyError: a hook of the policy failed.
        ReplayError: events contradict each other, or a request finds other tokens in the prefix cache than in the run.
    """
    check_policy(policy, recorded.limits)
    of_run = recorded, requests, policy, cost, drafter or Drafter()
    shown: _Replay | CachedReplay = _Replay(*of_run) if eviction is None else CachedReplay(*of_run, eviction)
    try:
        for event in recorded.events:
            if isinstance(event, StepEnd):
                shown.end(event)
                continue
            shown.look(event)
            report(compared := ReplayComparison(event, *ask(policy, shown.view)))
            if event is not recorded.events[-1]:  # the last plan may be illegal
                shown.carry_out(event)
                shown.put_back(compared.decided)
    except LookupError as error:  # not the policy's: its errors have another type
        iteration = (event.record if isinstance(event, StepEnd) else event).iteration
        problem = f"iteration {iteration} has a request, or an end, that is recorded nowhere before ({error!r})"
        raise ReplayError(f"{problem}; record the run again") from error


def ask(policy: Policy, view: View) -> tuple[Decided, str]:
    """Returns the policy's plan, without carrying it out, and why the plan is illegal or missing."""
    decided = Decided(())
    try:
        plan = policy.plan(view)
        decided = read(plan)
        check_rules(plan, view, name_of(policy))
    except CbatchError as error:
        return decided, str(error)
    except Exception as error:
        return decided, f"plan() raised {type(error).__name__}: {error}"
    return decided, ""


class ReplayedRequest(Request):
    """A request with the counters of the latest view, updated by later recorded events. held: KV blocks."""

    __slots__ = ("computed", "held", "known", "ready", "total")

    num_known = property(lambda request: request.known)
    num_tokens = property(lambda request: request.total)
    num_computed = property(lambda request: request.computed)
    num_ready = property(lambda request: request.ready)

    def _begin(self, spec: RequestSpec) -> None:
        super()._begin(spec)
        self.computed = self.held = 0
        self.known = self.total = self.ready = spec.num_prompt_tokens


class _Launched(NamedTuple):
    """An iteration in flight. ids: its requests. drafts: by id. launched_at: seconds."""

    ids: Ids
    drafts: dict[int, int]
    shape: BatchShape
    launched_at: float


class _KV(KVView):
    def __init__(self, recorded: Recorded, view: "_View") -> None:
        self.block_size, self.num_blocks, self.num_ahead = recorded.block_size, recorded.num_blocks, recorded.num_ahead
        self._view = view

    def num_held(self, request: Request) -> int:
        assert isinstance(request, ReplayedRequest)
        return request.held

    def freed_by_preempting(self, request: Request) -> Freed:
        held = self.num_held(request)
        return Freed(0, held) if self._view.is_in_flight(request) else Freed(held, 0)


class _View(View):
    iteration = num_in_flight = num_places = 0
    kv: _KV
    drafts: ReplayedDrafts
    in_flight: deque[_Launched]
    last: StepRecord | None

    def __init__(self, recorded: Recorded, cost: CostModel, drafter: Drafter) -> None:
        self.update(now=0.0, limits=recorded.limits, cost=cost, kv=_KV(recorded, self), waiting=[], running=[])
        self.update(decoding=[], prefilling=[], in_flight=deque(), last=None)
        self.update(drafts=ReplayedDrafts(recorded.limits.max_drafts, drafter, real=recorded.real_tokens))

    @property
    def predicted_end(self) -> float:
        launched = ((self.cost.predict(each.shape), each.launched_at) for each in self.in_flight)
        return max(predict_end(self.last, launched, self.limits.num_stages), self.now)

    def is_in_flight(self, request: Request) -> bool:
        return any(request.id in launched.ids for launched in self.in_flight)


class _Replay(Hooked):
    def __init__(
        self, recorded: Recorded, requests: Sequence[Request], policy: Policy, cost: CostModel, drafter: Drafter
    ) -> None:
        super().__init__(recorded, policy)
        self.view = _View(recorded, cost, drafter)
        replayed = [ReplayedRequest.from_spec(spec_of(request)) for request in requests]
        self._requests: dict[int, ReplayedRequest] = {request.id: request for request in replayed}
        self._present: dict[ReplayedRequest, None] = {}  # in the latest view
        self._announced: set[Request] = set()

    def look(self, decision: Decision) -> None:
        """Shows a recorded view to the policy."""
        view, known, seen = self.view, self._requests, decision.seen
        view.update(iteration=decision.iteration, num_in_flight=seen.num_in_flight)
        view.update(now=seen.now, num_places=seen.num_places)
        view.kv.num_free, view.kv.num_retiring = seen.num_free, seen.num_retiring
        for id_, computed, ready, total, held in (*seen.running, *seen.preempted):
            request = known[id_]
            request.computed, request.ready, request.total, request.held = computed, ready, total, held
        waiting = [known[id_] for id_ in seen.waiting]
        running = dict.fromkeys(known[progress.id] for progress in seen.running)
        decoding = dict.fromkeys(known[id_] for id_ in seen.decoding)
        before, self._present = self._present, dict.fromkeys((*running, *waiting))
        for request in sorted(before, key=leaves_at):
            gone = request.status is not Status.FINISHED and request.total < request.max_tokens
            if gone and request not in self._present:
                self._finish(request, FinishReason.CANCELLED)
        # vLLM may have admitted one that no view had as waiting
        arrived = [request for request in self._present if request not in self._announced]
        self._announced.update(arrived)
        for request in arrived:
            if request.status is Status.PENDING:
                request.arrive(seen.now if request.id in self._iterations else None)
        for request in waiting:
            request.status = Status.WAITING
        view.update(waiting=waiting, running=running, decoding=decoding)
        view.drafts.look(decision)
        view.update(prefilling=[request for request in running if request not in decoding])
        for request in arrived:
            self._tell(self._on_arrival, request)
            if request.status is Status.WAITING:
                self._tell(self._on_wait, request)

    def carry_out(self, event: Decision) -> None:
        """Carries out the recorded plan on the requests."""
        known, decided = self._requests, event.decided
        for request in (known[id_] for id_ in decided.preempt):
            drafts_in_flight = sum(launched.drafts.get(request.id, 0) for launched in self.view.in_flight)
            request.lose(request.computed - drafts_in_flight)
            request.status, request.computed, request.held = Status.WAITING, 0, 0
            request.ready = 0 if drafts_in_flight else request.total
            self._tell(self._on_wait, request)
        for id_, why in decided.reject:
            known[id_].reject_reason = why
            self._finish(known[id_], FinishReason.REJECTED)
        if not (entries := decided.entries):
            return
        end = self._ends.get(event.iteration)
        num_tokens, drafts = sum(count for _, count in entries), drafts_of(event)
        chunks = tuple((count, known[id_].computed) for id_, count in entries if count > 1 and id_ not in drafts)
        rows = [(id_, after) for id_, count in entries if count == 1 or id_ in drafts for after in range(count)]
        context = sum(known[id_].computed + 1 + after for id_, after in rows)
        num_shared = sum(number * (known[id_].computed + 1) for id_, number in drafts.items())
        num_padding, num_drafts = (decided.pad_to or num_tokens) - num_tokens, sum(drafts.values())
        shape = BatchShape(chunks, len(rows), context, num_padding, num_shared, num_drafts)
        launched_at = end.record.launched_at if end else event.seen.now
        self.view.in_flight.append(_Launched(tuple(id_ for id_, _ in entries), drafts, shape, launched_at))
        for id_, count in entries:
            request = known[id_]
            request.computed += count
            if request.computed >= request.total or (end and id_ in end.received):  # a cached prefix is not counted
                request.total += 1 + drafts.get(id_, 0)
            ready = 0 if id_ in drafts and request.total >= request.max_tokens else request.total - request.computed
            request.status, request.ready = Status.RUNNING, ready
            if request.admitted_at is None:
                request.admitted_at = event.seen.now

    def end(self, event: StepEnd) -> None:
        """Calls the policy's hooks at the end of an iteration, in the engine's order."""
        record = event.record
        ids, drafts, *_ = self.view.in_flight.popleft()
        self.view.update(last=record)
        self._settle(drafts, event)
        receivers = [self._requests[id_] for id_ in event.received]
        receivers = [request for request in receivers if request.status is not Status.FINISHED]
        for request in receivers:
            first, request.known = request.token_times[0], request.known + 1
            request.token_times = (record.received_at if first is None else first, record.received_at)
        ended = dict.fromkeys((request for request in receivers if request.id in event.stopped), FinishReason.STOP)
        for request in receivers:
            if request.known >= request.max_tokens:
                ended.setdefault(request, FinishReason.LENGTH)
        for request in map(self._requests.__getitem__, ids):
            gone = request.status is not Status.FINISHED and request.total >= request.max_tokens
            if gone and request not in ended and not self.view.is_in_flight(request):
                ended[request] = FinishReason.CANCELLED  # with its last token in flight
        for request, reason in ended.items():
            _mark(request, reason, record.received_at)
        if receivers:
            self._tell(self._on_tokens, receivers)
        self._tell(self._on_step, record)
        for request in filter(self._announced.__contains__, ended):
            self._tell(self._on_finish, request)

    def _settle(self, drafts: dict[int, int], event: StepEnd) -> None:
        """Takes back what the counters of requests hold for rejected drafts."""
        accepted = {id_: max(event.received.count(id_) - 1, 0) for id_ in drafts}
        for id_, number in drafts.items():
            request, rejected = self._requests[id_], number - accepted[id_]
            request.total -= rejected
            request.computed = max(request.computed - rejected, 0)
            if not request.computed and accepted[id_]:  # preempted in flight
                request.lose_accepted(accepted[id_], request.known + accepted[id_])
            request.ready = request.total - request.computed
        going_on = {id_: (number, accepted[id_]) for id_, number in drafts.items() if id_ in event.received}
        for id_ in going_on.keys() & {*event.stopped}:
            del going_on[id_]
        left = {id_: self._requests[id_].max_tokens - self._requests[id_].known for id_ in going_on}
        full = [id_ for id_, tokens in left.items() if event.received.count(id_) >= tokens]
        self.view.drafts.note_outcomes({id_: one for id_, one in going_on.items() if id_ not in full})

    def _finish(self, request: ReplayedRequest, reason: FinishReason) -> None:
        _mark(request, reason, self.view.now)
        if request in self._announced:
            self._tell(self._on_finish, request)


def _mark(request: ReplayedRequest, reason: FinishReason, now: float) -> None:
    request.status, request.finish_reason, request.finished_at = Status.FINISHED, reason, now
    request.count_recomputed(request.computed)
    request.num_output_tokens = request.known - request.num_prompt_tokens
    request.computed = request.held = request.ready = 0
    request.total = request.known
