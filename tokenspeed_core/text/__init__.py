"""Text and tokens: tokenizer, incremental decoding, stop strings, chat templates. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.text.assembler import Assembler, ReasoningText
from tokenspeed_core.text.conversation import Conversation, read_conversation, read_conversations
from tokenspeed_core.text.template import ChatTemplate, TemplateError
from tokenspeed_core.text.tokenizer import Tokenizer

__all__ = [
    "Assembler",
    "ChatTemplate",
    "Conversation",
    "ReasoningText",
    "TemplateError",
    "Tokenizer",
    "read_conversation",
    "read_conversations",
]
