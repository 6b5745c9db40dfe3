"""The user's own prompts, from a JSONL file: text or token ids, one request per line.

In closed loop, a turn's prompt is the whole conversation so far, with the model's own answers:

    line 1   user: u1                                   answer a1, as text
    line 2         pause -> user: u1, assistant: a1, user: u2        through the chat template      answer a2
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import Field

from cbatch import SLO, ConfigError, Request, RequestSpec, Sampling, WorkloadError
from cbatch.arrivals import Arrivals, Listed
from cbatch.errors import CbatchError
from cbatch.facts import facts_of
from cbatch.request import SERVED, spec_of
from cbatch.request_spec import LATEST_ARRIVAL
from cbatch.validation import Give, not_negative, read, whole
from experiments.text import Messages, up_to_stop
from experiments.workloads.base import SamplingKeys, Timeout, Vocabulary, Workload
from experiments.workloads.readers.table import at_line, json_objects, read_text
from experiments.workloads.seeds import Purpose, request_seeds
from experiments.workloads.trace import MOST_TOKENS, Column, Fit, Ints, Trace

ChatMessage = Mapping[str, str]  # a message: role and content


class Line(NamedTuple):
    """A turn. spec: its request without a prompt. says: its messages; if empty, `prompt` is the only turn's prompt. pause: seconds."""

    spec: RequestSpec
    says: Sequence[ChatMessage]
    prompt: Sequence[int]
    pause: float


class Dialogues(Listed):
    """The arrivals of turns, each a pause after the previous answer. A session ends at a turn that is not served, or is too long."""

    follow_ends = True

    def __init__(
        self,
        sessions: Sequence[Sequence[Line]],
        encode: Callable[[int, Sequence[ChatMessage]], list[int]],
        decode: Callable[[Sequence[int]], str],
        most: float = inf,
    ) -> None:
        """
        encode: returns the tokens of a line's prompt, by its id and all messages.
        most: maximum tokens of a turn, answer included; a session ends before a longer turn.
        """
        super().__init__()
        self._encode, self._decode, self._most = encode, decode, most
        self._turns = {line.spec.id: (session, turn) for session in sessions for turn, line in enumerate(session)}
        self._said: dict[int, list[ChatMessage]] = {}  # messages of each turn's prompt, by its id
        firsts = [spec for session in sessions if (spec := self._spec(session, 0, [])) is not None]
        if not firsts:
            raise WorkloadError(f"workload: no prompt fits max_length={most:g}; raise it")
        self.facts = replace(facts_of(map(Request.from_spec, firsts)), number=None, is_open=True)
        self.facts.stated.update(("turns", "pauses"))
        self.add([Request.from_spec(spec) for spec in firsts])

    def ended(self, request: Request) -> None:
        super().ended(request)
        session, turn = self._turns[request.id]
        said = self._said.pop(request.id)
        if turn + 1 < len(session) and request.finish_reason in SERVED:
            answer, _ = up_to_stop(self._decode(request.output), request.stop_strings)
            spec = self._spec(session, turn + 1, [*said, {"role": "assistant", "content": answer}])
            if spec is not None:
                time = (request.finished_at or 0.0) + session[turn + 1].pause
                self.add([Request.from_spec(replace(spec, arrival_time=time))])

    def _spec(self, session: Sequence[Line], turn: int, before: Sequence[ChatMessage]) -> RequestSpec | None:
        """Returns the request of a turn after these messages; None if it is too long."""
        line = session[turn]
        said = self._said[line.spec.id] = [*before, *line.says]
        prompt = self._encode(line.spec.id, said) if line.says else line.prompt
        if len(prompt) + line.spec.max_new_tokens > self._most:
            return None
        spec = replace(line.spec, prompt=prompt, num_prompt_tokens=len(prompt))
        if spec.session is None:
            return spec
        follows = (session[turn - 1].spec.id,) if turn else ()
        return replace(spec, turn=turn, last=turn == len(session) - 1, follows=follows, pause=line.pause)


_TIME = f"seconds from the start of the run, at most {LATEST_ARRIVAL:g}"

TokenCount = Annotated[int, whole(1, MOST_TOKENS)]
_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1, strict=True)]


@dataclass(frozen=True, kw_only=True)
class PromptLine(SamplingKeys):
    """The keys of a line; one of `prompt`, `messages` and `token_ids` is mandatory. Others mean what they mean in `RequestSpec`.

    messages: a chat. stop: texts that end the output. pause: seconds from the previous answer, with `closed`.
    """

    prompt: str | None = None
    messages: Messages | None = None
    token_ids: Annotated[_TokenIds, Give("a list of token ids, at least one, none negative")] | None = None
    stop: _Text | list[_Text] | None = None
    max_new_tokens: TokenCount
    true_new_tokens: TokenCount | None = None
    arrival_time: Annotated[float, Field(ge=0, le=LATEST_ARRIVAL), Give(_TIME)] = 0.0
    pause: Annotated[float, not_negative("seconds after the previous answer")] | None = None
    client: str | None = None
    session: str | None = None
    tier: str | None = None
    priority: Annotated[int, Field(strict=True)] | None = None
    slo: SLO | None = None
    predicted_new_tokens: TokenCount | None = None
    timeout: Timeout | None = None


_FIELDS = {field.name for field in fields(PromptLine)} & {field.name for field in fields(RequestSpec)}
_FIELDS -= {"prompt", "max_new_tokens", "pause"}


@dataclass(frozen=True, kw_only=True, repr=False)
class PromptFile(Workload, Fit):
    """The requests of a JSONL file (plain or .gz), in its order; each line is an object with keys of `PromptLine`.

    `arrival_time` is in seconds from the start of the run and never decreases. Text needs a model with a tokenizer, messages one
    with a chat template; token ids also run in simulation, where only their number matters. Keys of a line override the workload's.

    closed: a line whose session has earlier lines is the next turn. It arrives `pause` seconds after the previous answer, and its
        messages follow the earlier messages and the model's answers. Only the first line of a session has an `arrival_time`.
    num_requests: the first N that fit; None takes all. max_new_tokens: the limit for lines without one.
    ignore_eos: by default requests end at the model's end-of-sequence token.
    prediction, pad_outputs: not available, as true output lengths are unknown.
    """

    path: str
    closed: bool = False
    max_new_tokens: TokenCount = 128
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("pad_outputs", "prediction"):
            if (value := getattr(self, key)) is not None:
                raise WorkloadError(f"workload.{key}={value}: the output lengths of prompts are unknown; leave it out")

    @property
    def unread(self) -> tuple[str, Collection[str]]:
        return "workload.closed=true with too_long=error", ["max_length"] * (self.closed and self.too_long == "error")

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        lines = self._lines()
        if self.too_long != "drop":
            del lines[self.num_requests or len(lines) :]
        prompts = [_prompt(self.path, number, line, vocabulary) for number, line in enumerate(lines, start=1)]
        trace = self._trace(lines, prompts, vocabulary)
        return self._build(self.fit(trace, self.num_requests), vocabulary)

    def source(self, vocabulary: Vocabulary | None) -> Arrivals:
        if not self.closed:
            return super().source(vocabulary)
        lines = self._lines()[: self.num_requests]
        specs = map(spec_of, self._build(self._trace(lines, [[0]] * len(lines), vocabulary), vocabulary).stream())
        sessions: dict[object, list[Line]] = {}
        for number, (line, spec) in enumerate(zip(lines, specs, strict=True), start=1):
            prompt = [] if line.messages else _prompt(self.path, number, line, vocabulary)
            says = [vars(message) for message in line.messages or ()]
            turns = sessions.setdefault(number if line.session is None else line.session, [])
            turns.append(Line(spec, says, prompt, (line.pause or 0.0) if turns else 0.0))

        def encode(id_: int, said: Sequence[ChatMessage]) -> list[int]:
            return _chat(self.path, id_ + 1, said, vocabulary)

        decode = vocabulary.decode if vocabulary is not None else str
        most = inf if self.max_length is None or self.too_long == "error" else self.max_length
        return Dialogues([*sessions.values()], encode, decode, most)

    def _trace(
        self, lines: Sequence[PromptLine], prompts: Sequence[Sequence[int]], vocabulary: Vocabulary | None
    ) -> Trace:
        seeds = request_seeds(self.seed, Purpose.SAMPLING, len(lines)).tolist()
        columns = {name: [getattr(line, name) for line in lines] for name in _FIELDS}
        sampled = zip(lines, seeds, strict=True)
        columns["sampling"] = [Sampling(line.temperature, line.top_k, line.top_p, seed) for line, seed in sampled]
        if vocabulary is not None:
            columns["prompt"] = list(prompts)
            stops = ([line.stop] if isinstance(line.stop, str) else line.stop or () for line in lines)
            columns["stop_strings"] = [*map(tuple, stops)]
        return Trace(
            source=self.path,
            prompt_tokens=np.array([len(prompt) for prompt in prompts]),
            output_tokens=np.array([line.max_new_tokens for line in lines]),
            line=np.arange(1, 1 + len(lines)),
            fields={name: np.fromiter(column, object, len(lines)) for name, column in columns.items()},
        )

    def within(self, positions: int) -> Self:
        return self.limit_to(positions)

    def _limited(self, output_tokens: Ints) -> dict[str, Column]:
        return {"max_new_tokens": output_tokens}  # of the line, not of the workload

    def _lines(self) -> list[PromptLine]:
        """Reads the lines of the file and checks every value."""
        defaults = vars(self.sampling) | {"max_new_tokens": self.max_new_tokens}
        lines, sessions, latest = list[PromptLine](), set[str | None](), 0.0
        for number, record in enumerate(json_objects(self.path, read_text(self.path)), start=1):
            try:
                line = read(PromptLine, defaults | record)
            except ConfigError as error:
                raise at_line(self.path, number, f"{error}; correct or remove the line") from None
            if [line.prompt, line.messages, line.token_ids].count(None) != 2:
                raise at_line(self.path, number, "give one of prompt, messages and token_ids")
            follows = self.closed and line.session is not None and line.session in sessions
            if follows and (line.messages is None or line.arrival_time):
                remedy = "give messages, and pause in place of arrival_time"
                raise at_line(self.path, number, f"is a later turn of session {line.session}; {remedy}")
            if line.pause is not None and not follows:
                raise at_line(self.path, number, "pause is of later turns, with workload.closed=true; leave it out")
            if line.arrival_time < latest and not follows:
                times = f"arrival_time {line.arrival_time:g} comes after {latest:g}"
                raise at_line(self.path, number, f"{times}; sort the lines by arrival_time")
            latest = max(latest, line.arrival_time)
            lines.append(line)
            sessions.add(line.session)
        return lines


def _prompt(path: str, number: int, line: PromptLine, vocabulary: Vocabulary | None) -> list[int]:
    if line.token_ids is not None:
        if vocabulary is not None and (largest := max(line.token_ids)) >= vocabulary.size:
            remedy = f"give ids from 0 to {vocabulary.size - 1}"
            raise at_line(path, number, f"token id {largest} is not in the model's vocabulary; {remedy}")
        return line.token_ids
    if line.messages is not None:
        return _chat(path, number, [vars(message) for message in line.messages], vocabulary)
    tokens = _tokenizer(path, number, vocabulary).encode(line.prompt or "")
    if not tokens:
        raise at_line(path, number, "the prompt has no tokens; give some text")
    return tokens


def _chat(path: str, number: int, said: Sequence[ChatMessage], vocabulary: Vocabulary | None) -> list[int]:
    """Returns the token ids of a chat, which ends with the messages of a line."""
    tokenizer = _tokenizer(path, number, vocabulary)
    try:
        return tokenizer.encode_chat(said)
    except CbatchError as error:
        raise at_line(path, number, str(error)) from error


def _tokenizer(path: str, number: int, vocabulary: Vocabulary | None) -> Vocabulary:
    if vocabulary is None:
        remedy = "give token_ids, or run with backend=cpu or backend=cuda"
        raise at_line(path, number, f"a simulation has no tokenizer for prompt text; {remedy}")
    return vocabulary
