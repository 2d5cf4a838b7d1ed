"""The listening sockets, opened before anything slow starts."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from typing import Any

import psutil

from tokenspeed_core.commands.serving import CapacityError, ConfigError
from tokenspeed_server.settings import ServerConfig
from tokenspeed_server.tls import check_certificate


def check_address(config: ServerConfig) -> None:
    """Check the settings of the address and of HTTPS. Raises ConfigError."""
    if config.ssl_certfile is not None:
        check_certificate(config.ssl_certfile, config.ssl_keyfile)
    for name in ("host", "port"):
        if config.uds is not None and config.origin(name) != "default":
            raise ConfigError(f"--uds and --{name} both set the address; use one")


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Return `count` sockets that share one address; port 0 takes a free port.

    Raises CapacityError if the port is in use or not allowed, ConfigError for an unknown host.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    except ValueError as error:  # of the encoding of names, or for a null character
        raise ConfigError(f"--host {host[:80]!r} is not a host name or address: {error}") from error
    bound: list[socket.socket] = []
    try:
        bound.append(_open(family, address))
        if count > 1:
            # Sockets with SO_REUSEPORT would also share the port with another server of this
            # user. The first socket, without it, has shown that there is none.
            with bound.pop() as exclusive:
                address = exclusive.getsockname()
            bound += [_open(family, address, shares=True) for _ in range(count)]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CapacityError(
                f"port {port} on {host} is in use{_owner(port)}. "
                "Choose another with --port; 0 selects a free port."
            ) from error
        reason = os.strerror(error.errno or 0)
        raise CapacityError(
            f"cannot listen on {host}:{port}: {reason}. See --host and --port."
        ) from error
    return bound


def _open(family: int, address: Any, *, shares: bool = False) -> socket.socket:
    bound = socket.create_server(
        address,
        family=family,
        backlog=2048,
        reuse_port=shares,
        dualstack_ipv6=family == socket.AF_INET6,
    )
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return bound


def _owner(port: int) -> str:
    """Return " by PROGRAM (pid N)" for the listener on a port, or "" if this user may not know."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr.port == port
                and connection.pid
            ):
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def url(bound: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a socket."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
