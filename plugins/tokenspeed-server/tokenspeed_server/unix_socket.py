"""Listening on a Unix socket: left-over files are replaced, the socket of a running server is not."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tokenspeed_core.commands.serving import CapacityError, ConfigError

BACKLOG = 2048


@contextmanager
def listen_unix(path: str, count: int = 1) -> Iterator[list[socket.socket]]:
    """Yield `count` sockets that accept the connections to one path; delete the file at the end.

    Only this user may connect, unless the umask allows more. Raises CapacityError if a server uses the
    path, ConfigError if the path is another kind of file.
    """
    _remove_stale(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise CapacityError(
            f"--uds {path}: cannot listen there: {os.strerror(error.errno or 0)}"
        ) from error
    made = os.lstat(path)
    try:
        # Processes that share a socket take turns to accept.
        yield [bound, *(bound.dup() for _ in range(count - 1))]
    finally:
        with suppress(OSError):
            if os.path.samestat(os.lstat(path), made):
                os.unlink(path)


def _remove_stale(path: str) -> None:
    """Delete the socket of a server that no longer runs."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # `bind` reports the error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path}: exists and is not a socket. Choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise CapacityError(
                f"--uds {path}: the existing socket cannot be checked: {reason}. Choose another path."
            ) from error
    raise CapacityError(f"--uds {path}: another server listens there. Choose another path.")
