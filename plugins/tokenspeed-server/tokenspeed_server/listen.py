"""The listening socket: bound before anything slow starts, with an error that says who has the port."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from typing import Any

import psutil

from tokenspeed_core.commands.serving import CapacityError, ConfigError


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Return sockets that listen at one address; port 0 takes a free one. The system spreads connections over them.

    Raises CapacityError when the port is taken or not allowed, ConfigError for an unknown host.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    bound: list[socket.socket] = []
    try:
        bound.append(_open(family, address))
        if count > 1:
            # Sockets that share a port would share it with another server of this user's, too: the first one, which
            # does not, has found that there is none.
            with bound.pop() as alone:
                address = alone.getsockname()
            bound += [_open(family, address, shares=True) for _ in range(count)]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CapacityError(
                f"port {port} on {host} is in use{_owner(port)}: stop that, or choose another with --port "
                "(0 takes a free one)"
            ) from error
        what = os.strerror(error.errno or 0)
        raise CapacityError(
            f"cannot listen on {host}:{port}: {what}; see --host and --port"
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
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # which all that it accepts inherit
    return bound


def _owner(port: int) -> str:
    """Return who listens on a port, as part of a sentence; empty where this user may not know."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr.port == port
                and connection.pid
            ):
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def url(bound: socket.socket) -> str:
    """Return the URL under which a socket is reached."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
