"""The error of the plugin tools."""

from __future__ import annotations

from typing import Any

from tokenspeed_core import TokenSpeedError


class ToolsError(TokenSpeedError):
    """A command that cannot be answered. With --json, `facts` are printed with the message."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts
