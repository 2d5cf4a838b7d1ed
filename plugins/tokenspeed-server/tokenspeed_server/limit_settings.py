"""The settings that limit the resources of clients, and that control who may connect."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field

from tokenspeed_core.commands.settings import Settings, setting, split_names

Name = Annotated[str, Field(min_length=1, max_length=255)]


class LimitSettings(Settings):
    """Limits of the server, which hold for every request on every route."""

    allowed_hosts: Annotated[tuple[Name, ...], BeforeValidator(split_names)] = setting(
        (),
        "limits",
        "Accepted Host headers, or *; default: all; on loopback: names of this machine.",
        takes="NAME[,NAME...]",
    )
    max_connections: int = setting(
        4096,
        "limits",
        "Maximum number of open connections; a new one replaces an idle one.",
        unit="connections",
        ge=1,
    )
    max_header_bytes: int = setting(
        32768,
        "limits",
        "Maximum size of the request line and headers.",
        unit="bytes",
        ge=1024,
        le=2**20,
    )
    max_body_bytes: ByteSize | None = setting(
        None,
        "limits",
        "Maximum size of a body; default: 4MiB, or 32 bytes per token of context.",
        unit="bytes",
        takes="SIZE",
        ge=1024,
    )
    max_body_values: int | None = setting(
        None,
        "limits",
        "Maximum JSON values in a body; default: 500,000, or 2 per token of context.",
        unit="values",
        ge=1000,
    )
    request_receive_timeout: float = setting(
        60.0,
        "limits",
        "Maximum time to receive a request's headers, and then its body.",
        unit="seconds",
        gt=0,
        le=86400,
    )
    send_timeout: float = setting(
        60.0,
        "limits",
        "Maximum time that a client may stop reading its response.",
        unit="seconds",
        gt=0,
        le=86400,
    )
    max_unsent_bytes: ByteSize = setting(
        8 * 2**20,
        "limits",
        "Maximum size of the events buffered for a slow client.",
        unit="bytes",
        takes="SIZE",
        ge=4096,
    )
    request_timeout: float | None = setting(
        None,
        "limits",
        "Maximum time of a request, including the queue; default: none.",
        unit="seconds",
        gt=0,
        le=86400 * 7,
    )
    max_sequences_per_request: int = setting(
        1024,
        "limits",
        "Maximum number of sequences of a request: prompts times n.",
        unit="sequences",
        ge=1,
        le=65536,
    )
    restart_engine: bool = setting(
        False,
        "running",
        "Restart an engine that dies, or the whole server if it cannot continue.",
    )
    drain_timeout: float = setting(
        300.0,
        "limits",
        "Maximum time to finish running requests after SIGTERM.",
        unit="seconds",
        ge=0,
        le=86400,
    )
