"""The messages of a chat, as the API of OpenAI has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from cbatch import ConfigError
from cbatch.validation import Give, read, shorten


@dataclass(frozen=True, kw_only=True)
class _Part:
    type: Literal["text"]
    text: str


@dataclass(frozen=True, kw_only=True)
class _Message:
    role: Literal["system", "user", "assistant"]
    content: Annotated[str | list[_Part], Give("a text, or parts of type text")]


def read_messages(messages: object) -> list[dict[str, str]]:
    """Returns messages with their text parts joined, for `Vocabulary.encode_chat`.

    messages: a list of {role, content}; the content is a text, or a list of {type: text, text: ...}. Keys whose value is null
        are left out.

    Raises:
        ConfigError: anything else; the message names the place.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(f"messages={shorten(messages)}: give a list of messages, at least one")
    return [_read(message, f"messages[{place}].") for place, message in enumerate(messages)]


def _read(message: object, prefix: str) -> dict[str, str]:
    if isinstance(message, Mapping):
        message = {key: value for key, value in message.items() if value is not None}
    checked = read(_Message, message, prefix)
    content = checked.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": checked.role, "content": text}
