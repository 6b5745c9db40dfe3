"""The user's own prompts, from a JSONL file: text or token ids, one request per line."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Self

import numpy as np
from pydantic import Field

from cbatch import SLO, ConfigError, Request, RequestSpec, Sampling, WorkloadError
from cbatch.errors import CbatchError
from cbatch.request_spec import LATEST_ARRIVAL
from cbatch.validation import Give, read, whole
from experiments.text import Messages
from experiments.workloads.base import SamplingKeys, Timeout, Vocabulary, Workload
from experiments.workloads.readers.table import at_line, json_objects, read_text
from experiments.workloads.seeds import Purpose, request_seeds
from experiments.workloads.trace import MOST_TOKENS, Column, Fit, Ints, Trace

_TIME = f"seconds from the start of the run, at most {LATEST_ARRIVAL:g}"

TokenCount = Annotated[int, whole(1, MOST_TOKENS)]
_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1, strict=True)]


@dataclass(frozen=True, kw_only=True)
class PromptLine(SamplingKeys):
    """The keys of a line; one of `prompt`, `messages` and `token_ids` is mandatory. Others mean what they mean in `RequestSpec`.

    messages: a chat. stop: texts that end the output.
    """

    prompt: str | None = None
    messages: Messages | None = None
    token_ids: Annotated[_TokenIds, Give("a list of token ids, at least one, none negative")] | None = None
    stop: _Text | list[_Text] | None = None
    max_new_tokens: TokenCount
    true_new_tokens: TokenCount | None = None
    arrival_time: Annotated[float, Field(ge=0, le=LATEST_ARRIVAL), Give(_TIME)] = 0.0
    client: str | None = None
    session: str | None = None
    tier: str | None = None
    priority: Annotated[int, Field(strict=True)] | None = None
    slo: SLO | None = None
    predicted_new_tokens: TokenCount | None = None
    timeout: Timeout | None = None


_FIELDS = {field.name for field in fields(PromptLine)} & {field.name for field in fields(RequestSpec)}
_FIELDS -= {"prompt", "max_new_tokens"}


@dataclass(frozen=True, kw_only=True, repr=False)
class PromptFile(Workload, Fit):
    """The requests of a JSONL file (plain or .gz), in its order; each line is an object with keys of `PromptLine`.

    `arrival_time` is in seconds from the start of the run and never decreases. Text needs a model with a tokenizer, messages one
    with a chat template; token ids also run in simulation, where only their number matters. Keys of a line override those of the workload.

    num_requests: the first N that fit; None takes all. max_new_tokens: the limit for lines without one.
    ignore_eos: by default requests end at the model's end-of-sequence token.
    prediction, pad_outputs: not available, as true output lengths are unknown.
    """

    path: str
    max_new_tokens: TokenCount = 128
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("pad_outputs", "prediction"):
            if (value := getattr(self, key)) is not None:
                raise WorkloadError(f"workload.{key}={value}: the output lengths of prompts are unknown; leave it out")

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        lines = self._lines()
        if self.too_long != "drop":
            del lines[self.num_requests or len(lines) :]
        prompts = [_prompt(self.path, number, line, vocabulary) for number, line in enumerate(lines, start=1)]
        seeds = request_seeds(self.seed, Purpose.SAMPLING, len(lines)).tolist()
        columns = {name: [getattr(line, name) for line in lines] for name in _FIELDS}
        columns["sampling"] = [
            Sampling(line.temperature, line.top_k, line.top_p, seed) for seed, line in zip(seeds, lines, strict=True)
        ]
        if vocabulary is not None:
            columns["prompt"] = prompts
            columns["stop_strings"] = [
                (line.stop,) if isinstance(line.stop, str) else tuple(line.stop or ()) for line in lines
            ]
        trace = Trace(
            source=self.path,
            prompt_tokens=np.array([len(prompt) for prompt in prompts]),
            output_tokens=np.array([line.max_new_tokens for line in lines]),
            line=np.arange(1, 1 + len(lines)),
            fields={name: np.fromiter(column, object, len(lines)) for name, column in columns.items()},
        )
        return self._build(self.fit(trace, self.num_requests), vocabulary)

    def within(self, positions: int) -> Self:
        return self.limit_to(positions)

    def _limited(self, output_tokens: Ints) -> dict[str, Column]:
        return {"max_new_tokens": output_tokens}  # of the line, not of the workload

    def _lines(self) -> list[PromptLine]:
        """Reads the lines of the file and checks every value."""
        defaults = vars(self.sampling) | {"max_new_tokens": self.max_new_tokens}
        lines: list[PromptLine] = []
        for number, record in enumerate(json_objects(self.path, read_text(self.path)), start=1):
            try:
                line = read(PromptLine, defaults | record)
            except ConfigError as error:
                raise at_line(self.path, number, f"{error}; correct or remove the line") from None
            if [line.prompt, line.messages, line.token_ids].count(None) != 2:
                raise at_line(self.path, number, "give one of prompt, messages and token_ids")
            if lines and line.arrival_time < lines[-1].arrival_time:
                times = f"arrival_time {line.arrival_time:g} comes after {lines[-1].arrival_time:g}"
                raise at_line(self.path, number, f"{times}; sort the lines by arrival_time")
            lines.append(line)
        return lines


def _prompt(path: str, number: int, line: PromptLine, vocabulary: Vocabulary | None) -> list[int]:
    """Returns the token ids of a line."""
    if line.token_ids is not None:
        if vocabulary is not None and (largest := max(line.token_ids)) >= vocabulary.size:
            remedy = f"give ids from 0 to {vocabulary.size - 1}"
            raise at_line(path, number, f"token id {largest} is not in the model's vocabulary; {remedy}")
        return line.token_ids
    if vocabulary is None:
        remedy = "give token_ids, or run with backend=cpu or backend=cuda"
        raise at_line(path, number, f"a simulation has no tokenizer for prompt text; {remedy}")
    if line.messages is not None:
        try:
            return vocabulary.encode_chat([vars(message) for message in line.messages])
        except CbatchError as error:
            raise at_line(path, number, str(error)) from error
    tokens = vocabulary.encode(line.prompt or "")
    if not tokens:
        raise at_line(path, number, "the prompt has no tokens; give some text")
    return tokens
