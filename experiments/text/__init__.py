"""Text in and out of a model: messages of a chat, and the text of an output as its tokens come."""

from experiments.text.messages import Messages
from experiments.text.output import OutputText, ends_text, up_to_stop

__all__ = ["Messages", "OutputText", "ends_text", "up_to_stop"]
