"""Where requests of clients become requests of the engine, and its messages become answers."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from cbatch import CbatchError, ConfigError, FinishReason, RequestSpec, Sampling
from cbatch.model.checkpoint import Vocabulary
from cbatch.request_spec import NO_SLO
from cbatch.validation import shorten
from experiments.server.answers import Answer, Choice
from experiments.server.bodies import MOST_CHOICES, ApiError, Body, ChatBody, CompletionBody, as_api_error, read_body
from experiments.server.engine import Turn
from experiments.server.link import Put, start_engine
from experiments.server.meters import Meters
from experiments.server.settings import ServerSettings
from experiments.server.words import Placeholder, Words
from experiments.text import OutputText, read_messages

T = TypeVar("T")

_SLOW_BODY = 4096
"""Bytes from which on a body's text is tokenized beside the event loop."""


class Door:
    """Admits requests, and hands out what the engine reports of them.

    ready: tokens that the KV cache holds, once the engine serves. closed: the run's summary, or its error.
    put: takes messages for the engine, once it is started.
    """

    put: Put

    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.meters, spec = settings, Meters(), settings.model
        self.text: Words | Vocabulary = Words(spec.vocab_size)
        self._output: Callable[[Sequence[str]], OutputText | Placeholder] = Placeholder
        self._stop_tokens: tuple[int, ...] = ()
        if spec.path is not None:
            self.text = vocabulary = Vocabulary(spec)
            if not settings.backend.simulated:
                self._output, self._stop_tokens = partial(OutputText, vocabulary), vocabulary.stop_tokens
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[int] = loop.create_future()
        self.closed: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._ids = count()
        self._open: dict[int, tuple[Answer, Choice]] = {}
        self.text.encode("a")  # these take long the first time
        read_body(CompletionBody, b'{"prompt": "a"}', settings.workload)
        read_body(ChatBody, b'{"messages": [{}]}', settings.workload)

    def start(self, folder: Path, **options: Any) -> None:
        """Starts the engine."""
        self.put = start_engine(self.settings, folder, self._receive, **options)

    def cancel(self, id_: int, reason: FinishReason) -> None:
        """Ends a request early; does nothing for one that has ended."""
        if self._open.pop(id_, None) is not None:
            self.put((id_, reason))

    def _receive(self, message: Any) -> None:
        """Takes a message of the engine."""
        match message:
            case Turn():
                self._deliver(message)
            case int():
                self.ready.set_result(message)
            case dict():
                self.closed.set_result(message)
            case problem if not self.closed.done():
                self.closed.set_exception(CbatchError(problem))
                for answer, _ in self._open.values():
                    answer.fail(ApiError(500, "the engine has failed"))
                self._open.clear()

    def _deliver(self, turn: Turn) -> None:
        self.meters.count(turn)
        ends = {end.id: end for end in turn.ended}
        for id_, token in zip(turn.ids, turn.tokens, strict=True):
            end = ends.get(id_)
            if opened := self._open.get(id_) if end is None else self._open.pop(id_, None):
                answer, choice = opened
                answer.add(choice, token, end)

    async def open(self, kind: type[Body], content: bytes) -> Answer:
        """Submits what a body asks for. Raises ApiError."""
        arrival, settings = perf_counter(), self.settings
        body = read_body(kind, content, settings.workload)
        if body.model not in (None, settings.model.name):
            raise ApiError(404, f"model={shorten(body.model)}: is not served; give {settings.model.name}", "model")
        prompts = await self.beside(len(content), lambda: list(self._prompts(body)))
        if len(prompts) * body.n > MOST_CHOICES:
            raise ApiError(400, f"n={body.n}: asks for {len(prompts) * body.n} answers; {MOST_CHOICES} at most", "n")
        if len(self._open) + len(prompts) * body.n > settings.max_open:
            self.meters.refused.inc(len(prompts) * body.n)
            raise ApiError(settings.full_status, f"{len(self._open)} requests are open; try again later")
        if self.closed.done():
            raise ApiError(503, "the engine has ended")
        specs = [self._spec(body, prompt, arrival, place) for prompt in prompts for place in range(body.n)]
        choices = [Choice(spec.id, index, self._output(body.stop)) for index, spec in enumerate(specs)]
        num_prompt_tokens = sum(map(len, prompts))
        answer = Answer(body, settings.model.name, choices, num_prompt_tokens, self.cancel)
        for spec, choice in zip(specs, choices, strict=True):
            self._open[spec.id] = answer, choice
            self.put(spec)
        return answer

    async def beside(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Does work on a text, beside the event loop if that takes long."""
        return await asyncio.to_thread(work) if num_bytes > _SLOW_BODY else work()

    def _prompts(self, body: Body) -> Iterator[list[int]]:
        """Yields the token ids of each prompt. Raises ApiError."""
        with as_api_error():
            if isinstance(body, ChatBody):
                yield self.text.encode_chat(read_messages(body.messages))
            elif isinstance(body, CompletionBody):
                for prompt in body.prompts:
                    ids = self.text.encode(prompt) if isinstance(prompt, str) else prompt
                    if not ids or max(ids) >= self.settings.model.vocab_size:
                        raise ConfigError("prompt: has no tokens, or one that is not in the model's vocabulary")
                    yield ids

    def _spec(self, body: Body, prompt: list[int], arrival: float, place: int) -> RequestSpec:
        """Returns a request that the engine can serve. Raises ApiError. place: among the choices of one prompt."""
        settings, id_ = self.settings, next(self._ids)
        most = min(settings.longest, self.ready.result() + 1)
        limit = body.max_completion_tokens or body.max_tokens or min(settings.max_new_tokens, most - len(prompt))
        if len(prompt) + max(limit, 1) > most:
            lengths = f"{len(prompt)} tokens of prompt and {max(limit, 1)} new ones"
            raise ApiError(400, f"{lengths} exceed the {most} that a request may have", "max_tokens")
        seed = (settings.seed + id_ if body.seed is None else body.seed + place) % 2**64
        return RequestSpec(
            id_,
            len(prompt),
            limit,
            arrival_time=arrival,
            timeout=settings.workload.timeout,
            prompt=prompt,
            sampling=Sampling(body.temperature, max(body.top_k, 0), body.top_p, seed),
            stop_tokens=() if body.ignore_eos else self._stop_tokens,
            client=body.client or body.user,
            session=body.session,
            tier=body.tier,
            priority=body.priority,
            slo=body.slo or settings.workload.slo or NO_SLO,
            predicted_new_tokens=body.predicted_new_tokens,
        )
