"""The routes, limits and API key of a server."""

from functools import partial
from hmac import compare_digest

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cbatch import CbatchError
from experiments.server.answers import describe_error
from experiments.server.bodies import AnyBody, ChatBody, CompletionBody
from experiments.server.door import Door


class Http(HttpToolsProtocol):
    """Tells each request of a connection that its client has left. uvicorn tells only the newest, which may wait behind the one being answered."""

    open: tuple[RequestResponseCycle, ...] = ()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.open = (*(cycle for cycle in self.open if not cycle.response_complete), self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self.open:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)


def make_app(door: Door) -> Starlette:
    """Returns the application. Only `/v1` requires the key: the other routes expose no client data."""
    settings, name = door.settings.server, door.settings.model.name

    def check_key(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and compare_digest(key.strip().encode(), str(settings.api_key).encode())
        if settings.api_key and not known:
            raise HTTPException(401, "give the server's key, as in Authorization: Bearer KEY")

    async def health(request: Request) -> Response:
        return Response(status_code=503 if door.is_closed else 200)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(door.meters), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(request: Request) -> Response:
        check_key(request)
        model = {"id": name, "object": "model", "created": 0, "owned_by": "cbatch", "root": name, "parent": None}
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": door.longest}]})

    async def answer(kind: type[AnyBody], request: Request) -> Response:
        """Answers a body. Refuses bodies that are too large, and content types that a web page may send without consent."""
        check_key(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "give the header Content-Type: application/json")
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > settings.max_body:
                raise HTTPException(413, f"the body has more than {settings.max_body} bytes")
        return await door.open(kind, bytes(content))

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/completions", partial(answer, CompletionBody), methods=["POST"]),
        Route("/v1/chat/completions", partial(answer, ChatBody), methods=["POST"]),
    ]
    kinds = CbatchError, ClientDisconnect, HTTPException, Exception
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _answer_with_error))


async def _answer_with_error(request: Request, error: Exception) -> Response:
    status, content = describe_error(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return Response(content, status, headers, media_type="application/json")
