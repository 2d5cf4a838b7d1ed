"""What `tokenspeed plugins` refuses."""

from __future__ import annotations

from typing import Any

from tokenspeed_core import TokenSpeedError


class ToolsError(TokenSpeedError):
    """A question about plugins that has no answer; the message says what to ask instead.

    `facts` are what machines read beside it under --json.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        """Take both."""
        super().__init__(message)
        self.facts = facts
