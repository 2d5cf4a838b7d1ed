"""The chat template and its errors, for the subprocess that renders prompts. Importing it is cheap."""

from __future__ import annotations

from tokenspeed_core.errors import RequestFailedError, describe_error
from tokenspeed_core.text import ChatTemplate, TemplateError
from tokenspeed_core.text.template import MAX_RENDER_SECONDS

__all__ = [
    "MAX_RENDER_SECONDS",
    "ChatTemplate",
    "RequestFailedError",
    "TemplateError",
    "describe_error",
]
