"""The parts of the core that a server uses: the engine's client and messages, text, parsers, hooks, processes."""

from __future__ import annotations

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint, resolve_checkpoint
from tokenspeed_core.engine.async_engine import AsyncEngine
from tokenspeed_core.engine.client import Delivery, EngineClient, Sink, State
from tokenspeed_core.engine.engine_process import EngineProcess, engine_programs
from tokenspeed_core.engine.factory import discover, discover_in_subprocess, resolve
from tokenspeed_core.engine.inputs import InputProcessor, ModelText
from tokenspeed_core.engine.logits_processors import LogitsProcessorTable
from tokenspeed_core.engine.messages import (
    Grammar,
    Heartbeat,
    Outputs,
    PromptLogprobs,
    Ready,
    Reasoning,
    Submit,
    TokenLogprobs,
    WorkerReady,
    to_api,
)
from tokenspeed_core.engine.outputs import make_assembler
from tokenspeed_core.engine.parent_death import attach_to_parent
from tokenspeed_core.engine.requests import (
    Defaults,
    RequestOptions,
    check_ids,
    read_ids,
)
from tokenspeed_core.engine.stats import (
    HOST_BOUNDS,
    REQUEST_BOUNDS,
    STEP_BOUNDS,
    EngineStats,
    Histogram,
    HistogramCounts,
)
from tokenspeed_core.engine.subprocesses import Program, Subprocess
from tokenspeed_core.engine.subprocesses import start as start_subprocess
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.errors import (
    BadRequestError,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    PluginError,
    RequestFailedError,
    TokenSpeedError,
    describe_error,
)
from tokenspeed_core.executor.nodes import run_node
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.logs import current_request_id, log_fields
from tokenspeed_core.plugins.catalog import make
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.text import ChatTemplate, TemplateError
from tokenspeed_core.text.assembler import Assembler
from tokenspeed_core.text.load import load_text, tokenizer_folder
from tokenspeed_core.text.template import read_chat_templates
from tokenspeed_core.text.tokenizer import Tokenizer

__all__ = [
    "Assembler",
    "AsyncEngine",
    "BadRequestError",
    "CapacityError",
    "ChatTemplate",
    "CheckpointError",
    "ConfigError",
    "Defaults",
    "Delivery",
    "EngineClient",
    "EngineDeadError",
    "EngineProcess",
    "FinishReason",
    "Grammar",
    "HashChain",
    "Hooks",
    "InputProcessor",
    "LogitsProcessorTable",
    "ModelText",
    "Outputs",
    "PluginError",
    "Program",
    "PromptLogprobs",
    "Ready",
    "Reasoning",
    "RequestFailedError",
    "RequestOptions",
    "ResolvedCheckpoint",
    "Sink",
    "State",
    "Submit",
    "Subprocess",
    "TemplateError",
    "TokenLogprobs",
    "TokenSpeedError",
    "Tokenizer",
    "WorkerReady",
    "attach_to_parent",
    "check_ids",
    "current_request_id",
    "describe_error",
    "discover",
    "discover_in_subprocess",
    "engine_programs",
    "load_text",
    "log_fields",
    "make",
    "make_assembler",
    "pack",
    "read_chat_templates",
    "read_ids",
    "resolve",
    "resolve_checkpoint",
    "run_node",
    "start_subprocess",
    "to_api",
    "tokenizer_folder",
    "Heartbeat",
    "HOST_BOUNDS",
    "REQUEST_BOUNDS",
    "STEP_BOUNDS",
    "EngineStats",
    "Histogram",
    "HistogramCounts",
]
