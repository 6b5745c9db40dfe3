"""The messages of a chat, as the API of OpenAI has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cbatch import ConfigError
from cbatch.validation import read, shorten


@dataclass(frozen=True, kw_only=True)
class _Message:
    role: Literal["system", "user", "assistant"]
    content: Any


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
    parts = checked.content if isinstance(checked.content, list) else [{"type": "text", "text": checked.content}]
    for part in parts:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ConfigError(f"{prefix}content={shorten(checked.content)}: give a text, or parts of type text")
    return {"role": checked.role, "content": "".join(part["text"] for part in parts)}
