"""The engine's side of a server: requests come in from an inbox, and each turn of the loop sends at most one message.

    inbox      RequestSpec            a client asks; its `arrival_time` is of `perf_counter`
               (id, FinishReason)     a client has left, or has all it wants
               None                   the door closes: the loop ends with the last request
    outbox     int                    it serves; the tokens that its KV cache holds
               Turn                   after each turn of the loop that has changed something
               dict or str            it has ended: the run's summary, or the error

Knows nothing of HTTP.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX
from time import perf_counter, sleep
from typing import Any, NamedTuple, cast

from cbatch import CbatchError, Engine, Executor, FinishReason, Request, RequestSpec, RunRecord
from cbatch.arrivals import Arrivals
from cbatch.errors import StallError, WorkloadError
from cbatch.executor import StepResult
from cbatch.request import spec_of
from cbatch.request_spec import LATEST_ARRIVAL
from experiments.serve import decisions_of, serve
from experiments.server.settings import ServerSettings
from experiments.settings.assemble import Run
from experiments.settings.error_lines import one_line
from experiments.workloads.drawn import totals_of

Message = RequestSpec | tuple[int, FinishReason] | None


class Turn(NamedTuple):
    """A turn of the loop. ids: of the requests that received a token or ended. tokens: theirs; -1 in simulation, None without one.

    num_tokens: received. kv_use: share of the KV blocks in use.
    """

    ids: list[int]
    tokens: list[int | None]
    ended: list[Request]
    num_tokens: int
    num_running: int
    num_waiting: int
    kv_use: float


FAILED = "ended by"
"""Of what was chosen: the message of the error that ended the run."""

Inbox = SimpleQueue[Message]
Note = Callable[[Request], None]
Say = Callable[[str], None]
Send = Callable[[int | Turn | dict[str, Any] | str], object]


def serve_clients(settings: ServerSettings, folder: Path, inbox: Inbox, send: Send, say: Say, replace: bool) -> None:
    """Serves what the inbox brings until the door closes or the policy fails, and writes the folder of the run.

    say, replace: as for `serve`.
    """
    try:
        loop = partial(_run, settings, inbox, send, say)
        options: Any = {"bar": False, "largest": settings.largest, "loop": loop}
        result = serve(settings, folder, replace=replace, say=say, **options)
        send(result.summary["about"]["chosen"].get(FAILED, result.summary))
    except BaseException as error:
        send(one_line(error) or f"{type(error).__name__}: {error}")


def _run(settings: ServerSettings, inbox: Inbox, send: Send, say: Say, run: Run, folder: Path | None) -> RunRecord:
    [engine] = run.engine.engines
    paced = Paced(engine.executor, settings.time_scale)
    if settings.backend.simulated:
        engine.executor = cast(Executor, paced)
    requests = cast(list[Request], run.requests)
    with closing(run.server), decisions_of(run, folder) as writer:

        def note(request: Request) -> None:
            requests.append(request)
            if writer is not None:
                writer.request(spec_of(request))

        engine.arrivals = clients = Clients(inbox, send, engine, settings, note)
        send(run.kv.num_tokens)
        try:
            engine.run(clients.report)
        except CbatchError as error:
            run.chosen[FAILED] = one_line(error) or type(error).__name__
            clients.give_up()
    record = engine.record
    if requests:
        run.totals = totals_of(requests)
    if settings.backend.simulated:
        run.chosen["time_scale"] = f"{settings.time_scale:g} (iterations ended at most {paced.lag:.3g} s late)"
        say(f"time_scale={run.chosen['time_scale']}")
    return record


class Paced:
    """A simulated executor in real time: `scale` simulated seconds take one.

    lag: the most seconds by which an iteration ended too late. Deadlines are absolute, so that delays do not add up.
    """

    repeats = False  # an iteration at a time

    def __init__(self, inner: Executor, scale: float) -> None:
        self._inner, self._scale, self._origin, self.lag = inner, scale, perf_counter(), 0.0

    def wait(self, in_flight: Any) -> StepResult:
        result = self._inner.wait(in_flight)
        if (seconds := self._origin + result.ended / self._scale - perf_counter()) > 0:
            sleep(seconds)
        else:
            self.lag = max(self.lag, -seconds)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Clients(Arrivals):
    """Those who ask through an inbox. The open door counts as an unfinished request."""

    def __init__(self, inbox: Inbox, send: Send, engine: Engine, settings: ServerSettings, note: Note) -> None:
        """note: called with each request that is served."""
        self.num_unfinished, self._is_open = 1, True
        self._inbox, self._send, self._engine, self._note = inbox, send, engine, note
        self._scale, self._patience = settings.time_scale, min(settings.patience.seconds, TIMEOUT_MAX)
        self._origin = perf_counter() - engine.executor.now() / self._scale
        self._pending: deque[Request] = deque()
        self._live: dict[int, Request] = {}  # that have not ended
        self._refused: list[Request] = []  # that cannot be served, since the last turn
        self._num_steps = self._num_ended = 0  # that were reported
        self._counts = (0, 0, 0.0)

    def due(self, now: float, iteration: int | None) -> list[Request]:
        pending, arrived = self._pending, list[Request]()
        while pending and pending[0].arrival_time <= now:
            arrived.append(pending.popleft())
        return arrived

    def next(self) -> float:
        if self._pending:
            return self._pending[0].arrival_time
        return LATEST_ARRIVAL if self._is_open else inf

    def wait(self, executor: Executor, time: float) -> None:
        """Waits in the inbox. Raises StallError after the patience's seconds, if requests wait for nothing but the policy."""
        seconds = min(self._origin + time / self._scale - perf_counter(), self._patience)
        try:
            self._take(self._inbox.get(timeout=max(seconds, 0.0)))
        except Empty:
            if self._live and seconds == self._patience:
                stalled = f"policy {self._engine.policy_name} plans nothing for {seconds:g} s"
                raise StallError(f"{stalled} with {len(self._live)} requests; raise patience.seconds") from None
        executor.sleep_until(min(time, (perf_counter() - self._origin) * self._scale))

    def _take(self, message: Message) -> None:
        match message:
            case None:
                self.num_unfinished -= self._is_open
                self._is_open = False
            case RequestSpec():
                arrival = (message.arrival_time - self._origin) * self._scale
                self._submit(Request.from_spec(dataclasses.replace(message, arrival_time=max(arrival, 0.0))))
            case id_, reason:
                if request := self._live.get(id_):
                    self._engine.cancel(request, reason)

    def _submit(self, request: Request) -> None:
        try:
            self._engine.check_fits(request)
        except WorkloadError as error:
            request.reject_reason = str(error)
            self._refused.append(request)
            return
        self._note(request)
        self._pending.append(request)
        self._live[request.id] = request
        self.num_unfinished += 1

    def withdraw(self, request: Request) -> None:
        self._pending.remove(request)

    def ended(self, request: Request) -> None:
        super().ended(request)
        del self._live[request.id]

    def give_up(self) -> None:
        """Cancels all requests, of which the policy, which has failed, may not want to hear."""
        for request in list(self._live.values()):
            with suppress(CbatchError):
                self._engine.cancel(request)

    def report(self, engine: Engine) -> None:
        """Takes what is in the inbox after a turn, and sends what the turn has brought."""
        with suppress(Empty):
            while True:
                self._take(self._inbox.get(block=False))
        record, state = engine.record, engine.state
        ended, receivers = record.requests[self._num_ended :], record.receivers[self._num_steps :]
        self._num_ended, self._num_steps = len(record.requests), len(record.steps)
        counts = len(state.running), len(state.waiting), state.pool.num_used / state.pool.num_blocks
        if not (ended or receivers or self._refused or counts != self._counts):
            return
        ids: list[int] = receivers[0].tolist() if receivers else []  # a turn ends one iteration at most
        tokens: list[int | None] = [*self._tokens(ids, ended)]
        ended = ended + self._refused
        others = [request.id for request in ended if request.id not in ids]
        self._send(Turn(ids + others, tokens + [None] * len(others), ended, len(ids), *counts))
        self._counts, self._refused = counts, []

    def _tokens(self, ids: list[int], ended: list[Request]) -> list[int]:
        """Returns the newest token of each request."""
        table, live = self._engine.state.table, self._live
        if table.tokens is None:
            return [-1] * len(ids)
        rows = [live[id_].row if id_ in live else 0 for id_ in ids]
        newest: list[int] = table.tokens[rows, table.known[rows] - 1].tolist() if rows else []
        last = {request.id: request.output[-1] for request in ended if request.output}
        return [last.get(id_, token) for id_, token in zip(ids, newest, strict=True)] if last else newest
