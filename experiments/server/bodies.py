"""The body of a request to `/v1/completions` or `/v1/chat/completions`: its fields, checked.

A field that is not supported is an error that names it, unless its value is null or changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from cbatch import SLO, ConfigError
from cbatch.model.checkpoint import Vocabulary
from cbatch.validation import Give, read, shorten, whole
from experiments.server.words import Words
from experiments.text import read_messages
from experiments.workloads.base import SamplingKeys

_CHANGES_NOTHING: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens", "min_p", "top_logprobs"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("echo", "logprobs", "store", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("logit_bias", "metadata"), ({},)),
    **dict.fromkeys(("tools", "stop_token_ids", "bad_words"), ([],)),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "suffix": ("",),
}
"""Fields that are not supported, with the values that ask for nothing."""

MOST_CHOICES = 128

_Label = Annotated[str, Field(max_length=64, pattern=r"^[^\p{C}]*$"), Give("at most 64 printable characters")]
_Number = Annotated[int, whole(1, 2**31 - 1)]
_Bool = Annotated[bool, Field(strict=True), Give("true or false")]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Stops = Annotated[
    list[_Stop],
    Field(max_length=16),
    Give("a text or a list of texts, none empty"),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
_Id = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
_Prompt = Annotated[str, Field(min_length=1)] | Annotated[list[_Id], Field(min_length=1)]
_Prompts = Annotated[
    list[Annotated[_Prompt, Field(union_mode="left_to_right")]], Field(min_length=1, max_length=MOST_CHOICES)
]

B = TypeVar("B", bound="Body")


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    include_usage: _Bool = False
    continuous_usage_stats: _Bool = False


@dataclass(frozen=True, kw_only=True)
class Body(SamplingKeys, ABC):
    """The fields of both routes. Those of `RequestSpec` mean what they mean there: a higher `priority` is more urgent."""

    model: str | None = None
    max_tokens: _Number | None = None
    max_completion_tokens: _Number | None = None
    top_k: Annotated[int, whole(-1, 2**31 - 1)] = 0
    seed: Annotated[int, whole(-(2**63), 2**63 - 1)] | None = None
    stop: _Stops = field(default_factory=list)
    n: Annotated[int, whole(1, MOST_CHOICES)] = 1
    stream: _Bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: _Bool = False
    user: _Label | None = None
    client: _Label | None = None
    session: _Label | None = None
    tier: _Label | None = None
    priority: Annotated[int, whole(-(2**31), 2**31 - 1)] = 0
    slo: SLO | None = None
    predicted_new_tokens: _Number | None = None

    def __post_init__(self) -> None:
        if self.stream_options != StreamOptions() and not self.stream:
            raise ConfigError("stream_options: has no effect without stream=true")

    @abstractmethod
    def encode(self, vocabulary: Vocabulary | Words) -> list[list[int]]:
        """Returns the token ids of each prompt. Raises CbatchError."""


@dataclass(frozen=True, kw_only=True)
class CompletionBody(Body):
    prompt: Annotated[
        _Prompt | _Prompts,
        Field(union_mode="left_to_right"),
        Give("a text, a list of token ids, or a list of either, none empty"),
    ]

    def encode(self, vocabulary: Vocabulary | Words) -> list[list[int]]:
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if is_single else [*self.prompt]
        return [vocabulary.encode(text) if isinstance(text, str) else text for text in prompts]


@dataclass(frozen=True, kw_only=True)
class ChatBody(Body):
    messages: list[Any]  # for `read_messages`

    def encode(self, vocabulary: Vocabulary | Words) -> list[list[int]]:
        return [vocabulary.encode_chat(read_messages(self.messages))]


def read_body(kind: type[B], content: bytes, defaults: SamplingKeys) -> B:
    """Returns the fields of a body. defaults: of the sampling. Raises ConfigError, which begins with the field."""
    try:
        data = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise ConfigError(f"the body is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"the body is a {type(data).__name__}, not an object")
    asked = {name: value for name, value in data.items() if not _changes_nothing(name, value)}
    for name in asked.keys() - {known.name for known in fields(kind)}:
        raise ConfigError(f"{shorten(name)}: is not supported here; leave it out")
    return read(kind, {key.name: getattr(defaults, key.name) for key in fields(SamplingKeys)} | asked)


def _changes_nothing(name: str, value: Any) -> bool:
    same = (value == other and type(value) in (type(other), float) for other in _CHANGES_NOTHING.get(name, ()))
    return value is None or any(same)
