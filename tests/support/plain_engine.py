"""The engine's bookkeeping again, in plain objects and one request at a time: a model that the state machine compares it with."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cbatch import Limits, Status

Entries = Sequence[tuple[int, int]]
"""(request, tokens) of an iteration."""


@dataclass
class PlainRequest:
    """A request by its id. known, computed, held: tokens the host has, tokens in the KV cache, KV blocks.

    ends_after: output tokens after which it ends by itself. sampled: iterations in flight that sample a token of it.
    decodes: it has computed its prompt. last_at: the last iteration that computes tokens of it.
    times: seconds of its first admission, first and latest token, and end.
    """

    id: int
    prompt: int
    limit: int
    ends_after: int | None
    status: Status = Status.WAITING
    known: int = 0
    computed: int = 0
    held: int = 0
    sampled: list[int] = field(default_factory=list)
    decodes: bool = False
    last_at: int = -1
    times: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.known + len(self.sampled)

    @property
    def ending(self) -> bool:
        """Whether its last token is in flight or known."""
        return self.total >= self.prompt + self.limit


@dataclass
class PlainEngine:
    """Requests wait in the order of their ids. `flying`: (places by request, requests sampled) of each iteration in flight."""

    limits: Limits
    num_blocks: int
    block_size: int
    carries: bool
    requests: dict[int, PlainRequest] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    flying: dict[int, tuple[dict[int, int], list[int]]] = field(default_factory=dict)
    retiring: dict[int, int] = field(default_factory=dict)
    iteration: int = 0
    num_free: int = -1
    num_overshoot: int = 0
    num_preempted: int = 0
    now: float = 0.0
    ended: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_free = self.num_blocks

    @property
    def waiting(self) -> list[int]:
        return [request.id for request in self.requests.values() if request.status is Status.WAITING]

    def arrive(self, id_: int, prompt: int, limit: int, ends_after: int | None) -> None:
        self.requests[id_] = PlainRequest(id_, prompt, limit, ends_after, known=prompt)

    def ready(self, id_: int) -> int:
        """Tokens that a request could compute now: a sampled token can be carried over `num_stages` iterations later."""
        request = self.requests[id_]
        if request.status is Status.FINISHED or request.ending:
            return 0
        carried = sum(at <= self.iteration - self.limits.num_stages for at in request.sampled)
        return request.known + carried - request.computed

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def flies(self, request: PlainRequest) -> bool:
        return request.last_at in self.flying

    def is_legal(
        self,
        entries: Entries,
        preempt: Sequence[int] = (),
        reject: Sequence[int] = (),
        reserve: Mapping[int, int] = {},
        pad_to: int | None = None,
    ) -> bool:
        """The rules of a plan, as `cbatch.Plan` and docs state them."""
        named = [*(id_ for id_, _ in entries), *preempt, *reject]
        planned, waiting, limits = dict(entries), self.waiting, self.limits
        newcomers = [id_ for id_ in planned if id_ in waiting]
        if len(set(named)) < len(named) or not set(preempt) <= set(self.running) or not set(reject) <= set(waiting):
            return False
        if not all(id_ in waiting or id_ in self.running for id_ in planned):
            return False
        if not all(1 <= tokens <= self.ready(id_) for id_, tokens in entries) or not set(reserve) <= set(planned):
            return False
        if any(tokens > self.requests[id_].prompt + self.requests[id_].limit for id_, tokens in reserve.items()):
            return False
        admitted = len(self.running) - len(preempt) + len(newcomers)
        total = sum(planned.values())
        if (
            len(planned) > limits.max_batch
            or total > limits.max_tokens
            or (newcomers and admitted > limits.max_running)
        ):
            return False
        if planned and pad_to is not None and not total <= pad_to <= limits.max_tokens:
            return False
        return self.free_after(entries, preempt, reserve) >= 0

    def free_after(self, entries: Entries, preempt: Sequence[int], reserve: Mapping[int, int]) -> int:
        """KV blocks left free by a plan; those of a preempted request in flight come free too late for it."""
        free = sum(self.requests[id_].held for id_ in preempt if not self.flies(self.requests[id_])) + self.num_free
        return free - sum(self.lacking(id_, tokens, reserve) for id_, tokens in entries)

    def lacking(self, id_: int, tokens: int, reserve: Mapping[int, int]) -> int:
        request = self.requests[id_]
        return max(self.blocks_for(max(request.computed + tokens, reserve.get(id_, 0))) - request.held, 0)

    def preempt(self, id_: int) -> None:
        request = self.requests[id_]
        self._leave(request)
        request.status, request.computed, request.decodes = Status.WAITING, 0, False
        self.num_preempted += 1

    def launch(self, entries: Entries, reserve: Mapping[int, int]) -> None:
        """An iteration begins: its tokens count as computed, and those that it samples as generated."""
        places = {id_: place for place, (id_, _) in enumerate(entries)}
        self.flying[self.iteration] = places, []
        for id_, tokens in entries:
            request = self.requests[id_]
            if request.status is Status.WAITING:
                request.status = Status.RUNNING
                request.times.setdefault("admitted", self.now)
                self.running.append(id_)
            more = self.lacking(id_, tokens, reserve)
            self.num_free, request.held = self.num_free - more, request.held + more
            request.computed, request.last_at = request.computed + tokens, self.iteration
            if request.computed == request.total:
                request.sampled.append(self.iteration)
                self.flying[self.iteration][1].append(id_)
                request.decodes = True
                if request.ending:
                    self.running.remove(id_)
            elif self.carries and request.computed == request.known:
                request.decodes = True  # all is recomputed but a token in flight
        self.iteration += 1

    def carried_from(self, id_: int, end: int) -> int:
        """The place in the batch of `num_stages` iterations ago whose token is the request's last input; -1: the host has it."""
        before = self.flying.get(self.iteration - self.limits.num_stages)
        return -1 if end <= self.requests[id_].known or before is None else before[0][id_]

    def land(self) -> list[int]:
        """The oldest iteration in flight ends; returns the requests that received a token."""
        oldest = min(self.flying)
        receivers = []
        for id_ in self.flying.pop(oldest)[1]:
            request = self.requests[id_]
            request.sampled.remove(oldest)
            if request.status is Status.FINISHED:
                self.num_overshoot += 1
            else:
                request.known += 1
                request.times["last"] = self.now
                request.times.setdefault("first", self.now)
                receivers.append(id_)
        for id_ in receivers:
            request = self.requests[id_]
            output = request.known - request.prompt
            if output in (request.ends_after, request.limit):
                self.end(id_, "stop" if output == request.ends_after else "length")
        self.num_free += self.retiring.pop(oldest, 0)
        return receivers

    def end(self, id_: int, why: str) -> None:
        request = self.requests[id_]
        self._leave(request)
        request.status = Status.FINISHED
        request.times["end"] = self.now
        self.ended.append((id_, why))

    def _leave(self, request: PlainRequest) -> None:
        """Give up a request's blocks: at once, or when the last iteration that uses them has ended."""
        if request.id in self.running:
            self.running.remove(request.id)
        if self.flies(request):
            self.retiring[request.last_at] = self.retiring.get(request.last_at, 0) + request.held
        else:
            self.num_free += request.held
        request.held = 0

    def of_running(self, decodes: bool) -> Iterable[int]:
        return [id_ for id_ in self.running if self.requests[id_].decodes is decodes]
