"""The messages of a chat, as the API of OpenAI has them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from cbatch.validation import Give


class _Part(BaseModel, extra="forbid"):
    type: Literal["text"]
    text: str


def _join(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class _Message(BaseModel, extra="forbid"):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str | list[_Part], AfterValidator(_join), Give("a text, or parts of type text")]

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, keys: Any) -> Any:
        return {key: value for key, value in keys.items() if value is not None} if isinstance(keys, dict) else keys


Messages = Annotated[list[_Message], Field(min_length=1)]
"""A list of {role, content}, once it is checked: the content is a text. It may be a list of {type: text, text: ...}, which are joined."""
