"""The requests of a server's clients to one engine, and what is sent back after each turn. `engine` states the messages."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter, sleep
from typing import Any, NamedTuple

from cbatch import CbatchError, Engine, Request, RequestSpec, Status
from cbatch.arrivals import Posted
from cbatch.cluster.live_transfers import Prefilled
from cbatch.host import drive
from experiments.server.settings import ServerSettings

Inbox = SimpleQueue[Any]


class Refused(NamedTuple):
    """Requests beyond `max_open`, which the door has refused."""

    number: int


Message = RequestSpec | int | Refused | None


class Turn(NamedTuple):
    """A turn of the loop.

    ids: ids of the requests that received a token, once for each token. tokens: their tokens; -1 in simulation. ended: these and other requests.
    state: numbers of running and of waiting requests; share of the KV blocks in use. replica: whose turn it is.
    failed: the server has failed, and has cut the requests that are cancelled.
    prompts: of requests that have ended or moved on, and were admitted here: prompt tokens of those with a first token; prompt tokens of all;
        prompt tokens that the prefix cache held.
    steps: preemptions; requests with drafts; their drafts; drafts that became tokens.
    """

    ids: list[int]
    tokens: list[int]
    ended: list[Request]
    state: tuple[int, int, float]
    replica: int = 0
    failed: bool = False
    prompts: tuple[int, int, int] = (0, 0, 0)
    steps: tuple[int, ...] = (0, 0, 0, 0)


Send = Callable[[int | Turn | dict[str, Any] | str], object]


class ClientArrivals(Posted):
    """The requests of clients to an engine, through an inbox. Until the door closes, it counts as an unfinished request.

    lag: the most seconds by which the tokens of a simulated iteration came too late. num_cut: requests that the end, or a failure, has cut.
    num_refused: requests that the door refused beyond `max_open`.
    failed: whether this engine, another, or the router has failed.
    left_early: ids of requests whose clients have left, perhaps before the requests came here; see `LiveCluster`.
    """

    def __init__(
        self,
        settings: ServerSettings,
        engine: Engine,
        inbox: Inbox,
        send: Send,
        replica: int = 0,
        router: Inbox | None = None,
    ) -> None:
        """router: of several replicas; gets the requests that leave for others, and those that have ended."""
        super().__init__(inbox, settings.patience.seconds)
        engine.attach(self)
        self._engine, self._send, self._replica, self._router = engine, send, replica, router
        self._leaving: list[Prefilled] = []  # since the last report
        self.left_early: Set[int] = frozenset()
        self.lag, self.num_cut, self.num_refused, self.failed = 0.0, 0, 0, False
        self._is_simulated, self._scale = settings.backend.simulated, settings.server.time_scale
        self._origin = perf_counter() - self._engine.now() / self._scale
        self.requests: list[Request] = []  # all so far
        self._live: dict[int, Request] = {}  # that have not ended
        self._num_steps = self._num_ended = 0  # that were reported
        self._state = (0, 0, 0.0)

    def serve(self) -> None:
        """Serves until the door closes; cuts all requests if the engine fails, and raises its error."""
        try:
            if self._router is None:
                self._engine.run(lambda _: self.report())
            else:  # others may still read blocks
                drive(self._engine, self, lambda _: self.report())
        except CbatchError:
            self.failed = True
            self.give_up()
            raise
        finally:
            self.tell()

    def now(self) -> float:
        """Returns the time of the engine, also while it computes."""
        return (perf_counter() - self._origin) * self._scale

    def request(self, spec: RequestSpec) -> Request:
        """Returns a client's request, on the engine's clock."""
        arrival = max((spec.arrival_time - self._origin) * self._scale, 0.0)
        return Request.from_spec(dataclasses.replace(spec, arrival_time=arrival))

    def seconds_until(self, host: Any, time: float) -> float:
        """Returns the real seconds from now until a time of the engine; `time_scale` of its seconds take one."""
        return self._origin + time / self._scale - perf_counter()

    def wait(self, host: Any, time: float) -> None:
        self.tell()  # of clients that have left since the turn
        super().wait(host, time)
        host.sleep_until(min(time, self.now()))

    def receive(self, message: Any) -> None:
        match message:
            case RequestSpec():
                self.receive(self.request(message))
            case Request():
                self.requests.append(message)
                super().receive(message)
                self.adopted(message)
            case int():
                if request := self._live.get(message):
                    self._engine.cancel(request)
            case Refused():
                self.num_refused += message.number
            case None if self._is_open:
                super().receive(None)
                self.give_up()
            case _:
                super().receive(message)

    def adopted(self, request: Request) -> None:
        """Takes a request that is here from now on."""
        self._live[request.id] = request
        if request.id in self.left_early:
            self._engine.cancel(request)

    def left(self, prefilled: Prefilled) -> None:
        """Hands a request on to its decoder, once its first token has been reported."""
        del self._live[prefilled.request.id]
        self._leaving.append(prefilled)

    def ended(self, request: Request) -> None:
        super().ended(request)
        del self._live[request.id]
        if self._router is not None:
            self._router.put(request)

    def give_up(self) -> None:
        """Cuts all requests, ignoring further errors of a policy that has failed."""
        left = [request for request in self._live.values() if request.status is not Status.FINISHED]
        self.num_cut += len(left)
        for request in left:
            with suppress(CbatchError):
                self._engine.cancel(request)

    def report(self) -> None:
        """Sends the results of a turn, in simulation at their time."""
        if self._is_simulated:
            seconds = self.seconds_until(self._engine, self._engine.now())
            self.lag = max(self.lag, -seconds)
            sleep(max(seconds, 0.0))
        self.tell()

    def tell(self) -> None:
        """Sends the changes since the last call."""
        record, state = self._engine.record, self._engine.state
        ended, receivers = record.requests[self._num_ended :], record.receivers[self._num_steps :]
        steps = record.steps[self._num_steps :]
        counted = ("preempted", "drafted", "drafts", "accepted")
        counts = tuple(sum(getattr(step, f"num_{name}") for step in steps) for name in counted)
        self._num_ended, self._num_steps = len(record.requests), len(record.steps)
        num_waiting, leaving = len(state.waiting) + self._engine.inbox.num_coming, self._leaving
        now = len(state.running), num_waiting, state.pool.num_used / state.pool.num_blocks
        if ended or receivers or now != self._state:
            self._state = now
            ids = receivers[0].tolist() if receivers else []  # a turn ends one iteration at most
            gone = [*ended, *(moved := [prefilled.request for prefilled in leaving])]
            prompts = _prompts_of([*(each for each in ended if not each.num_moves), *moved])
            self._send(Turn(ids, self._tokens(ids, gone), ended, now, self._replica, self.failed, prompts, counts))
        self._leaving = []
        for prefilled in leaving:
            assert self._router is not None
            self._router.put(prefilled)

    def _tokens(self, ids: list[int], ended: list[Request]) -> list[int]:
        """Returns the newest tokens of each request, as many as its id is named."""
        table, live = self._engine.state.table, self._live
        if table.tokens is None or not ids:
            return [-1] * len(ids)
        rows = [live[id_]._row if id_ in live else 0 for id_ in ids]
        later, left = list[int](), Counter(ids)
        for id_ in ids:
            left[id_] -= 1
            later.append(left[id_])  # tokens of the same request that follow
        newest: list[int] = table.tokens[rows, table.known[rows] - 1 - later].tolist()
        last = {request.id: request.output for request in ended if request.output}
        return [last[id_][-1 - n] if id_ in last else token for id_, n, token in zip(ids, later, newest, strict=True)]


def _prompts_of(requests: Iterable[Request]) -> tuple[int, int, int]:
    """Returns `Turn.prompts`."""
    admitted = [each for each in requests if each.admitted_at is not None]
    computed = sum(each.num_prompt_tokens for each in admitted if each.first_token_at is not None)
    return computed, sum(each.num_prompt_tokens for each in admitted), sum(each.num_cached_tokens for each in admitted)
