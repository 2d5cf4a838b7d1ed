"""The value of `--kv-events-config`: where changes of the prefix cache are published."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator


class KVEventsConfig(BaseModel):
    """Where changes of the prefix cache are published, such as for a router that looks for cached prefixes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    topic: str = ""

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        kind, _, address = self.endpoint.partition("://")
        if kind not in ("tcp", "ipc") or not address:
            raise ValueError(f"endpoint {self.endpoint!r} must be tcp://HOST:PORT or ipc://PATH")
        if self.endpoint.startswith("tcp://"):
            port = self.endpoint.rpartition(":")[2]
            if not port.isdecimal() or int(port) > 65535:
                raise ValueError(f"endpoint {self.endpoint!r} needs a port, such as tcp://*:5557")
        return self

    def endpoint_of(self, rank: int) -> str:
        """Return the endpoint of an attention data-parallel rank: its port is the configured one plus the rank."""
        if self.endpoint.startswith("ipc://"):
            return f"{self.endpoint}.{rank}" if rank else self.endpoint
        host, _, port = self.endpoint.rpartition(":")
        return f"{host}:{int(port) + rank}"
