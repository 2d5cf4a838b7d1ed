"""Stored responses: bounded, in memory, and shared by the API workers.

One worker keeps them in a database in its memory. Several workers share a database file in a
private folder, which the first worker removes when all have opened it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from tokenspeed_core.commands.serving import BadRequestError

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20  # of all stored responses, inputs included
BUSY_SECONDS = 1.0  # that a worker waits for another's write

log = logging.getLogger("tokenspeed.responses")

_SCHEMA = """
create table if not exists responses (
    id text primary key,
    owner text not null,
    previous text,
    input blob not null,
    response blob not null,
    num_bytes integer not null,
    used integer not null
) without rowid;
create index if not exists by_use on responses (owner, used);
create table if not exists owners (
    owner text primary key,
    num_responses integer not null,
    num_bytes integer not null
) without rowid;
create trigger if not exists added after insert on responses begin
    insert into owners values (new.owner, 1, new.num_bytes) on conflict do update
    set num_responses = num_responses + 1, num_bytes = num_bytes + new.num_bytes;
end;
create trigger if not exists deleted after delete on responses begin
    update owners set num_responses = num_responses - 1, num_bytes = num_bytes - old.num_bytes
    where owner = old.owner;
end;
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response: its own input items, and itself, as JSON."""

    previous: str | None
    input: bytes
    response: bytes


@contextmanager
def shared_file() -> Iterator[Path]:
    """Make the path of a store for several workers. Only this user can read it.

    It is in memory where the system has a file system for that. `forget_path` removes it once all
    workers have opened it, so that a server that is killed leaves nothing.
    """
    memory = "/dev/shm"
    folder = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix="tokenspeed-", dir=folder, ignore_cleanup_errors=True
    ) as made:
        yield Path(made) / "responses"


def forget_path(path: Path) -> None:
    """Remove the file of a store and its folder. Open stores keep the data."""
    shutil.rmtree(path.parent, ignore_errors=True)


class ResponseStore:
    """Responses by id and owner. Beyond the bounds, the largest owner loses its least recently used.

    An owner is an API key; no owner sees responses of another. Thread-safe.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Open the store in the file `path`, or in memory."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._database = sqlite3.connect(
            ":memory:" if path is None else path,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        # The data does not outlive the server, so nothing needs to reach the disk.
        self._database.execute("pragma synchronous = off")
        self._database.execute("pragma journal_mode = memory")
        self._database.executescript(f"begin immediate; {_SCHEMA} commit;")

    def encode(self, items: Any) -> bytes:
        """Return input items as they are stored.

        Raises BadRequestError for an input that would displace a large part of the store.
        """
        data = json.dumps(items).encode()
        if len(data) > self._max_bytes // 4:
            raise BadRequestError(
                f"the input has {len(data)} bytes, more than the {self._max_bytes // 4} that this "
                "server stores for one response: send store=false",
                "store",
            )
        return data

    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response. If that fails, as on a full disk, log it: the answer is already made."""
        num_bytes = len(stored.input) + len(stored.response)
        row = (response_id, owner, stored.previous, stored.input, stored.response, num_bytes)
        try:
            with self._lock, self._database:
                self._database.execute("begin immediate")
                self._database.execute(
                    "insert into responses values (?, ?, ?, ?, ?, ?, ?)", (*row, _now())
                )
                self._evict()
        except sqlite3.Error as error:
            log.error("a response is not stored: %s", error)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response of this owner, and count it as used."""
        with self._lock, self._database:
            self._database.execute("begin immediate")
            found = self._database.execute(
                "update responses set used = ? where id = ? and owner = ? "
                "returning previous, input, response",
                (_now(), response_id, owner),
            ).fetchone()
        return None if found is None else StoredResponse(*found)

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response; return whether this owner had it."""
        with self._lock, self._database:
            deleted = self._database.execute(
                "delete from responses where id = ? and owner = ?", (response_id, owner)
            )
            return deleted.rowcount > 0

    def close(self) -> None:
        """Close the database. Safe to call twice."""
        with self._lock:
            self._database.close()

    def _evict(self) -> None:
        """Delete responses until the rest is within the bounds."""
        while True:
            sizes = self._database.execute(
                "select owner, num_responses, num_bytes from owners"
            ).fetchall()
            is_full = sum(row[1] for row in sizes) > self._max_responses
            if not is_full and sum(row[2] for row in sizes) <= self._max_bytes:
                return
            owner = max(sizes, key=lambda row: row[1 if is_full else 2])[0]
            self._database.execute(
                "delete from responses where id = "
                "(select id from responses where owner = ? order by used limit 1)",
                (owner,),
            )


def _now() -> int:
    """Return a time that only grows, in all workers."""
    return time.monotonic_ns()
