"""What `tokenspeed plugins` refuses."""

from __future__ import annotations

from tokenspeed_core import TokenSpeedError


class ToolsError(TokenSpeedError):
    """A question about plugins that has no answer; the message says what to ask instead."""
