"""The engine's side of a server: requests come in from an inbox, and each turn of the loop sends at most one message.

    inbox      RequestSpec    a client asks; its `arrival_time` is of `perf_counter`
               int            id of a request whose client has left
               None           the door closes: requests that have not ended are cut, and the loop ends
    outbox     int            it serves; the most tokens of a request
               Turn           after each turn of the loop that has changed something
               dict or str    it has ended: the run's summary, or the error

Knows nothing of HTTP.
"""

import dataclasses
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, sleep
from traceback import format_exception
from typing import Any, NamedTuple

from cbatch import CbatchError, Request, RequestSpec, RunRecord, Status
from cbatch.arrivals import Posted
from cbatch.facts import facts_of
from experiments.serve import decisions_of, serve
from experiments.server.settings import ServerSettings
from experiments.settings.error_lines import one_line
from experiments.setup.assemble import Run
from experiments.store.run_folder import SUMMARY

Message = RequestSpec | int | None


class Turn(NamedTuple):
    """A turn of the loop.

    ids: ids of the requests that received a token. tokens: their tokens; -1 in simulation. ended: these and other requests.
    state: numbers of running and of waiting requests; share of the KV blocks in use.
    """

    ids: list[int]
    tokens: list[int]
    ended: list[Request]
    state: tuple[int, int, float]


Inbox = SimpleQueue[Message]
Send = Callable[[int | Turn | dict[str, Any] | str], object]
Log = Callable[[str], None]


def serve_clients(settings: ServerSettings, folder: Path, inbox: Inbox, send: Send, **options: Any) -> None:
    """Serves the requests from the inbox until the door closes or the policy fails, and writes the folder of the run. options: as for `serve`."""
    try:
        loop, largest = partial(_run, settings, inbox, send), Request(0, settings.longest - 1, 1)
        result = serve(settings, folder, largest=largest, loop=loop, **options)
        failed = result.summary["about"].get("error")
        send(f"{failed}; results: {folder}; see about.traceback in its {SUMMARY}" if failed else result.summary)
    except BaseException as error:
        send(one_line(error) or f"{type(error).__name__}: {error}")


def _run(settings: ServerSettings, inbox: Inbox, send: Send, run: Run, folder: Path | None) -> RunRecord:
    [engine] = run.engine.engines
    with closing(run.server), decisions_of(run, folder):
        longest = min(settings.longest, run.kv.num_tokens + 1)  # the last token never enters the KV cache
        engine.check_fits(Request(0, longest - 1, 1))  # so does any other
        clients = ClientArrivals(settings, run, inbox, send)
        engine.attach(clients)
        engine.leaps = False  # clients see each token when it comes
        send(longest)
        try:
            engine.run(lambda _: clients.report())
        except CbatchError as error:
            run.end.update(error=one_line(error), traceback="".join(format_exception(error)).splitlines())
            clients.give_up()
        clients.tell()
    if clients.requests:
        run.facts = facts_of(clients.requests)
    if settings.backend.simulated:
        run.chosen["time_scale"] = f"{settings.server.time_scale:g} (iterations ended at most {clients.lag:.3g} s late)"
    return engine.record


class ClientArrivals(Posted):
    """The requests of clients, through an inbox. Until the door closes, it counts as an unfinished request.

    lag: the most seconds by which the tokens of a simulated iteration came too late.
    """

    def __init__(self, settings: ServerSettings, run: Run, inbox: Inbox, send: Send) -> None:
        super().__init__(inbox, settings.patience.seconds)
        self._run, self._send, self.lag = run, send, 0.0
        [self._engine] = run.engine.engines
        self._is_simulated, self._scale = settings.backend.simulated, settings.server.time_scale
        self._origin = perf_counter() - self._engine.now() / self._scale
        self.requests: list[Request] = []  # all so far
        self._live: dict[int, Request] = {}  # that have not ended
        self._num_steps = self._num_ended = 0  # that were told
        self._state = (0, 0, 0.0)

    def seconds_until(self, host: Any, time: float) -> float:
        """Returns the real seconds from now until a time of the engine; `time_scale` of its seconds take one."""
        return self._origin + time / self._scale - perf_counter()

    def wait(self, host: Any, time: float) -> None:
        self.tell()  # of clients that have left since the turn
        super().wait(host, time)
        host.sleep_until(min(time, (perf_counter() - self._origin) * self._scale))

    def receive(self, message: Message) -> None:
        match message:
            case RequestSpec():
                arrival = max((message.arrival_time - self._origin) * self._scale, 0.0)
                new = Request.from_spec(dataclasses.replace(message, arrival_time=arrival))
                self._live[new.id] = new
                self.requests.append(new)
                super().receive(new)
            case int():
                if request := self._live.get(message):
                    self._engine.cancel(request)
            case None if self._is_open:
                super().receive(None)
                self.give_up()

    def ended(self, request: Request) -> None:
        super().ended(request)
        del self._live[request.id]

    def give_up(self) -> None:
        """Cuts all requests, ignoring further errors of a policy that has failed."""
        left = [request for request in self._live.values() if request.status is not Status.FINISHED]
        self._run.end.setdefault("cut", len(left))
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
        self._num_ended, self._num_steps = len(record.requests), len(record.steps)
        now = len(state.running), len(state.waiting), state.pool.num_used / state.pool.num_blocks
        if ended or receivers or now != self._state:
            self._state = now
            ids = receivers[0].tolist() if receivers else []  # a turn ends one iteration at most
            self._send(Turn(ids, self._tokens(ids, ended), ended, now))

    def _tokens(self, ids: list[int], ended: list[Request]) -> list[int]:
        """Returns the newest token of each request."""
        table, live = self._engine.state.table, self._live
        if table.tokens is None or not ids:
            return [-1] * len(ids)
        rows = [live[id_].row if id_ in live else 0 for id_ in ids]
        newest: list[int] = table.tokens[rows, table.known[rows] - 1].tolist()
        last = {request.id: request.output[-1] for request in ended if request.output}
        return [last.get(id_, token) for id_, token in zip(ids, newest, strict=True)]
