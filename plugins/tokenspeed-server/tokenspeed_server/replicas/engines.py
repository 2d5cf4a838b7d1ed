"""An API worker's view of all replicas: it sends each request to one of them, and answers while any is alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tokenspeed_core.commands.serving import (
    Delivery,
    EngineClient,
    Heartbeat,
    PromptLogprobs,
    Ready,
    RequestFailedError,
    Sink,
    State,
    Submit,
    TokenLogprobs,
    WorkerReady,
)
from tokenspeed_server.replicas.memory import ReplicaMemory, prefix_digests
from tokenspeed_server.replicas.router import ReplicaLoad, choose


class EngineReplicas:
    """The clients of all replicas. With one replica, requests go to it without a look at their prefixes.

    `ready` is done when all replicas are; `dead` when none is left, or when one could not start. A replica that died may
    be replaced: it gets requests again when its engine is ready.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        worker: int = 0,
        memory: ReplicaMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to the addresses of the replicas' sockets. Needs a running event loop."""
        self.delivery = Delivery()
        self._clock = clock
        self._worker = worker
        self.clients = [self._connect(each) for each in addresses]
        self._ids = self.clients[0]  # allocates sequence ids, even if it was replaced
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_heartbeat: Callable[[int, Heartbeat], None] = lambda replica, heartbeat: None
        self.on_death: Callable[[int], None] = lambda replica: None
        self._memory = memory or ReplicaMemory(1, len(addresses))
        self._prefills: dict[int, tuple[int, int]] = {}  # sequence: replica, tokens to compute
        self._num_prefill = [0] * len(addresses)
        self._num_computed = [0] * len(addresses)
        for replica in range(len(addresses)):
            self._watch(replica)

    @property
    def state(self) -> State:
        """The state of the replicas together."""
        if self.dead.done():
            return State.DEAD
        return State.READY if self.ready.done() else State.STARTING

    @property
    def num_live(self) -> int:
        """Number of sequences that the replicas still work on."""
        return sum(client.num_live for client in self.clients)

    @property
    def has_work(self) -> bool:
        """Whether a replica had work, for any worker, at its last heartbeat."""
        return any(client.has_work for client in self.clients)

    def name_of(self, replica: int) -> str:
        """Return the name of a replica in messages."""
        num = len(self.clients)
        return "the engine" if num == 1 else f"engine {replica} of {num}"

    def take_ids(self, count: int) -> int:
        """Allocate `count` consecutive sequence ids, unique among replicas, and return the first."""
        return self._ids.take_ids(count)

    def submit(self, request: Submit, sinks: Sequence[Sink]) -> None:
        """Send a request to a replica; `sinks[i]` gets the tokens of sequence i. Raises RequestFailedError."""
        if len(self.clients) == 1:
            self.clients[0].submit(request, sinks)
            return
        digests = prefix_digests(request.prompt, request.tenant, request.cache_salt)
        num_cached = self._memory.find(digests)
        replica = choose(self._loads(), num_cached, len(request.prompt))
        if replica is None:
            replica = 0  # its client raises the error
        first = PrefillSink(self, replica, request.request_id, sinks[0])
        self.clients[replica].submit(request, [first, *sinks[1:]])
        num_left = len(request.prompt) - num_cached[replica]
        self._prefills[request.request_id] = (replica, num_left)
        self._num_prefill[replica] += num_left
        self._num_computed[replica] += num_left
        self._memory.add(replica, digests)
        self._publish(replica)

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Abort sequences. Ids of ended sequences are ignored."""
        ids = list(sequence_ids)
        for client in self.clients:
            client.abort(ids)
        if len(self.clients) > 1:
            for sequence_id in ids:
                self._end_prefill(sequence_id)
            for replica in range(len(self.clients)):
                self._publish(replica)

    def prefilled(self, replica: int, sequence_id: int, sink: Sink) -> None:
        """Record that a prompt was computed; `sink` receives the other tokens."""
        self.clients[replica].replace(sequence_id, sink)
        self._end_prefill(sequence_id)
        self._publish(replica)

    def send(self, message: Any) -> None:
        """Send a message to all replicas."""
        for client in self.clients:
            client.send(message)

    def replace(self, replica: int, address: str) -> EngineClient:
        """Connect to a new engine in place of a dead one, and return the client."""
        self.clients[replica].close()
        self.clients[replica] = client = self._connect(address)
        self._watch(replica)
        self._memory.forget(replica)  # the cache of the new engine is empty
        client.send(WorkerReady())
        return client

    def fail_all(self, error: RequestFailedError) -> None:
        """Abort all sequences; their sinks get the error."""
        for client in self.clients:
            client.fail_all(error)

    def die(self, reason: str, error: RequestFailedError | None = None) -> None:
        """Mark all replicas as dead and fail all sequences."""
        for client in self.clients:
            client.die(reason, error)

    def close(self) -> None:
        """Close the sockets. Safe to call twice."""
        for client in self.clients:
            client.close()

    def why_unhealthy(self) -> str | None:
        """Return why a replica that receives requests is unhealthy, or None."""
        is_serving = any(client.state is State.READY for client in self.clients)
        reasons = [
            (client.why_unhealthy(), replica)
            for replica, client in enumerate(self.clients)
            if client.state is State.READY or not is_serving
        ]
        for reason, replica in reasons:
            if reason is not None:
                is_one = len(self.clients) == 1
                return reason if is_one else f"{self.name_of(replica)}: {reason}"
        return None

    def _connect(self, address: str) -> EngineClient:
        return EngineClient(address, self._clock, self._worker, self.delivery)

    def _watch(self, replica: int) -> None:
        """Note the events of a replica's client."""
        client = self.clients[replica]
        client.on_heartbeat = partial(self._note_heartbeat, replica)
        client.ready.add_done_callback(self._note_ready)
        client.dead.add_done_callback(partial(self._note_death, replica))

    def _loads(self) -> list[ReplicaLoad | None]:
        """Return the loads of the replicas; None for one that is dead, or stuck while another one runs."""
        is_usable = [client.why_unhealthy() is None for client in self.clients]
        if not any(is_usable):
            is_usable = [client.state is State.READY for client in self.clients]
        loads = self._memory.loads()
        return [load if usable else None for load, usable in zip(loads, is_usable, strict=True)]

    def _end_prefill(self, sequence_id: int) -> None:
        replica, num_left = self._prefills.pop(sequence_id, (0, 0))
        self._num_prefill[replica] -= num_left

    def _publish(self, replica: int) -> None:
        """Show the load that this worker sent to the other workers."""
        load = ReplicaLoad(
            self.clients[replica].num_live,
            self._num_prefill[replica],
            self._num_computed[replica],
        )
        self._memory.set_load(self._worker, replica, load)

    def _note_heartbeat(self, replica: int, heartbeat: Heartbeat) -> None:
        self.on_heartbeat(replica, heartbeat)

    def _note_ready(self, future: asyncio.Future[Ready]) -> None:
        if self.ready.done() or not all(client.ready.done() for client in self.clients):
            return
        each = [client.ready.result() for client in self.clients]
        num_kv_tokens = min(ready.num_kv_tokens for ready in each)
        self._memory.fit(num_kv_tokens)
        longest = min(ready.max_model_len for ready in each)
        first = each[0]
        self.ready.set_result(
            Ready(longest, num_kv_tokens, first.vocab_size, first.report, first.is_bidirectional)
        )

    def _note_death(self, replica: int, future: asyncio.Future[str]) -> None:
        self.on_death(replica)
        is_last = all(client.state is State.DEAD for client in self.clients)
        if not self.dead.done() and (is_last or not self.ready.done()):
            reason, is_one = future.result(), len(self.clients) == 1
            self.dead.set_result(reason if is_one else f"{self.name_of(replica)}: {reason}")


class PrefillSink:
    """The sink of a request's first sequence until its first token."""

    def __init__(
        self, replicas: EngineReplicas, replica: int, sequence_id: int, sink: Sink
    ) -> None:
        self._replicas = replicas
        self._place = (replica, sequence_id)
        self._sink = sink

    def take(
        self, token_ids: Sequence[int], finish: int, num_cached: int, logprobs: TokenLogprobs | None
    ) -> bool:
        """Note the end of the prefill, and pass the tokens on."""
        self._replicas.prefilled(*self._place, self._sink)
        return self._sink.take(token_ids, finish, num_cached, logprobs)

    def take_prompt(self, logprobs: PromptLogprobs) -> None:
        """Pass log-probabilities on."""
        self._sink.take_prompt(logprobs)

    def fail(self, error: RequestFailedError) -> None:
        """Pass the error on. The request's end frees its part of the load."""
        self._sink.fail(error)
