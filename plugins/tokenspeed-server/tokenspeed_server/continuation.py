"""Prompts that end inside the last message, so that the answer continues it.

The method is that of transformers' `apply_chat_template`: a mark after the message's text shows where to cut
the rendered prompt.
"""

from __future__ import annotations

from typing import Any

from tokenspeed_core.commands.serving import BadRequestError

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def mark_end(messages: list[dict[str, Any]]) -> None:
    """Add the mark to the text of the last message. Raises BadRequestError if it has no text."""
    text = messages[-1]["content"]
    if not text:
        raise BadRequestError(
            "continue_final_message needs a last message with text", "continue_final_message"
        )
    messages[-1]["content"] = text + _MARK


def cut_at_mark(prompt: str) -> str:
    """Return the prompt up to the mark. Raises BadRequestError if the template dropped the text."""
    at = prompt.rfind(_MARK.strip())
    if at < 0:
        raise BadRequestError(
            "continue_final_message: this model's chat template does not keep the end of the last message",
            "continue_final_message",
        )
    # A template that trims messages would also have trimmed the text before the mark.
    is_trimmed = not prompt.startswith(_MARK, at)
    return prompt[:at].rstrip() if is_trimmed else prompt[:at]
