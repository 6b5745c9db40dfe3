"""The engine's side of a server: requests come in from an inbox, and each turn of the loop sends at most one message.

    inbox      RequestSpec    a client asks; its `arrival_time` is of `perf_counter`
               int            id of a request whose client has left
               str            what the run's `chosen` says of requests that were cut
               None           the door closes: the loop ends with the last request
    outbox     int            it serves; the tokens that its KV cache holds
               Turn           after each turn of the loop that has changed something
               dict or str    it has ended: the run's summary, or the error

Knows nothing of HTTP.
"""

import dataclasses
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from math import inf
from pathlib import Path
from queue import Empty
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cbatch import CbatchError, Engine, Executor, Request, RequestSpec, RunRecord
from cbatch.arrivals import Submitted
from cbatch.errors import StallError, WorkloadError
from cbatch.executor import StepResult
from cbatch.request import spec_of
from cbatch.request_spec import LATEST_ARRIVAL
from experiments.serve import decisions_of, serve
from experiments.server.settings import ServerSettings
from experiments.settings.assemble import Run
from experiments.settings.error_lines import one_line
from experiments.workloads.drawn import totals_of

if TYPE_CHECKING:
    from experiments.store.decisions_file import DecisionsWriter

Message = RequestSpec | int | str | None

_LONGEST_WAIT = 1e6
"""Seconds; the longest of a system call are 2**31 ms."""


class Turn(NamedTuple):
    """A turn of the loop.

    ids: of the requests that received a token. tokens: theirs; -1 in simulation. ended: these and other requests.
    state: requests that run, and that wait; share of the KV blocks in use.
    """

    ids: list[int]
    tokens: list[int]
    ended: list[Request]
    state: tuple[int, int, float]


FAILED, CUT = "ended by", "cut"
"""Of what was chosen: the message of the error that ended the run, and which requests the server's end has cut."""

Send = Callable[[int | Turn | dict[str, Any] | str], object]
Say = Callable[[str], None]


def serve_clients(settings: ServerSettings, folder: Path, inbox: Any, send: Send, say: Say, replace: bool) -> None:
    """Serves what the inbox brings until the door closes or the policy fails, and writes the folder of the run.

    inbox: a queue of messages. say, replace: as for `serve`.
    """
    try:
        loop = partial(_run, settings, inbox, send, say)
        options: Any = {"bar": False, "largest": settings.largest, "loop": loop}
        result = serve(settings, folder, replace=replace, say=say, **options)
        send(result.summary["about"]["chosen"].get(FAILED, result.summary))
    except BaseException as error:
        send(one_line(error) or f"{type(error).__name__}: {error}")


def _run(settings: ServerSettings, inbox: Any, send: Send, say: Say, run: Run, folder: Path | None) -> RunRecord:
    [engine] = run.engine.engines
    with closing(run.server), decisions_of(run, folder) as writer:
        engine.arrivals = clients = Clients(settings, run, writer, inbox, send)
        paced = Paced(engine.executor, clients)
        if settings.backend.simulated:
            engine.executor = cast(Executor, paced)
        send(run.kv.num_tokens)
        try:
            engine.run(clients.report)
        except CbatchError as error:
            run.chosen[FAILED] = one_line(error) or type(error).__name__
            clients.give_up()
    if run.requests:
        run.totals = totals_of(run.requests)
    if settings.backend.simulated:
        run.chosen["time_scale"] = f"{settings.time_scale:g} (iterations ended at most {paced.lag:.3g} s late)"
        say(f"time_scale={run.chosen['time_scale']}")
    return engine.record


class Paced:
    """A simulated executor in real time.

    lag: the most seconds by which an iteration ended too late. Deadlines are absolute, so that delays do not add up.
    """

    repeats = False  # an iteration at a time

    def __init__(self, inner: Executor, clients: "Clients") -> None:
        self._inner, self._clients, self.lag = inner, clients, 0.0

    def wait(self, in_flight: Any) -> StepResult:
        result = self._inner.wait(in_flight)
        if (seconds := self._clients.seconds_until(result.ended)) > 0:
            sleep(seconds)
        else:
            self.lag = max(self.lag, -seconds)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Clients(Submitted):
    """Those who ask through an inbox. The open door counts as an unfinished request."""

    def __init__(
        self, settings: ServerSettings, run: Run, writer: "DecisionsWriter | None", inbox: Any, send: Send
    ) -> None:
        """writer: of the run's decisions."""
        super().__init__()
        self.num_unfinished, self._is_open = 1, True
        self._run, self._writer, self._inbox, self._send = run, writer, inbox, send
        [self._engine] = run.engine.engines
        self._scale, self._patience = settings.time_scale, min(settings.patience.seconds, _LONGEST_WAIT)
        self._origin = perf_counter() - self._engine.executor.now() / self._scale
        self._live: dict[int, Request] = {}  # that have not ended
        self._num_steps = self._num_ended = 0  # that were reported
        self._state = (0, 0, 0.0)

    def seconds_until(self, time: float) -> float:
        """Returns the real seconds from now until a time of the engine; `time_scale` of its seconds take one."""
        return self._origin + time / self._scale - perf_counter()

    def next(self) -> float:
        return min(super().next(), LATEST_ARRIVAL if self._is_open else inf)

    def wait(self, executor: Executor, time: float) -> None:
        """Waits in the inbox. Raises StallError after the patience's seconds, if requests wait for nothing but the policy."""
        seconds = min(self.seconds_until(time), self._patience)
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
            case str():
                self._run.chosen[CUT] = message
            case id_:
                if request := self._live.get(id_):
                    self._engine.cancel(request)

    def _submit(self, request: Request) -> None:
        try:
            self._engine.check_fits(request)
        except WorkloadError as error:
            request.reject_reason = str(error)
            self._send(Turn([], [], [request], self._state))
            return
        cast(list[Request], self._run.requests).append(request)
        if self._writer is not None:
            self._writer.request(spec_of(request))
        self.add([request])
        self._live[request.id] = request

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
        now = len(state.running), len(state.waiting), state.pool.num_used / state.pool.num_blocks
        if not (ended or receivers or now != self._state):
            return
        ids = receivers[0].tolist() if receivers else []  # a turn ends one iteration at most
        self._send(Turn(ids, self._tokens(ids, ended), ended, now))
        self._state = now

    def _tokens(self, ids: list[int], ended: list[Request]) -> list[int]:
        """Returns the newest token of each request."""
        table, live = self._engine.state.table, self._live
        if table.tokens is None:
            return [-1] * len(ids)
        rows = [live[id_].row if id_ in live else 0 for id_ in ids]
        newest: list[int] = table.tokens[rows, table.known[rows] - 1].tolist() if rows else []
        last = {request.id: request.output[-1] for request in ended if request.output}
        return [last.get(id_, token) for id_, token in zip(ids, newest, strict=True)] if last else newest
