"""From the prompts and conversations of Python programs to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed_core.api.step import I32
from tokenspeed_core.engine.messages import Ready
from tokenspeed_core.engine.requests import check_text_fits, read_ids
from tokenspeed_core.errors import BadRequestError
from tokenspeed_core.text import (
    ChatTemplate,
    Conversation,
    Tokenizer,
    read_conversation,
    read_conversations,
)
from tokenspeed_core.text.user_text import cut_at_breaks

Prompt = str | Mapping[str, Any]
"""A text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """A prompt's token ids, int32 [T], and its text if it was given as text."""

    text: str | None
    token_ids: I32


class PromptEncoder:
    """Encodes prompts and conversations. Thread-safe; either part may be missing."""

    def __init__(
        self, tokenizer: Tokenizer | None, template: ChatTemplate | None, limits: Ready
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Return a prompt as token ids. Raises BadRequestError."""
        text: Any = prompt
        if isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "prompt_token_ids"}:
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is not None:
                return EncodedPrompt(text, read_ids(ids, "prompt_token_ids"))
        if not isinstance(text, str):
            raise BadRequestError(
                "a prompt must be a string, {'prompt': text} or {'prompt_token_ids': [...]}",
                "prompt",
            )
        if self._tokenizer is None:
            raise BadRequestError(
                "a text prompt needs a tokenizer, but none is loaded; pass prompt_token_ids",
                "prompt",
            )
        check_text_fits(self._tokenizer, text, self._limits)
        return EncodedPrompt(text, self._tokenizer.encode(text, add_special_tokens=True))

    def encode_chat(
        self,
        conversation: Conversation,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> EncodedPrompt:
        """Render and encode one conversation. Raises BadRequestError, TemplateError."""
        return self._render(read_conversation(conversation, self._needed()), tools, options)

    def encode_chats(
        self,
        conversations: Conversation | Sequence[Conversation],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[EncodedPrompt]:
        """Render and encode one conversation or several. Raises BadRequestError, TemplateError."""
        return [
            self._render(messages, tools, options)
            for messages in read_conversations(conversations, self._needed())
        ]

    def _needed(self) -> ChatTemplate:
        if self._template is None or self._tokenizer is None:
            raise BadRequestError(
                "this model has no chat template; set chat_template, or use generate"
            )
        return self._template

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> EncodedPrompt:
        assert self._template is not None and self._tokenizer is not None
        # Control tokens in the texts of users are text, as in the server.
        protect = self._template.guard(self._tokenizer).protect
        text = self._template.render(protect(messages), protect(tools), protect(options))
        shown = "".join(cut_at_breaks(text))
        check_text_fits(self._tokenizer, shown, self._limits, "messages")
        return EncodedPrompt(shown, self._tokenizer.encode_rendered(text))
