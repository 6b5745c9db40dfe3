"""Replays recorded decisions without an engine: the views are those of the recording, whoever served the requests.

Where `counterfactual.replay` has this package's engine carry out the recorded plans, and so works for its own recordings only, here
each view is put together from what was recorded of it, and what happened between two views is read off them: what has arrived, which
requests sampled a token, and which have ended. Another host, vLLM, may have decided by rules that the engine does not know.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cbatch.cost import BatchShape, CostModel
from cbatch.kv import Freed, KVView, blocks_for
from cbatch.policy import HOOKS, Policy, call, optional_method
from cbatch.record import StepRecord
from cbatch.replay.counterfactual import Comparison, Recorded, Report, ask
from cbatch.replay.decisions import Decision, Ids, Seen, StepEnd
from cbatch.request import FinishReason, Request, Status, spec_of
from cbatch.view import View


class FollowedRequest(Request):
    """A request with the counters of the recorded view."""

    __slots__ = ("computed", "ready", "reserved", "total")

    computed: int
    ready: int
    reserved: int
    total: int

    @property
    def num_known(self) -> int:
        return self.total

    @property
    def num_tokens(self) -> int:
        return self.total

    @property
    def num_computed(self) -> int:
        return self.computed

    @property
    def num_ready(self) -> int:
        return self.ready


class _Launched(NamedTuple):
    """An iteration in flight.

    sampled: ids of the requests that receive a token of it, in the order of the plan; ending: those whose last by length it is.
    """

    decision: Decision
    shape: BatchShape
    num_decodes: int
    sampled: Ids
    ending: Ids


class _KV(KVView):
    block_size = num_blocks = num_free = num_retiring = 0

    def __init__(self, recorded: Recorded, view: "_View") -> None:
        self.block_size, self.num_blocks = recorded.block_size, recorded.num_blocks
        self._view = view

    def num_held(self, request: Request) -> int:
        assert isinstance(request, FollowedRequest)
        return blocks_for(max(request.computed, request.reserved), self.block_size)

    def freed_by_preempting(self, request: Request) -> Freed:
        held = self.num_held(request)
        return Freed(0, held) if self._view.is_in_flight(request) else Freed(held, 0)


class _View(View):
    iteration = num_in_flight = num_ending = 0
    kv: _KV
    in_flight: deque[_Launched]
    ended_at: float
    rows: int

    def __init__(self, recorded: Recorded, cost: CostModel) -> None:
        self.update(now=0.0, limits=recorded.limits, cost=cost, kv=_KV(recorded, self), waiting=[], running=[])
        self.update(decoding=[], prefilling=[], in_flight=deque(), ended_at=0.0, rows=recorded.rows)

    @property
    def predicted_end(self) -> float:
        end = self.ended_at
        for launched in self.in_flight:
            end = max(end, launched.decision.times[-1]) + self.cost.predict(launched.shape)
        return max(end, self.now)

    @property
    def num_places(self) -> int:
        places = super().num_places
        return min(places, self.rows - len(self.running) - self.num_ending) if self.rows else places

    def is_in_flight(self, request: Request) -> bool:
        return any(request.id == id_ for launched in self.in_flight for id_, _ in launched.decision.decided.entries)

    def is_waiting(self, request: Request) -> bool:
        return request.status is Status.WAITING


def follow(recorded: Recorded, requests: Sequence[Request], policy: Policy, cost: CostModel, report: Report) -> None:
    """Call `report` with what `policy` plans at each recorded view; the arguments are those of `counterfactual.replay`."""
    _Follower(recorded, requests, policy, cost).run(report)


class _Follower:
    def __init__(self, recorded: Recorded, requests: Sequence[Request], policy: Policy, cost: CostModel) -> None:
        self._recorded, self._policy, self._view = recorded, policy, _View(recorded, cost)
        self._requests: dict[int, FollowedRequest] = {}
        for request in requests:
            known = self._requests[request.id] = FollowedRequest.from_spec(spec_of(request))
            known.computed = known.reserved = 0
            known.ready = known.total = request.num_prompt_tokens
        self._decoding: dict[FollowedRequest, None] = {}
        hooks = (optional_method(policy, name) for name in HOOKS)
        self._on_arrival, self._on_tokens, self._on_step, self._on_finish = hooks

    def run(self, report: Report) -> None:
        decisions = [event for event in self._recorded.events if isinstance(event, Decision)]
        following = iter([*decisions[1:], None])
        for event in self._recorded.events:
            if isinstance(event, StepEnd):
                self._end(event)
                continue
            self._look(event.seen)
            self._view.update(iteration=event.iteration)
            report(Comparison(event, ask(self._policy, self._view)))
            self._carry_out(event, next(following))

    def _look(self, seen: Seen) -> None:
        """Take over a recorded view."""
        view, known = self._view, self._requests
        view.update(now=seen.now, num_in_flight=seen.num_in_flight)
        view.kv.num_free, view.kv.num_retiring = seen.num_free, seen.num_retiring
        running = [known[id_] for id_, _, _ in seen.running]
        for request, (_, computed, ready) in zip(running, seen.running, strict=True):
            request.computed, request.ready, request.total = computed, ready, computed + ready
        waiting = [known[id_] for id_ in seen.waiting]
        present = {*running, *waiting}
        for request in [known[request.id] for request in (*view.waiting, *view.running)]:  # of the view before
            gone = request not in present and request.total < request.max_tokens
            if gone and request.status in (Status.WAITING, Status.RUNNING):
                self._finish(request, FinishReason.STOP)  # by its client
        arrived = [request for request in waiting if request.status is Status.PENDING]
        for request in waiting:
            request.status = Status.WAITING
        for request in arrived:
            request.arrive(seen.now)
        view.update(waiting=waiting, running=running)
        view.update(decoding=[request for request in self._decoding if request in {*running}])
        view.update(prefilling=[request for request in running if request not in self._decoding])
        for request in arrived:
            self._tell(self._on_arrival, request)

    def _carry_out(self, event: Decision, following: Decision | None) -> None:
        """Do to the requests what was decided. following: the next decision, from which it shows what was sampled."""
        view, known, decided = self._view, self._requests, event.decided
        for id_ in decided.preempt:
            request = known[id_]
            self._decoding.pop(request, None)
            request.status, request.computed, request.reserved, request.ready = Status.WAITING, 0, 0, request.total
            request.num_preemptions += 1
            view.update(waiting=[*view.waiting, request])
        for id_, _ in decided.reject:
            self._finish(known[id_], FinishReason.REJECTED)
        for id_, tokens in decided.reserve:
            known[id_].reserved = tokens
        if not decided.entries:
            return
        num_decodes = sum(known[id_] in self._decoding for id_, _ in decided.entries)
        chunks = tuple((count, known[id_].computed) for id_, count in decided.entries if count > 1)
        contexts = [known[id_].computed + 1 for id_, count in decided.entries if count == 1]
        shape = BatchShape(chunks, len(contexts), sum(contexts))
        sampled = tuple(self._sampled(event, following))
        ending = tuple(id_ for id_ in sampled if known[id_].total + 1 >= known[id_].max_tokens)
        view.in_flight.append(_Launched(event, shape, num_decodes, sampled, ending))
        view.update(num_ending=view.num_ending + len(ending))
        for id_, _ in decided.entries:
            known[id_].status = Status.RUNNING
            if known[id_].admitted_at is None:
                known[id_].admitted_at = event.seen.now
        for request in (known[id_] for id_ in sampled):
            request.total += 1
            self._decoding[request] = None

    def _sampled(self, event: Decision, following: Decision | None) -> Iterator[int]:
        """A request that has sampled a token has one more token in the next view, or is in none."""
        running: Mapping[int, tuple[int, int]] = {}
        waiting: Ids = ()
        if following is not None:
            running = {id_: (computed, ready) for id_, computed, ready in following.seen.running}
            waiting = following.seen.waiting
        for id_, _ in event.decided.entries:
            if id_ in running:
                if sum(running[id_]) > self._requests[id_].total:
                    yield id_
            elif id_ not in waiting:
                yield id_

    def _end(self, event: StepEnd) -> None:
        """An iteration has ended: the policy hears of it, as from the engine."""
        view = self._view
        launched = view.in_flight.popleft()
        receivers = [self._requests[id_] for id_ in launched.sampled]
        receivers = [request for request in receivers if request.status is not Status.FINISHED]
        ended = []
        for request in receivers:
            request.token_times = (request.token_times[0] or event.ended, event.ended)
            if request.id in launched.ending or request.id in event.stopped:
                ended.append(request)
        view.update(num_ending=view.num_ending - len(launched.ending), ended_at=event.ended)
        if receivers:
            self._tell(self._on_tokens, receivers)
        self._tell(self._on_step, self._record(launched, event, len(receivers)))
        for request in ended:
            self._finish(request, FinishReason.STOP if request.id in event.stopped else FinishReason.LENGTH)

    def _record(self, launched: _Launched, event: StepEnd, num_sampled: int) -> StepRecord:
        decision = launched.decision
        at, num_tokens = decision.seen.now, launched.shape.num_tokens
        times = (at, at, at, event.ended, event.ended, event.started, event.ended)
        batch = (launched.shape.num_requests, num_tokens - launched.num_decodes, launched.num_decodes, 0, num_sampled)
        used = self._recorded.num_blocks - decision.seen.num_free
        state = (len(decision.decided.preempt), used, len(decision.seen.waiting), len(decision.seen.running))
        return StepRecord(decision.iteration, *times, *batch, *state, decision.decided.note)

    def _finish(self, request: FollowedRequest, reason: FinishReason) -> None:
        self._decoding.pop(request, None)
        request.status, request.finish_reason, request.finished_at = Status.FINISHED, reason, self._view.now
        request.num_output_tokens = request.num_new_tokens
        request.computed = request.ready = 0
        self._tell(self._on_finish, request)

    def _tell(self, method: object, argument: object) -> None:
        call(f"policy {type(self._policy).__name__}", method, argument)  # type: ignore[arg-type]
