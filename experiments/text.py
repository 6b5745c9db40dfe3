"""Converts text to and from a model's tokens: the messages of a chat, and the text of an output, token by token.

The text of a token may depend on the tokens before and after it.

tokens     | Hel | lo | \\xf0\\x9f | \\x8e\\x89 | ST   | OP
text       | Hel | lo |          | 🎉       |      | (the stop string has ended it)
"""

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from cbatch import Request
from cbatch.model.checkpoint import Vocabulary
from cbatch.validation import Give

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # tokenizers decode the bytes of an incomplete character to this character
_MOST_HELD = 8  # most tokens held back. A token has at least one byte; a character has at most 4 bytes.


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
        """Leaves out what asks for nothing, such as `tool_calls: []` of an answer that is sent back."""
        if not isinstance(keys, dict):
            return keys
        return {key: value for key, value in keys.items() if value is not None and (key == "content" or value != [])}


Messages = Annotated[list[_Message], Field(min_length=1)]
"""A list of {role, content}. A content that is a list of {type: text, text: ...} is joined to one text."""


def up_to_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Returns the text before the stop string that ends first (on a tie, the first listed), and whether one occurs."""
    ends = [(text.find(stop) + len(stop), order) for order, stop in enumerate(stops) if stop in text]
    if not ends:
        return text, False
    end, order = min(ends)
    return text[: end - len(stops[order])], True


def ends_text(vocabulary: Vocabulary) -> Callable[[Request, int], bool]:
    """Returns a new `State.ends_text` for the engines of a run, which may hand requests over to each other after any token."""
    outputs = dict[Request, OutputText]()  # ended ones leave when the next request begins; engines may be threads

    def ends(request: Request, token: int) -> bool:
        if (output := outputs.get(request)) is None:
            for ended in [each for each in [*outputs] if each.finished_at is not None]:
                outputs.pop(ended, None)
            output = outputs[request] = OutputText(vocabulary, request.stop_strings)
        output.push(token)
        return output.is_stopped

    return ends


class OutputText:
    """Converts the tokens of one output to text at a constant cost per token; control tokens are omitted.

    The returned texts, joined, equal `Vocabulary.decode` of all tokens, up to a stop string. Exception: with byte fallback a byte may
    make bytes invalid that were already sent; the sent text remains.

    `tokenizers.decoders.DecodeStream` raises an error in this case, and never returns the text that it holds back at the end.

    is_stopped: whether a stop string has ended the output.
    """

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = (), ends: Collection[int] = ()) -> None:
        """stops: nonempty texts that end the output; the text of a control token stands for this token. ends: tokens without text."""
        self._decode, self._token_text = vocabulary.decode, vocabulary.token_text
        self._control, self._ends, self._stops = vocabulary.control_tokens, ends, tuple(stops)
        self.is_stopped = False
        self._beginnings = tuple(stop[:size] for stop in self._stops for size in range(1, len(stop)))
        self._context: list[int] = []  # the latest tokens whose text is out
        self._shown = ""  # text of the context alone, without a partial character at its end
        self._held: list[int] = []  # tokens after the context
        self._kept = ""  # text that may begin a stop string

    def push(self, token: int) -> str:
        """Returns the text that the token adds; none after a stop string."""
        if self.is_stopped:
            return ""
        if (name := self._control.get(token)) is not None:
            text = self.finish() if name in self._stops else ""
            self.is_stopped |= name in self._stops
            return text
        if token in self._ends:
            return ""
        self._held.append(token)
        text = self._decode([*self._context, *self._held])
        is_partial = text.endswith(_INCOMPLETE)
        if len(self._held) < _MOST_HELD and (is_partial or len(text) <= len(self._shown)):
            return ""
        new = self._new(text[:-1] if is_partial else text)
        self._context, self._held = self._held, []
        self._shown = self._decode(self._context) if len(self._context) > 1 else self._token_text(token)
        if is_partial:
            self._shown = self._shown.removesuffix(_INCOMPLETE)
        return self._up_to_stop(new)

    def finish(self) -> str:
        """Returns the text that was held back. Call after the last token."""
        if self.is_stopped:
            return ""
        text = self._up_to_stop(self._new(self._decode([*self._context, *self._held])))
        return text if self.is_stopped else text + self._kept

    def _new(self, text: str) -> str:
        """Returns the text of the held tokens. text: text of context and held tokens."""
        return text[len(self._shown) :] if text.startswith(self._shown) else self._decode(self._held)

    def _up_to_stop(self, new: str) -> str:
        if not self._stops:
            return new
        text, self.is_stopped = up_to_stop(self._kept + new, self._stops)
        length = len(text)
        if not self.is_stopped and text.endswith(self._beginnings):
            length -= max(len(beginning) for beginning in self._beginnings if text.endswith(beginning))
        self._kept = text[length:]
        return text[:length]
