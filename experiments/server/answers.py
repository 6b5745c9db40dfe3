"""The answer to a request: it collects tokens, and writes them to its client as they come, or all at the end.

    engine   | iteration        | iteration          | last iteration
    answer   take, take, ...    take, ...            take
    client             chunk             chunk, chunk      chunk, usage, [DONE]

A chunk per token, even one without text, as clients count chunks. A client that leaves ends its requests.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from secrets import token_hex
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from cbatch import FinishReason, Request
from experiments.server.bodies import Body, ChatBody
from experiments.server.errors import describe_error
from experiments.server.words import Words
from experiments.text import OutputText

_REASONS = {FinishReason.LENGTH: "length", FinishReason.STOP: "stop"}
_START, _BODY = "http.response.start", "http.response.body"
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(slots=True, eq=False)
class Choice:
    """An output of an answer, computed as one request.

    reason: why it ended, as clients read it; None before. texts: of its tokens, where they are not streamed.
    """

    answer: "Answer"
    id: int
    index: int
    output: OutputText | Words
    num_tokens: int = 0
    num_cached: int = 0
    reason: str | None = None
    texts: list[str] = field(default_factory=list)


class Answer(Response):
    """The choices of one request, in order.

    num_prompt_tokens: of all its prompts. leave: called with the id of a request whose client has left.
    """

    def __init__(self, body: Body, model: str, num_prompt_tokens: int, leave: Callable[[int], object]) -> None:
        super().__init__()
        self._asked, self._num_prompt_tokens, self._leave = body, num_prompt_tokens, leave
        self._choices: list[Choice] = []
        self._num_open = 0
        self._chunks: list[str] = []  # to be sent
        self._news = asyncio.Event()
        self._problem: HTTPException | None = None
        self._is_chat = isinstance(body, ChatBody)
        kind = f"chat.completion{'.chunk' if body.stream else ''}" if self._is_chat else "text_completion"
        id_ = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{token_hex(12)}"
        self._about = {"id": id_, "object": kind, "created": int(time.time()), "model": model}
        self._head = f"data: {json.dumps(self._about)[:-1]}, "
        self._opening, self._closing = ('"delta":{"content":', "}") if self._is_chat else ('"text":', "")

    def add(self, id_: int, output: OutputText | Words) -> Choice:
        """Returns a further choice. id_: of its request."""
        self._choices.append(choice := Choice(self, id_, len(self._choices), output))
        self._num_open += 1
        if self._is_chat and self._asked.stream:
            self._chunks.append(self._chunk(choice, '"delta":{"role":"assistant","content":""}'))
        return choice

    def take(self, choice: Choice, token: int | None, end: Request | None) -> None:
        """Takes a choice's next token, or its end, or both. A token of -1 stands for any."""
        text, is_stopped = "", False
        if token is not None:
            choice.num_tokens += 1
            text, is_stopped = choice.output.push(token)
        if end is not None:
            if end.finish_reason not in _REASONS:
                status, why = 503 if end.finish_reason else 400, end.reject_reason or "the request was given up"
                self.fail(HTTPException(status, why))
                return
            choice.reason, choice.num_cached = _REASONS[end.finish_reason], end.num_cached_tokens
            self._num_open -= 1
            text += "" if is_stopped else choice.output.finish()
        if self._asked.stream:
            self._chunks.append(self._chunk(choice, f"{self._opening}{quote(text)}{self._closing}"))
        else:
            choice.texts.append(text)
        if self._asked.stream or not self._num_open:
            self._news.set()

    def fail(self, problem: HTTPException) -> None:
        """Ends the answer."""
        self._problem = problem
        self._news.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers the client until it leaves. Raises HTTPException before anything is sent."""
        work = asyncio.ensure_future(self._stream(send) if self._asked.stream else self._send_whole(send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            watch.cancel()
            for choice in self._choices:
                self._leave(choice.id)

    async def _stream(self, send: Any) -> None:
        """Streams chunks. After an error the connection is cut: clients take an answer that ends well for a success."""
        begun = ended = False
        while not ended:
            await self._news.wait()
            self._news.clear()
            ended = self._problem is not None or not self._num_open
            if not begun:
                if self._problem:
                    raise self._problem
                await send({"type": _START, "status": 200, "headers": _HEADERS})
                begun = True
            if self._problem:
                self._chunks.append(f"data: {describe_error(self._problem)[1]}\n\n")
            elif not self._num_open:
                self._chunks += self._last_chunks()
            content, more = "".join(self._chunks).encode(), self._num_open > 0
            self._chunks.clear()
            await send({"type": _BODY, "body": content, "more_body": more})

    def _chunk(self, choice: Choice, content: str) -> str:
        reason = "null" if choice.reason is None else f'"{choice.reason}"'
        usage = self._usage() if self._asked.stream_options.continuous_usage_stats else ""
        fields = f'"index":{choice.index},{content},"logprobs":null,"finish_reason":{reason}'
        return f'{self._head}"choices":[{{{fields}}}]{usage}}}\n\n'

    def _last_chunks(self) -> list[str]:
        usage = [f'{self._head}"choices":[]{self._usage()}}}\n\n'] if self._asked.stream_options.include_usage else []
        return [*usage, "data: [DONE]\n\n"]

    async def _send_whole(self, send: Any) -> None:
        await self._news.wait()
        if self._problem:
            raise self._problem
        choices = json.dumps([*map(self._whole, self._choices)])
        content = f'{json.dumps(self._about)[:-1]}, "choices":{choices}{self._usage()}}}'
        await send({"type": _START, "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": _BODY, "body": content.encode()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return {"index": choice.index, **content, "logprobs": None, "finish_reason": choice.reason}

    def _usage(self) -> str:
        prompt, new = self._num_prompt_tokens, sum(choice.num_tokens for choice in self._choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        cached = sum(choice.num_cached for choice in self._choices[:: self._asked.n])  # the first of each prompt
        return f',"usage":{json.dumps({**counts, "prompt_tokens_details": {"cached_tokens": cached}})}'


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
