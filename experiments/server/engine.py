"""The engine's side of a server: requests come in from an inbox, and each turn of the loop sends at most one message.

    inbox      RequestSpec    a client asks; its `arrival_time` is of `perf_counter`
               int            id of a request whose client has left
               Refused        requests that the door has refused
               None           the door closes: requests that have not ended are cut, and the loop ends
               others         what replicas send to the thread that routes: see `LiveCluster`
    outbox     int            it serves; the most tokens of a request
               Turn           after each turn of the loop that has changed something
               dict or str    it has ended: the run's summary, or the error

It runs in a process of its own: a busy Python thread would delay a thread that waits for a GPU by milliseconds. Several replicas have
an inbox and a thread each, and the thread that serves routes requests to them. Knows nothing of HTTP.
"""

import multiprocessing
import os
import signal
import sys
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from ctypes import c_ulong, py_object, pythonapi
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread, get_ident
from traceback import format_exception, walk_stack
from typing import Any

from cbatch import CbatchError, Engine, FinishReason, Request, RequestSpec, RunRecord
from cbatch.cluster import Cluster, LiveCluster, Role
from cbatch.errors import call
from cbatch.facts import facts_of
from experiments.serve import decisions_of, serve
from experiments.server.clients import ClientArrivals, Inbox, Refused, Send, Turn
from experiments.server.settings import ServerSettings
from experiments.settings.error_lines import one_line
from experiments.setup.assemble import Run
from experiments.store.run_folder import SUMMARY

Log = Callable[[str], None]


@contextmanager
def engine_of(settings: ServerSettings, folder: Path, **options: Any) -> Iterator[Connection]:
    """Starts the engine's process, and kills it at the end of the `with`. Yields the connection to the engine."""
    context = multiprocessing.get_context("spawn")  # threads and CUDA do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(settings, folder, theirs), kwargs=options, daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()


def _serve(settings: ServerSettings, folder: Path, server: Connection, **options: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # handled by the server's process
    signal.signal(signal.SIGUSR1, _end_plan)
    inbox: Inbox = Inbox()
    Thread(target=_read, args=(server, inbox), daemon=True).start()
    serve_clients(settings, folder, inbox, server.send, **options)


class ToldToEndError(CancelledError):
    """No `except Exception` of a policy handles it."""

    def __str__(self) -> str:
        return "the server was told to end three times"


def _end_plan(_: int, frame: Any) -> None:
    """Raises an error inside policies that may never return. Like any policy error, it ends the run."""
    for thread, inner in sys._current_frames().items():
        if any(outer.f_code is call.__code__ for outer, _ in walk_stack(inner)) and thread != get_ident():
            pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread), py_object(ToldToEndError))
    if any(outer.f_code is call.__code__ for outer, _ in walk_stack(frame)):
        raise ToldToEndError  # at once, also in a call that sleeps


def _read(server: Connection, inbox: Inbox) -> None:
    """Reads the server's messages immediately, so that neither process waits for the other."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put(server.recv())
    os._exit(1)  # the server has ended


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
    with closing(run.server), decisions_of(run, folder):
        longest = dict.fromkeys(Role, 0)
        roles = run.engine.roles if isinstance(run.engine, Cluster) else [Role.BOTH]
        for engine, role in zip(run.engine.engines, roles, strict=True):
            most = min(settings.longest, engine.state.pool.num_tokens + 1)  # the last token never enters the KV cache
            engine.check_fits(Request(0, most - 1, 1))  # so does any other
            engine.leaps, longest[role] = False, max(longest[role], most)  # clients see each token when it comes
        clients = _clients(settings, run.engine.engines, inbox, send)
        send(max(longest[Role.BOTH], min(longest[Role.PREFILL], longest[Role.DECODE])))
        try:
            if isinstance(run.engine, LiveCluster):
                serve_replicas(run.engine, clients, inbox)
            else:
                clients[0].serve()
        except CbatchError as error:
            run.end.update(error=one_line(error), traceback="".join(format_exception(error)).splitlines())
        run.end |= {name: sum(getattr(each, f"num_{name}") for each in clients) for name in ("cut", "refused")}
    if requests := [request for each in clients for request in each.requests]:
        run.facts = facts_of(requests)
    if settings.backend.simulated:
        lag = max(each.lag for each in clients)
        run.chosen["time_scale"] = f"{settings.server.time_scale:g} (iterations ended at most {lag:.3g} s late)"
    if isinstance(run.engine, Cluster):
        run.engine.record = run.engine.merge()
    return run.engine.record


def _clients(settings: ServerSettings, engines: Sequence[Engine], inbox: Inbox, send: Send) -> Sequence[ClientArrivals]:
    """Returns the arrivals of each engine; of several, each has an inbox of its own, and messages are sent one at a time."""
    if len(engines) == 1:
        return [ClientArrivals(settings, engines[0], inbox, send)]
    lock = Lock()

    def send_alone(message: int | Turn | dict[str, Any] | str) -> None:
        with lock:
            send(message)

    return [ClientArrivals(settings, each, Inbox(), send_alone, number, inbox) for number, each in enumerate(engines)]


def serve_replicas(cluster: LiveCluster, clients: Sequence[ClientArrivals], inbox: Inbox) -> None:
    """Routes the inbox's requests, which replicas serve on a thread each, until the door closes, or a replica or the router fails: raises its error.

    When the door closes, each open request is cancelled where it is.
    """
    open_, cut, is_open = set[int](), set[int](), True
    cluster.begin(clients, inbox)
    try:
        with _serving(clients, inbox):
            while is_open or open_:
                match inbox.get():
                    case Future() as replica:
                        replica.result()  # raises its error
                    case RequestSpec() as spec:
                        open_.add(spec.id)
                        cluster.arrive(clients[0].request(spec), clients[0].now())
                    case int(id_):
                        if id_ in open_:
                            cluster.cancel(id_)
                    case Refused(number):
                        clients[0].num_refused += number
                    case None if is_open:
                        is_open, cut = False, open_.difference(clients[0].left_early)
                        for id_ in open_:
                            cluster.cancel(id_)
                    case message:
                        for request in cluster.take_in([message]):
                            open_.remove(request.id)
                            clients[0].num_cut += request.id in cut and request.finish_reason is FinishReason.CANCELLED
        cluster.settle()
    finally:
        if cluster.transfers is not None:
            cluster.transfers.close()


@contextmanager
def _serving(clients: Sequence[ClientArrivals], inbox: Inbox) -> Iterator[None]:
    """Serves on a thread per replica until the end of the `with`, and then raises a replica's error. Each that ends sends its future."""
    with ThreadPoolExecutor(len(clients)) as threads:
        serving = [threads.submit(each.serve) for each in clients]
        for replica in serving:
            replica.add_done_callback(inbox.put)
        try:
            yield
        except BaseException:
            for each in clients:
                each.failed = True
            raise
        finally:
            for each in clients:
                each.messages.put(None)
    for replica in serving:
        replica.result()
