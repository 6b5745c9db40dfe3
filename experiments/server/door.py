"""Converts clients' requests to engine requests, and the engine's messages to answers."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from cbatch import CbatchError, ConfigError, FinishReason, RequestSpec, Sampling
from cbatch.model.checkpoint import Vocabulary
from cbatch.validation import refusal_line, shorten
from experiments.server.answers import Answer, Choice
from experiments.server.bodies import AnyBody, ChatBody
from experiments.server.clients import Message, Refused, Turn
from experiments.server.meters import Meters
from experiments.server.settings import ServerSettings
from experiments.server.words import SimulatedVocabulary, Words
from experiments.text import OutputText

_FAILED = "the engine has failed"
_SAME = ("session", "last", "tier", "priority", "slo", "predicted_new_tokens")  # fields of a body and of `RequestSpec`


class Door:
    """Admits requests, and forwards the engine's reports to the answers. is_closed: whether the engine has ended."""

    def __init__(self, settings: ServerSettings, engine: Connection) -> None:
        """Waits until the engine serves. Raises CbatchError if the engine fails or the model's tokenizer cannot be loaded."""
        self.settings, self.meters, self._engine = settings, Meters(settings.backend.replicas), engine
        spec = settings.model
        self._words = Words(spec.vocab_size)
        kind = SimulatedVocabulary if settings.backend.simulated else Vocabulary
        self._vocabulary = kind(spec) if spec.path else self._words
        self._text = Vocabulary(spec) if spec.path and not settings.backend.simulated else None
        self._vocabulary.encode("a")  # slow the first time
        self._ids, self._open, self.is_closed = count(), dict[int, Choice](), False
        self.longest: int = self._receive()  # tokens of a request

    def put(self, message: Message) -> None:
        """Sends a message to the engine, unless the engine has ended."""
        with suppress(OSError):
            self._engine.send(message)

    def _receive(self) -> Any:
        """Returns the engine's next message. Raises CbatchError if the engine has failed."""
        try:
            message = self._engine.recv()
        except (EOFError, OSError):
            message = "the engine's process has ended"
        if isinstance(message, str):
            raise CbatchError(message)
        return message

    async def listen(self) -> dict[str, Any]:
        """Forwards the engine's reports until the engine ends; returns the run's summary. Raises CbatchError if the engine fails."""
        loop = asyncio.get_running_loop()

        def read() -> dict[str, Any]:
            while isinstance(message := self._receive(), Turn):
                loop.call_soon_threadsafe(self.deliver, message)
            return dict(message)

        try:
            return await asyncio.to_thread(read)  # one thread for all turns: a thread per turn is slower
        finally:
            self.is_closed = True
            for choice in self._open.values():
                choice.answer.fail(HTTPException(500, _FAILED))

    def deliver(self, turn: Turn) -> None:
        """Forwards tokens and ends of requests to their answers."""
        self.meters.count(turn)
        ends = {end.id: end for end in turn.ended}
        tokens: dict[int, list[int]] = {id_: [] for id_ in (*ends, *turn.ids)}
        for id_, token in zip(turn.ids, turn.tokens, strict=True):
            tokens[id_].append(token)
        for id_, received in tokens.items():
            if choice := self._open.get(id_):
                for token in received[:-1]:  # accepted drafts
                    choice.answer.take(choice, token, None)
                end = ends.get(id_)
                if turn.failed and end and end.finish_reason is FinishReason.CANCELLED:
                    choice.answer.fail(HTTPException(500, _FAILED))
                else:
                    choice.answer.take(choice, received[-1] if received else None, end)
        for id_ in ends:
            self._open.pop(id_, None)

    async def open(self, kind: type[AnyBody], content: bytes) -> Answer:
        """Submits the requests of a body. Raises HTTPException, or CbatchError for a client's mistake."""
        arrival, keys, spec = perf_counter(), self.settings.server, self.settings.model
        try:
            body = kind.model_validate_json(content, context=vars(self.settings.workload))
        except ValidationError as refusal:
            raise ConfigError(refusal_line(refusal, "", kind)) from None
        if body.model not in (None, spec.name):
            raise HTTPException(404, f"model={shorten(body.model)}: is not served; give {spec.name}")
        is_slow = len(content) > 4096  # bytes; slow texts are tokenized outside the event loop
        prompts = await asyncio.to_thread(body.encode, self._vocabulary) if is_slow else body.encode(self._vocabulary)
        if not all(prompts):
            raise ConfigError("prompt: is empty; give a text or token ids")
        for token in (end for ids in prompts for end in (min(ids), max(ids))):
            if not 0 <= token < spec.vocab_size:
                raise ConfigError(f"prompt: no token {shorten(token)}; give ids from 0 to {spec.vocab_size - 1}")
        if (number := len(prompts) * body.n) > keys.max_open:
            problem = f"{number} answers at once exceed the server's max_open={keys.max_open}"
            named, lower = (f"n={body.n}", "lower n, or ") if body.n > 1 else ("prompt", "")
            raise ConfigError(f"{named}: {problem}; {lower}send fewer prompts")
        if len(self._open) + number > keys.max_open:
            self.meters.rejections.inc(number)
            self.put(Refused(number))
            raise HTTPException(keys.full_status, f"{len(self._open)} requests are open; try again later")
        if self.is_closed:
            raise HTTPException(503, "the engine has ended")
        limits = [self._limit(body, prompt) for prompt in prompts]  # before any request gets its id
        asked = [(*each, place) for each in zip(prompts, limits, strict=True) for place in range(body.n)]
        specs = [self._spec(body, prompt, limit, arrival, place) for prompt, limit, place in asked]
        answer = Answer(body, spec.name, sum(map(len, prompts)), partial(self._leave, specs))
        for request in specs:
            text = OutputText(self._text, body.stop, request.stop_tokens) if self._text else self._words
            self._open[request.id] = answer.add(text)
            self.put(request)
        return answer

    def _leave(self, specs: Sequence[RequestSpec]) -> None:
        """Cancels a client's unfinished requests."""
        for spec in specs:
            if self._open.pop(spec.id, None):
                self.put(spec.id)

    def _too_long(self, body: AnyBody, num_prompt_tokens: int, limit: int) -> str:
        larger = ", or start the server with a larger max_request_tokens="
        larger *= self.longest == self.settings.longest < self.settings.model.max_positions
        key, most = "messages" if isinstance(body, ChatBody) else "prompt", f"the {self.longest} tokens of a request"
        if num_prompt_tokens >= self.longest:
            return f"{key}: {num_prompt_tokens} prompt tokens leave no room for output in {most}; shorten it{larger}"
        total = f"{limit} + {num_prompt_tokens} prompt tokens exceed {most}"
        return f"max_tokens={limit}: {total}; lower max_tokens, shorten the prompt{larger}"

    def _limit(self, body: AnyBody, prompt: Sequence[int]) -> int:
        """Returns the limit of new tokens. Raises ConfigError for a request that does not fit."""
        fits = max(1, min(self.settings.server.max_new_tokens, self.longest - len(prompt)))
        limit = body.max_completion_tokens or body.max_tokens or fits
        if len(prompt) + limit > self.longest:
            raise ConfigError(self._too_long(body, len(prompt), limit))
        return limit

    def _spec(self, body: AnyBody, prompt: Sequence[int], limit: int, arrival: float, place: int) -> RequestSpec:
        """Returns a request. place: index among the choices of one prompt."""
        id_, text = next(self._ids), self._text
        seed = (self.settings.seed + id_ if body.seed is None else body.seed + place) % 2**64
        return RequestSpec(
            id_,
            len(prompt),
            limit,
            arrival_time=arrival,
            prompt=prompt,
            sampling=Sampling(body.temperature, max(body.top_k, 0), body.top_p, seed),
            stop_tokens=text.stop_tokens if text and not body.ignore_eos else (),
            stop_strings=tuple(body.stop) if text else (),
            client=body.client or body.user,
            **{name: getattr(body, name) for name in _SAME},
        )
