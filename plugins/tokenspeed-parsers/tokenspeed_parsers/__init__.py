"""Descriptors of the reply parsers for `--tool-call-parser` and `--reasoning-parser`."""

from __future__ import annotations

from tokenspeed_core.api import ParserSpec

__all__ = ["BASE", "DEEPSEEK_R1", "JSON", "PASSTHROUGH", "QWEN3", "TAGGED"]

TAGGED = ParserSpec(
    "tokenspeed_parsers.tagged:TaggedCalls",
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
)
JSON = ParserSpec(
    "tokenspeed_parsers.bare_json:BareJson",
    '{"name": "get_weather", "parameters": {"city": "Paris"}}',
)
PASSTHROUGH = ParserSpec("tokenspeed_parsers.passthrough:Passthrough")
_THOUGHT = "<think>\nIt rains.\n</think>\n\nTake a coat."
BASE = ParserSpec("tokenspeed_parsers.thinking:base", _THOUGHT)
QWEN3 = ParserSpec("tokenspeed_parsers.thinking:qwen3", _THOUGHT)
DEEPSEEK_R1 = ParserSpec(
    "tokenspeed_parsers.thinking:deepseek_r1", "It rains.\n</think>\n\nTake a coat."
)
