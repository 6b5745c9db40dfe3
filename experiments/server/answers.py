"""The answer to a request, or an error in its place: tokens are sent to the client as they arrive, or all at the end.

    engine   | iteration        | iteration          | last iteration
    answer   take, take, ...    take, ...            take
    client             chunk             chunk, chunk      chunk, usage, [DONE]

Each token has a chunk, even without text, since clients count chunks. A client that disconnects cancels its requests.
"""

import asyncio
import json
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from json.encoder import encode_basestring_ascii as quote
from secrets import token_hex
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cbatch import CbatchError, Request
from cbatch.request import SERVED
from experiments.server.bodies import Body, ChatBody
from experiments.server.words import Words
from experiments.text import OutputText


@dataclass(slots=True, eq=False)
class Choice:
    """An output of an answer, computed as one request.

    reason: the `finish_reason` that clients receive; None before the end. text: the parts of an answer that is not streamed.
    """

    answer: "Answer"
    index: int
    output: OutputText | Words
    num_tokens: int = 0
    num_cached: int = 0
    reason: str | None = None
    text: list[str] = field(default_factory=list)


class Answer(Response):
    """The choices of one request, in order.

    num_prompt_tokens: tokens of all prompts. leave: called when the answer is complete or the client has disconnected.
    """

    def __init__(self, body: Body, model: str, num_prompt_tokens: int, leave: Callable[[], object]) -> None:
        super().__init__()
        self._body, self._num_prompt_tokens, self._leave = body, num_prompt_tokens, leave
        self._choices: list[Choice] = []
        self._num_open = 0
        self._chunks: list[str] = []  # to be sent
        self._news = asyncio.Event()
        self._problem: HTTPException | None = None
        prefix, kind, self._begin, self._end = "cmpl", "text_completion", '"text":', ""
        if isinstance(body, ChatBody):
            prefix, kind = "chatcmpl", "chat.completion"
            self._begin, self._end = '"message":{"role":"assistant","content":', "}"
            if body.stream:
                kind, self._begin = "chat.completion.chunk", '"delta":{"content":'
        about = {"id": f"{prefix}-{token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}
        self._head, self._tail = json.dumps(about)[:-1], "}"
        if body.stream:
            self._head, self._tail = f"data: {self._head}", "}\n\n"

    def add(self, output: OutputText | Words) -> Choice:
        """Adds a choice to the answer, and returns it."""
        self._choices.append(choice := Choice(self, len(self._choices), output))
        self._num_open += 1
        if "delta" in self._begin:
            role = self._choice(choice, "").replace('"content"', '"role":"assistant","content"')
            self._chunks.append(self._object(role))
        return choice

    def take(self, choice: Choice, token: int | None, end: Request | None) -> None:
        """Takes a choice's next token, its end, or both. Token -1 stands for any token."""
        text = ""
        if token is not None:
            choice.num_tokens += 1
            text = choice.output.push(token)
        if end is not None:
            if end.finish_reason is None or end.finish_reason not in SERVED:
                self.fail(HTTPException(503, end.reject_reason or "the server ends"))
                return
            choice.reason, choice.num_cached = end.finish_reason.value, end.num_cached_tokens
            self._num_open -= 1
            text += choice.output.finish()
        if not self._body.stream:
            choice.text.append(text)
            if self._num_open:
                return
            whole = (self._choice(choice, "".join(choice.text)) for choice in self._choices)
            self._chunks.append(self._object(",".join(whole), True))
        else:
            usage = self._body.stream_options
            self._chunks.append(self._object(self._choice(choice, text), usage.continuous_usage_stats))
            if not self._num_open:
                self._chunks += [self._object("", True)] * usage.include_usage + ["data: [DONE]\n\n"]
        self._news.set()

    def fail(self, problem: HTTPException) -> None:
        """Ends the answer with an error. The connection is cut, since clients count a regular end as success."""
        self._problem = problem
        self._chunks.append(f"data: {describe_error(problem)[1]}\n\n")
        self._news.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers the client until it disconnects. May raise HTTPException before the first byte is sent."""
        watch = asyncio.create_task(self._watch(receive))
        try:
            await asyncio.create_task(self._send(send))  # a separate task wakes without the middleware's frames
        finally:
            watch.cancel()
            self._leave()

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(HTTPException(400, "the client has left"))  # never read

    async def _send(self, send: Any) -> None:
        await self._news.wait()
        if self._problem:
            raise self._problem
        kind = b"text/event-stream; charset=utf-8" if self._body.stream else b"application/json"
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        is_last = False
        while not is_last:
            await self._news.wait()
            self._news.clear()
            is_last = self._problem is not None or not self._num_open
            content, more = "".join(self._chunks).encode(), self._num_open > 0
            self._chunks.clear()
            await send({"type": "http.response.body", "body": content, "more_body": more})

    def _object(self, choices: str, with_usage: bool = False) -> str:
        return f'{self._head},"choices":[{choices}]{self._usage() if with_usage else ""}{self._tail}'

    def _choice(self, choice: Choice, text: str) -> str:
        reason = "null" if choice.reason is None else f'"{choice.reason}"'
        content = f"{self._begin}{quote(text)}{self._end}"
        return f'{{"index":{choice.index},{content},"logprobs":null,"finish_reason":{reason}}}'

    def _usage(self) -> str:
        prompt, new = self._num_prompt_tokens, sum(choice.num_tokens for choice in self._choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        cached = sum(choice.num_cached for choice in self._choices[:: self._body.n])  # the first choice of each prompt
        return f',"usage":{json.dumps({**counts, "prompt_tokens_details": {"cached_tokens": cached}})}'


def describe_error(error: Exception) -> tuple[int, str]:
    """Returns the status and an error object as in OpenAI's API. `param` is the field that a user's error begins with."""
    match error:
        case HTTPException():
            status, message = error.status_code, str(error.detail)
        case CbatchError() | ClientDisconnect():  # after a disconnect the answer is not read
            status, message = 400, str(error)
        case _:
            traceback.print_tb(error.__traceback__)  # the message may contain a client's text
            status, message = 500, f"the server has failed ({type(error).__name__})"
    field = re.match(r"([^:=.[ ]+)[:=.[]", message) if status < 500 else None
    blamed = {"type": HTTPStatus(status).phrase, "param": field and field[1], "code": status}
    return status, json.dumps({"error": {"message": message, **blamed}})
