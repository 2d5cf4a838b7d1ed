"""Publishes changes of the prefix cache over ZeroMQ, in the format of vLLM and SGLang."""

from __future__ import annotations

import time

import zmq
from msgspec.msgpack import Encoder

from tokenspeed_core.config.kv_events import KVEventsConfig
from tokenspeed_core.errors import CapacityError
from tokenspeed_core.kv_cache.events import KVEventLog

# Messages for a slow subscriber. Later ones are dropped, and leave a gap in the sequence numbers.
MAX_QUEUED = 100_000
LINGER_MS = 1000


class KVEventPublisher:
    """Sends batches of events. Each message has three frames: topic, sequence number and events.

    The sequence number is 8 bytes, big-endian, counted from 0. The events are a MessagePack array
    `[timestamp, events, rank]`; see `tokenspeed_core.kv_cache.events`.
    """

    def __init__(self, config: KVEventsConfig, log: KVEventLog, rank: int = 0) -> None:
        """Bind the endpoint of an attention data-parallel rank. Raises CapacityError."""
        self._log = log
        self._rank = rank
        self._topic = config.topic.encode()
        self._number = 0
        self._encode = Encoder().encode
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        endpoint = config.endpoint_of(rank)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise CapacityError(
                f"cannot publish KV events at {endpoint}: {error.strerror}. "
                "Choose another endpoint in --kv-events-config."
            ) from error

    def publish(self) -> None:
        """Send the events since the last call, if any. Never blocks."""
        events = self._log.take()
        if not events:
            return
        payload = self._encode([time.time(), events, self._rank])
        number = self._number.to_bytes(8, "big")
        self._socket.send_multipart((self._topic, number, payload), zmq.DONTWAIT)
        self._number += 1

    def close(self) -> None:
        """Close the socket, after a moment for messages on their way."""
        self._socket.close(linger=LINGER_MS)
