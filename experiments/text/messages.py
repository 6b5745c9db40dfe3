"""The messages of a chat, as the API of OpenAI has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, with_config

from cbatch.validation import Give


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class _Part:
    type: Literal["text"]
    text: str


def _join(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _leave_out_nulls(message: Any) -> Any:
    return (
        {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else message
    )


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class _Message:
    role: Literal["system", "user", "assistant"]
    content: Annotated[str | list[_Part], AfterValidator(_join), Give("a text, or parts of type text")]


Messages = Annotated[list[Annotated[_Message, BeforeValidator(_leave_out_nulls)]], Field(min_length=1)]
"""A list of {role, content}, once it is checked: the content is a text. It may be a list of {type: text, text: ...}, which are joined."""
