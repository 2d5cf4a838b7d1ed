"""What a server needs of the core: the engine's client and messages, text, parsers, hooks, processes."""

from __future__ import annotations

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint, resolve_checkpoint
from tokenspeed_core.engine.client import EchoClient, EngineClient, State
from tokenspeed_core.engine.factory import discover, discover_in_subprocess, load_text, num_workers
from tokenspeed_core.engine.messages import Drain, Ready, Submit, TokenLogprobs, WorkerReady
from tokenspeed_core.engine.parent_death import attach_to_parent
from tokenspeed_core.engine.reply_parsers import NamedParser, Parsers, find_parsers
from tokenspeed_core.engine.requests import BadRequestError, Defaults, build_submit, read_ids
from tokenspeed_core.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    PluginError,
    RequestFailedError,
    TokenSpeedError,
    suggest,
)
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.text import Assembler, ChatTemplate, TemplateError, Tokenizer
from tokenspeed_core.text.detokenizer import ByteDetokenizer, Detokenizer

ENGINE_MODULE = "tokenspeed_core.engine.process"  # run as `python -m`, this is an engine process

__all__ = [
    "Assembler",
    "BadRequestError",
    "ByteDetokenizer",
    "CapacityError",
    "ChatTemplate",
    "ConfigError",
    "Defaults",
    "Detokenizer",
    "Drain",
    "ENGINE_MODULE",
    "EchoClient",
    "EngineClient",
    "EngineDeadError",
    "FinishReason",
    "Hooks",
    "NamedParser",
    "Parsers",
    "PluginError",
    "Ready",
    "RequestFailedError",
    "ResolvedCheckpoint",
    "State",
    "Submit",
    "TemplateError",
    "TokenLogprobs",
    "TokenSpeedError",
    "Tokenizer",
    "WorkerReady",
    "attach_to_parent",
    "build_submit",
    "discover",
    "discover_in_subprocess",
    "find_parsers",
    "load_text",
    "num_workers",
    "read_ids",
    "resolve_checkpoint",
    "suggest",
]
