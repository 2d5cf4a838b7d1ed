"""The settings of the server: its API surface, its parsers and its observability."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict

from tokenspeed_core.config.limit_settings import LimitSettings
from tokenspeed_core.config.readers import split_names
from tokenspeed_core.config.sections import setting

# Settings that `LLM` uses although the server has them too, and one that only the server uses.
_SHARED = frozenset({"chat_template", "enable_custom_logit_processor", "log_level"})
_SERVER_ONLY = frozenset({"api_workers", "data_parallel_size"})

LogLevel = Literal["debug", "info", "warning", "error", "critical"]

MAX_SOCKET_PATH = 107  # characters; the kernel's limit


def _origin(value: str) -> str:
    """Check an origin as browsers send it. Raises ValueError."""
    if value == "*":
        return value
    parts = urlsplit(value)
    if not parts.scheme or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != value:
        raise ValueError(
            f"{value!r} is not an origin: write SCHEME://HOST[:PORT] without a path, or *"
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


class ServerSettings(LimitSettings):
    """The settings that only the server reads. `Config` inherits them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

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
        repr=False,
    )
    chat_template: str | None = setting(
        None, "api", "Jinja file that replaces the model's chat template.", min_length=1
    )
    stream_interval: int = setting(
        1, "api", "Number of tokens per streamed event.", unit="tokens", ge=1, le=4096
    )
    unknown_fields: Literal["warn", "error", "ignore"] = setting(
        "warn",
        "api",
        "Unknown request fields: warn names them in a response header, error refuses.",
    )

    reasoning_parser: str = setting(
        "auto",
        "parsers",
        "Parser of reasoning in chat replies: auto (by the model), none, or a name.",
        min_length=1,
        kind="reasoning_parsers",
    )
    tool_call_parser: str = setting(
        "auto",
        "parsers",
        "Parser of tool calls in chat replies: auto (by the model), none, or a name.",
        min_length=1,
        kind="tool_parsers",
    )

    enable_custom_logit_processor: bool = setting(
        False, "parsers", "Let requests name installed logits processors."
    )

    log_level: LogLevel = setting("info", "observability", "Minimum severity of log messages.")
    log_format: Literal["text", "json"] = setting(
        "text", "observability", "Log lines as text, or as JSON objects with named fields."
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
        "Detail of request lines: 1 adds parameters, 2 the start of texts, 3 all text.",
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


def is_server_only(name: str) -> bool:
    """Say whether a setting configures only the HTTP server, so that `LLM` refuses it."""
    return (name in ServerSettings.model_fields and name not in _SHARED) or name in _SERVER_ONLY
