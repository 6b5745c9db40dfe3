"""The answer to a request: it collects tokens, and writes them to its client as they come, or all at the end.

    engine   | iteration        | iteration          | last iteration
    answer   add, add, ... set    add, ... set         add, set
    client             chunk             chunk, chunk      chunk, usage, [DONE]

A chunk per token, even one without text, as clients count chunks. A client that leaves ends its requests.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as quote
from secrets import token_hex
from typing import Any

from cbatch import FinishReason, Request
from experiments.server.bodies import ApiError, Body, ChatBody
from experiments.server.words import Placeholder
from experiments.text import OutputText

_REASONS = {FinishReason.LENGTH: "length", FinishReason.STOP: "stop"}
Cancel = Callable[[int, FinishReason], object]
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Choice:
    """An output of an answer, computed as one request. reason: why it ended, as clients read it; None before."""

    __slots__ = ("id", "index", "num_tokens", "output", "reason", "text")

    def __init__(self, id_: int, index: int, output: OutputText | Placeholder) -> None:
        self.id, self.index, self.output, self.num_tokens = id_, index, output, 0
        self.text: list[str] = []  # of an answer that is not streamed
        self.reason: str | None = None


class Answer:
    """The choices of one request, in order.

    num_prompt_tokens: of all its prompts. cancel: ends a request of the engine.
    """

    def __init__(
        self, body: Body, model: str, choices: Sequence[Choice], num_prompt_tokens: int, cancel: Cancel
    ) -> None:
        self._choices, self._num_prompt_tokens, self._cancel = choices, num_prompt_tokens, cancel
        self._body, self._chat = body, isinstance(body, ChatBody)
        self._box: list[tuple[Choice, int | None, Request | None]] = []
        self._news = asyncio.Event()
        self._num_open = len(choices)
        self._problem: ApiError | None = None
        self._has_left = False
        kind = f"chat.completion{'.chunk' if body.stream else ''}" if self._chat else "text_completion"
        id_ = f"{'chatcmpl' if self._chat else 'cmpl'}-{token_hex(12)}"
        self._about = {"id": id_, "object": kind, "created": int(time.time()), "model": model}
        self._head = f"data: {json.dumps(self._about)[:-1]}, "
        self._field, self._close = ('"delta":{"content":', "}") if self._chat else ('"text":', "")

    def add(self, choice: Choice, token: int | None, end: Request | None) -> None:
        """Takes a choice's next token, or its end, or both. A token of -1 stands for any."""
        self._box.append((choice, token, end))
        self._news.set()

    def fail(self, problem: ApiError) -> None:
        """Ends the answer."""
        self._problem = problem
        self._news.set()

    async def send_to(self, receive: Any, send: Any) -> None:
        """Answers the client, unless it leaves. Raises ApiError before anything is sent."""
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            await (self._stream(send) if self._body.stream else self._send_whole(send))
        finally:
            watch.cancel()
            for choice in self._choices:
                self._cancel(choice.id, FinishReason.CANCELLED)

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._news.set()

    async def _stream(self, send: Any) -> None:
        """Streams chunks. After an error the connection is cut: clients take an answer that ends well for a success."""
        opening = '"delta":{"role":"assistant","content":""}'
        chunks = [self._chunk(choice, opening) for choice in self._choices] if self._chat else []
        begun = False
        while self._num_open and not (self._has_left or self._problem):
            await self._news.wait()
            chunks += [self._chunk(choice, f"{self._field}{quote(text)}{self._close}") for choice, text in self._take()]
            if not begun:
                if self._problem:
                    raise self._problem
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                begun = True
            if self._problem:
                chunks.append(f"data: {self._problem.body()}\n\n")
            elif not self._num_open:
                chunks += self._last_chunks()
            more = self._num_open > 0
            await send({"type": "http.response.body", "body": "".join(chunks).encode(), "more_body": more})
            chunks = []

    def _chunk(self, choice: Choice, content: str) -> str:
        reason = "null" if choice.reason is None else f'"{choice.reason}"'
        usage = f',"usage":{json.dumps(self._usage())}' if self._body.stream_options.continuous_usage_stats else ""
        fields = f'"index":{choice.index},{content},"logprobs":null,"finish_reason":{reason}'
        return f'{self._head}"choices":[{{{fields}}}]{usage}}}\n\n'

    def _last_chunks(self) -> list[str]:
        usage = f'{self._head}"choices":[],"usage":{json.dumps(self._usage())}}}\n\n'
        return [*([usage] if self._body.stream_options.include_usage else ()), "data: [DONE]\n\n"]

    async def _send_whole(self, send: Any) -> None:
        while self._num_open and not (self._has_left or self._problem):
            await self._news.wait()
            for choice, text in self._take():
                choice.text.append(text)
        if self._problem:
            raise self._problem
        content = {**self._about, "choices": [*map(self._whole, self._choices)], "usage": self._usage()}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {"index": choice.index, **content, "logprobs": None, "finish_reason": choice.reason}

    def _take(self) -> Iterator[tuple[Choice, str]]:
        """Yields the text of each token that has come."""
        self._news.clear()
        box, self._box = self._box, []
        for choice, token, end in box:
            if choice.reason is None:
                yield choice, self._text(choice, token, end)

    def _text(self, choice: Choice, token: int | None, end: Request | None) -> str:
        text, stopped = "", False
        if token is not None:
            choice.num_tokens += 1
            text, stopped = choice.output.push(token)
        if stopped:
            choice.reason = "stop"
            self._cancel(choice.id, FinishReason.STOP)
        elif end is not None and end.finish_reason in _REASONS:
            text += choice.output.finish()
            choice.reason = _REASONS[end.finish_reason]
        elif end is not None:
            self._problem = ApiError(503 if end.finish_reason else 400, end.reject_reason or "the request was given up")
        self._num_open -= choice.reason is not None
        return text

    def _usage(self) -> dict[str, int]:
        prompt, new = self._num_prompt_tokens, sum(choice.num_tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
