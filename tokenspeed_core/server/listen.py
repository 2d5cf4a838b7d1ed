"""The listening socket: bound before anything slow starts, with an error that says who has the port."""

from __future__ import annotations

import errno
import socket

import psutil

from tokenspeed_core.errors import CapacityError, ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, not yet listening; port 0 takes a free one.

    Raises CapacityError when the port is taken or not allowed, ConfigError for an unknown host.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    bound = socket.socket(family, kind, proto)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise CapacityError(
                f"port {port} on {host} is in use{_owner(port)}: stop that, or choose another with --port "
                "(0 takes a free one)"
            ) from error
        raise CapacityError(f"cannot listen on {host}:{port}: {error.strerror}; see --host and --port") from error
    return bound


def _owner(port: int) -> str:
    """Return who listens on a port, as part of a sentence; empty where this user may not know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


def url(bound: socket.socket) -> str:
    """Return the URL under which a socket is reached."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
