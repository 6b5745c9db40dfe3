"""Validates the body of a request to `/v1/completions` or `/v1/chat/completions`.

An unsupported field is an error that names the field, unless the field's value is null or has no effect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from cbatch import SLO
from cbatch.model.checkpoint import Vocabulary
from cbatch.request_spec import NO_SLO
from cbatch.validation import Give
from experiments.server.words import Words
from experiments.text import Messages

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens", "add_generation_prompt", "detokenize"), (True,)),
    "parallel_tool_calls": (True, False),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "tool_choice": ("none", "auto"),
}
"""Values without effect, by unsupported field. In other fields null, false, 0 and empty values have no effect."""

MOST_CHOICES = 128


def _listed(value: Any) -> Any:
    """Wraps a single text, or a single list of token ids, in a list."""
    is_single = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    return [value] if is_single else value


_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[int], Field(min_length=1)]
_Label = Annotated[str, Field(max_length=512, pattern=r"^[^\p{C}]*$"), Give("at most 512 printable characters")]


def _whole(value: Any) -> Any:
    """Returns a number without a fraction, such as 2.0, as a whole one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Int = Annotated[int, BeforeValidator(_whole)]
_Number = Annotated[_Int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class Body(BaseModel):
    """The fields of both routes. Fields of `RequestSpec` mean the same as there: a higher `priority` is more urgent.

    The validation context holds the defaults of the sampling.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: _Number | None = None
    max_completion_tokens: _Number | None = None
    temperature: float = Field(ge=0)
    top_k: _Int = Field(ge=-1, lt=2**31)
    top_p: float = Field(gt=0, le=1)
    seed: _Int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[Annotated[_Text, Field(max_length=256)]],
        Field(max_length=16),
        Give("a text or a list of texts, none empty"),
        BeforeValidator(_listed),
    ] = []
    n: _Int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    user: _Label | None = None
    client: _Label | None = None
    session: _Label | None = None
    last: bool | None = None
    tier: _Label | None = None
    priority: _Int = Field(0, ge=-(2**31), lt=2**31)
    slo: SLO = NO_SLO
    predicted_new_tokens: _Number | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {key: value for key, value in data.items() if key in cls.model_fields or not _is_neutral(key, value)}
        return {**(info.context or {}), **{key: value for key, value in kept.items() if value is not None}}


class CompletionBody(Body):
    prompt: Annotated[
        list[_Text | _Ids],
        Field(min_length=1, max_length=MOST_CHOICES),
        Give("a text, a list of token ids, or a list of either, none empty"),
        BeforeValidator(_listed),
    ]

    def encode(self, vocabulary: Vocabulary | Words) -> list[list[int]]:
        return [vocabulary.encode(part) if isinstance(part, str) else part for part in self.prompt]


class ChatBody(Body):
    messages: Messages

    def encode(self, vocabulary: Vocabulary | Words) -> list[list[int]]:
        return [vocabulary.encode_chat([vars(message) for message in self.messages])]


AnyBody = CompletionBody | ChatBody


def _is_neutral(name: str, value: Any) -> bool:
    others = _NEUTRAL.get(name, (False, 0, "", [], {}))
    return value is None or any(value == other and type(value) in (type(other), float) for other in others)
