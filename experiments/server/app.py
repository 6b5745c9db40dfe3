"""The routes of a server, its limits and its key. An error is an object as in OpenAI's API, and names the field."""

import traceback
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from experiments.server.bodies import ApiError, Body, ChatBody, CompletionBody, read_text
from experiments.server.door import Door

_BODIES: dict[str, type[Body]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
_OPEN_TO_ALL = ("/health", "/metrics")
"""Paths that need no key: they show nothing of a client."""


def make_app(door: Door) -> "Front":
    """Returns the application."""
    settings, name = door.settings, door.settings.model.name
    app = FastAPI(openapi_url=None)
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_with_error)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=503 if door.closed.done() else 200)

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        return Response(door.meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": 0, "owned_by": "cbatch", "root": name, "parent": None}
        return {"object": "list", "data": [{**model, "max_model_len": settings.longest}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        content = await read_content(request.receive, settings.max_body)
        ids = await door.beside(len(content), lambda: door.text.encode(read_text(content).prompt))
        return {"count": len(ids), "max_model_len": settings.longest, "tokens": ids}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        content = await read_content(request.receive, settings.max_body)
        text = await door.beside(len(content), lambda: door.text.decode(read_text(content).tokens))
        return {"prompt": text}

    return Front(app, door)


async def _answer_with_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    elif not isinstance(error, ApiError):
        traceback.print_tb(error.__traceback__)  # without its message, which may have a client's text
        error = ApiError(500, f"the server has failed ({type(error).__name__})")
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return Response(error.body(), error.status, headers, media_type="application/json")


async def read_content(receive: Any, most: int) -> bytes:
    """Returns the body of a request. Raises ApiError for one of more bytes."""
    content, more = bytearray(), True
    while more:
        message = await receive()
        content += message.get("body", b"")
        if len(content) > most:
            raise ApiError(413, f"the body has more than {most} bytes")
        more = message.get("more_body", False)
    return bytes(content)


class Front:
    """Checks the key, and answers the routes that need speed; an application answers the others.

    As plain ASGI an answer takes half the time per token, and notices that its client has left.
    """

    def __init__(self, others: FastAPI, door: Door) -> None:
        key = door.settings.api_key
        self._digest = None if key is None else sha256(key.encode()).digest()
        self._others, self._door = others, door

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers, path = dict(scope["headers"]), scope["path"]
        try:
            if self._digest and path not in _OPEN_TO_ALL:
                given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
                if not compare_digest(sha256(given).digest(), self._digest):
                    raise ApiError(401, "give the server's key, as in Authorization: Bearer KEY")
            if path not in _BODIES or scope["method"] != "POST":
                return await self._others(scope, receive, send)
            if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
                raise ApiError(415, "give the header Content-Type: application/json")
            content = await read_content(receive, self._door.settings.max_body)
            answer = await self._door.open(_BODIES[path], content)
            await answer.send_to(receive, send)
        except Exception as error:
            await (await _answer_with_error(Request(scope), error))(scope, receive, send)
