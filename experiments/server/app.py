"""The routes of a server, its limits and its key."""

from functools import partial
from hmac import compare_digest
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from prometheus_client import generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cbatch import CbatchError
from experiments.server.answers import describe_error
from experiments.server.bodies import AnyBody, ChatBody, CompletionBody
from experiments.server.door import Door


def make_app(door: Door) -> FastAPI:
    """Returns the application. Only `/v1` needs the key: the other routes show nothing of a client."""
    settings, name = door.settings.server, door.settings.model.name

    async def check_key(authorization: Annotated[str, Header()] = "") -> None:
        expected = f"Bearer {settings.api_key}"
        if settings.api_key and not compare_digest(authorization.encode(), expected.encode()):
            raise HTTPException(401, "give the server's key, as in Authorization: Bearer KEY")

    kinds = CbatchError, ValidationError, ClientDisconnect, HTTPException, Exception
    app = FastAPI(openapi_url=None, exception_handlers=dict.fromkeys(kinds, _answer_with_error))
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=503 if door.is_closed else 200)

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        return Response(generate_latest(door.meters), media_type="text/plain; version=0.0.4; charset=utf-8")

    @v1.get("/models")
    async def models() -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": 0, "owned_by": "cbatch", "root": name, "parent": None}
        return {"object": "list", "data": [{**model, "max_model_len": door.longest}]}

    async def answer(kind: type[AnyBody], request: Request) -> Response:
        """Refuses a body of too many bytes, and one that a web page may send unasked."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "give the header Content-Type: application/json")
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > settings.max_body:
                raise HTTPException(413, f"the body has more than {settings.max_body} bytes")
        return await door.open(kind, bytes(content))

    v1.post("/completions")(partial(answer, CompletionBody))
    v1.post("/chat/completions")(partial(answer, ChatBody))
    app.include_router(v1)
    return app


async def _answer_with_error(request: Request, error: Exception) -> Response:
    status, content = describe_error(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return Response(content, status, headers, media_type="application/json")
