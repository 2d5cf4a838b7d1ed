"""Text and tokens: the tokenizer, incremental decoding, stop strings, chat templates; no tensor library."""

from __future__ import annotations

from tokenspeed_core.text.assembler import Assembler
from tokenspeed_core.text.folder import text_folder
from tokenspeed_core.text.template import ChatTemplate, TemplateError, load_chat_template
from tokenspeed_core.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Assembler", "ChatTemplate", "TemplateError", "Tokenizer", "load_chat_template", "load_tokenizer", "text_folder",
]
