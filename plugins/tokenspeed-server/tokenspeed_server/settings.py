"""The settings of the server: its API surface, its parsers and its observability."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, model_validator

from tokenspeed_core.commands.settings import Config, LogLevel, setting, split_names
from tokenspeed_server.limit_settings import LimitSettings

# With this many CPUs the default is two API workers: events queue in one, which doubles the 99th
# percentile of the time between tokens.
MIN_CPUS_FOR_TWO_WORKERS = 16
MAX_SOCKET_PATH = 107  # characters; the kernel's limit


def _origin(value: str) -> str:
    """Check an origin as browsers send it. Raises ValueError."""
    if value == "*":
        return value
    parts = urlsplit(value)
    if not parts.scheme or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != value:
        raise ValueError(
            f"{value!r} is not an origin: use SCHEME://HOST[:PORT] without a path, or *"
        )
    return value.lower()


def _keys(value: str | None) -> str | None:
    """Refuse text without a key: the server would then need none."""
    if value is not None and not "".join(value.split(",")).strip():
        raise ValueError("must not be empty")
    return value


def _root_path(value: str) -> str:
    path = value.rstrip("/")
    if not path.startswith("/") or set(path) & set("?# "):
        raise ValueError("must be a path that starts with /, such as /llm")
    return path


class ServerConfig(Config, LimitSettings):
    """The settings of the engine and of the server."""

    sections: ClassVar[Mapping[str, str]] = {
        "api": "API surface",
        **Config.sections,
        "parsers": "Reasoning and tools",
    }

    host: str = setting("127.0.0.1", "api", "Address to listen on.", min_length=1)
    port: int = setting(8000, "api", "Port to listen on; 0 selects a free port.", ge=0, le=65535)
    uds: str | None = setting(
        None,
        "api",
        "Path of a Unix socket to listen on, instead of --host and --port.",
        min_length=1,
        max_length=MAX_SOCKET_PATH,
    )
    ssl_certfile: str | None = setting(
        None, "api", "Certificate chain in PEM format; the server then uses HTTPS.", min_length=1
    )
    ssl_keyfile: str | None = setting(
        None, "api", "Private key of --ssl-certfile; default: in the same file.", min_length=1
    )
    root_path: Annotated[str, AfterValidator(_root_path)] | None = setting(
        None, "api", "Path under which a proxy serves this server, such as /llm; default: none."
    )
    allowed_origins: Annotated[
        tuple[Annotated[str, AfterValidator(_origin)], ...], BeforeValidator(split_names)
    ] = setting(
        (),
        "api",
        "Origins of web pages that may read responses (CORS); * allows all.",
        takes="ORIGIN[,ORIGIN...]",
    )
    served_model_name: str | None = setting(
        None, "api", "Model name in the API; default: derived from --model.", min_length=1
    )
    api_key: Annotated[str | None, AfterValidator(_keys)] = setting(
        None,
        "api",
        "API keys, separated by commas; clients must send one of them.",
        is_secret=True,
    )
    stream_interval: int = setting(
        1, "api", "Number of tokens per streamed event.", unit="tokens", ge=1, le=4096
    )
    unknown_fields: Literal["warn", "error", "ignore"] = setting(
        "warn",
        "api",
        "Unknown request fields: list them in a response header, reject, or ignore them.",
    )

    reasoning_parser: str = setting(
        "auto",
        "parsers",
        "Reasoning parser of chat replies: auto (chosen by model), none, or a name.",
        min_length=1,
        kind="reasoning_parsers",
    )
    tool_call_parser: str = setting(
        "auto",
        "parsers",
        "Tool-call parser of chat replies: auto (chosen by model), none, or a name.",
        min_length=1,
        kind="tool_parsers",
    )

    log_level_http: LogLevel | None = setting(
        None,
        "observability",
        "Minimum severity of the HTTP server's messages; default: --log-level.",
    )
    enable_log_requests: bool = setting(False, "observability", "Log each finished request.")
    log_requests_level: int = setting(
        0,
        "observability",
        "Detail of the request log: 1 adds parameters, 2 truncated text, 3 full text.",
        ge=0,
        le=3,
    )
    decode_log_interval: float = setting(
        10.0,
        "observability",
        "Time between statistics lines while requests run; 0 disables them.",
        unit="seconds",
        ge=0,
        le=86400,
    )
    enable_metrics: bool = setting(True, "observability", "Count requests, tokens and times.")
    metrics_reporters: Annotated[
        tuple[Literal["prometheus"], ...], BeforeValidator(split_names)
    ] = setting(
        ("prometheus",),
        "observability",
        "Reporters of metrics: prometheus serves /metrics; [] disables it.",
        takes="NAME[,NAME...]",
    )
    enable_cache_report: bool = setting(True, "observability", "Report cached tokens in usage.")

    api_workers: int | None = setting(
        None,
        "running",
        "Number of HTTP processes; default: 2 with 16 or more CPUs, else 1.",
        unit="processes",
        ge=1,
        le=64,
    )

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        parsers = {self.reasoning_parser, self.tool_call_parser}
        if self.skip_tokenizer_init and not parsers <= {"auto", "none"}:
            raise ValueError(
                "--reasoning-parser and --tool-call-parser need a tokenizer; remove --skip-tokenizer-init"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile requires --ssl-certfile")
        return self

    def num_workers(self) -> int:
        """Return the number of processes that serve HTTP."""
        if self.api_workers:
            return self.api_workers
        return 2 if len(os.sched_getaffinity(0)) >= MIN_CPUS_FOR_TWO_WORKERS else 1
