"""Text and tokens: tokenizer, incremental decoding, stop strings, chat templates. Imports no tensor library.

The package imports templates only, since the subprocess that renders them needs neither a tokenizer nor NumPy.
"""

from __future__ import annotations

from tokenspeed_core.text.conversation import Conversation, read_conversation, read_conversations
from tokenspeed_core.text.template import ChatTemplate, TemplateError

__all__ = [
    "ChatTemplate",
    "Conversation",
    "TemplateError",
    "read_conversation",
    "read_conversations",
]
