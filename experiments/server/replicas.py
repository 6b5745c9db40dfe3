"""Routes the requests of a server's clients to replicas, which serve on a thread each."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from cbatch import PolicyError, RequestSpec
from cbatch.cluster import Cluster, LiveCluster
from cbatch.policy import name_of
from experiments.server.clients import ClientArrivals, Inbox


def serve_replicas(cluster: Cluster, clients: Sequence[ClientArrivals], inbox: Inbox) -> None:
    """Forwards messages to replicas, on a thread each, until the door closes, or a replica or the router fails. Raises its error."""
    with _serving(clients, inbox):
        while (message := inbox.get()) is not None:
            if isinstance(message, RequestSpec):
                cluster.route(clients[0].request(message), clients[0].now())
                if message.id not in cluster.replica_of:
                    problem = f"router {name_of(cluster.router)} rejected a request"
                    raise PolicyError(f"{problem}; a server's router cannot: let the policy reject it")
            id_ = message if isinstance(message, int) else message.id
            if id_ in cluster.replica_of:
                clients[cluster.replica_of[id_]].messages.put(message)


def serve_moving(cluster: LiveCluster, clients: Sequence[ClientArrivals], inbox: Inbox) -> None:
    """As `serve_replicas`, where requests move. When the door closes, each open request is cancelled where it is."""
    open_, is_open = set[int](), True
    cluster.begin(clients, inbox)
    try:
        with _serving(clients, inbox) as serving:
            while (is_open or open_) and not any(replica.done() for replica in serving):
                match inbox.get():
                    case RequestSpec() as spec:
                        open_.add(spec.id)
                        cluster.arrive(clients[0].request(spec), clients[0].now())
                    case int(id_):
                        if id_ in open_:
                            cluster.cancel(id_)
                    case None if is_open:
                        is_open, clients[0].num_cut = False, len(open_)
                        for id_ in open_:
                            cluster.cancel(id_)
                    case message:
                        ended = cluster.take_in([message]) if message is not None else ()
                        open_.difference_update(request.id for request in ended)
        cluster.transfers.settle()
        assert not any(engine.state.pool.num_used for engine in cluster.engines), "every KV block is free at the end"
    finally:
        cluster.transfers.close()


@contextmanager
def _serving(clients: Sequence[ClientArrivals], inbox: Inbox) -> Iterator[Sequence[Future[None]]]:
    """Serves on a thread per replica until the end of the `with`, and then raises a replica's error. Each that ends sends None."""
    with ThreadPoolExecutor(len(clients)) as threads:
        serving = [threads.submit(each.serve) for each in clients]
        for replica in serving:
            replica.add_done_callback(lambda _: inbox.put(None))
        try:
            yield serving
        finally:
            for each in clients:
                each.messages.put(None)
    for replica in serving:
        replica.result()
