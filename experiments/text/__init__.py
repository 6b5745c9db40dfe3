"""Text in and out of a model: messages of a chat, and the text of an output as its tokens come."""

from experiments.text.messages import read_messages
from experiments.text.output import OutputText, text_before

__all__ = ["OutputText", "read_messages", "text_before"]
