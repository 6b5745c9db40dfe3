"""The body of a request to `/v1/completions` or `/v1/chat/completions`: its fields, checked.

A field that is not supported is an error that names it, unless its value is null or changes nothing.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Never, TypeVar

from pydantic import BeforeValidator, Field

from cbatch import SLO, CbatchError, ConfigError
from cbatch.validation import Give, read, shorten, whole
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
_Tokens = Annotated[int, whole(1, 2**31 - 1)]
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


class ApiError(Exception):
    """What a client is told in place of an answer. param: the field that is to blame."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def body(self) -> str:
        kinds = {401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}
        kind = kinds.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return json.dumps({"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}})


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    include_usage: _Bool = False
    continuous_usage_stats: _Bool = False


@dataclass(frozen=True, kw_only=True)
class Body(SamplingKeys):
    """The fields of both routes. Those of `RequestSpec` mean what they mean there: a higher `priority` is more urgent."""

    model: str | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
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
    predicted_new_tokens: _Tokens | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionBody(Body):
    prompt: Annotated[
        _Prompt | _Prompts,
        Field(union_mode="left_to_right"),
        Give("a text, a list of token ids, or a list of either, none empty"),
    ]

    @property
    def prompts(self) -> list[str | list[int]]:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]  # type: ignore[return-value,list-item]


@dataclass(frozen=True, kw_only=True)
class ChatBody(Body):
    messages: list[Any]  # for `read_messages`


@dataclass(frozen=True, kw_only=True)
class TextBody:
    """The body of a request to `/tokenize` or `/detokenize`."""

    prompt: str = ""
    tokens: list[_Id] = field(default_factory=list)


@contextmanager
def as_api_error() -> Iterator[None]:
    """Turns a user's error, which begins with the field, into an ApiError."""
    try:
        yield
    except CbatchError as error:
        name = re.match(r"\w+", str(error))
        raise ApiError(400, str(error), name and name[0]) from None


def read_json(content: bytes) -> dict[str, Any]:
    """Returns the object that a body holds, without nulls. Raises ApiError."""
    try:
        data = json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({shorten(error)})") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the body is a {type(data).__name__}, not an object")
    return _without_nulls(data)


def read_text(content: bytes) -> TextBody:
    """Returns a text or token ids. Raises ApiError."""
    data = read_json(content)
    with as_api_error():
        return read(TextBody, {name: data[name] for name in ("prompt", "tokens") if name in data})


def read_body(kind: type[B], content: bytes, defaults: SamplingKeys) -> B:
    """Returns the fields of a body. defaults: of the sampling. Raises ApiError, which names the field."""
    data, known = read_json(content), {known.name for known in fields(kind)}
    for name in data.keys() - known:
        if not any(_same(data[name], value) for value in _CHANGES_NOTHING.get(name, ())):
            raise ApiError(400, f"{shorten(name)}: is not supported here; leave it out", shorten(name))
    sampling = {key.name: getattr(defaults, key.name) for key in fields(SamplingKeys)}
    with as_api_error():
        body = read(kind, sampling | {name: value for name, value in data.items() if name in known})
        if "stream_options" in data and not body.stream:
            raise ConfigError("stream_options: has no effect without stream=true")
        return body


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is no number of JSON")
