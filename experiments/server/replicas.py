"""Routes the requests of a server's clients to replicas, which serve on a thread each."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from cbatch import RequestSpec
from cbatch.cluster import LiveCluster
from experiments.server.clients import ClientArrivals, Inbox


def serve_replicas(cluster: LiveCluster, clients: Sequence[ClientArrivals], inbox: Inbox) -> None:
    """Routes the inbox's requests, which replicas serve on a thread each, until the door closes, or a replica or the router fails: raises its error.

    When the door closes, each open request is cancelled where it is.
    """
    open_, is_open = set[int](), True
    cluster.begin(clients, inbox)
    try:
        with _serving(clients, inbox):
            while is_open or open_:
                match inbox.get():
                    case Future():  # a replica has failed
                        break
                    case RequestSpec() as spec:
                        open_.add(spec.id)
                        cluster.arrive(clients[0].request(spec), clients[0].now())
                    case int(id_):
                        if id_ in open_:
                            cluster.cancel(id_)
                    case None if is_open:
                        is_open = False
                        for place, each in enumerate(clients):
                            each.num_cut = 0 if place else len(open_)
                        for id_ in open_:
                            cluster.cancel(id_)
                    case message:
                        open_.difference_update(request.id for request in cluster.take_in([message]))
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
        finally:
            for each in clients:
                each.messages.put(None)
    for replica in serving:
        replica.result()
