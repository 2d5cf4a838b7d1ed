"""KV events: a subscriber that reads them knows the content of the prefix cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_world import GROUPS, World
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenspeed_testing.requests import request

from tokenspeed_core.config import Config
from tokenspeed_core.config.kv_events import KVEventsConfig
from tokenspeed_core.engine.kv_event_publisher import KVEventPublisher
from tokenspeed_core.errors import CapacityError, ConfigError
from tokenspeed_core.kv_cache.events import block_hash


class Index:
    """A router's knowledge from the events: the tokens of each cached prefix."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}
        # Removed ones too: a block may outlive its parent.
        self.known: dict[int, tuple[int, ...]] = {}

    def apply(self, events: list[Any]) -> None:
        """Follow events; a stored block's parent must have been stored before it."""
        for kind, (digest,), *rest in events:
            if kind == "BlockRemoved":
                del self.prefixes[digest]
                continue
            parent, tokens, block_size = rest
            assert kind == "BlockStored"
            assert len(tokens) == block_size
            assert digest not in self.prefixes
            before = () if parent is None else self.known[parent]
            self.prefixes[digest] = self.known[digest] = (*before, *tokens)


@pytest.mark.parametrize("groups", list(GROUPS))
@settings(max_examples=15)
@given(data=st.data())
def test_events_describe_the_prefix_index(groups: str, data: st.DataObject) -> None:
    per_page = tuple(data.draw(st.integers(1, 3)) for _ in GROUPS[groups])
    world = World(groups=GROUPS[groups], num_pages=24, blocks_per_page=per_page, max_num_seqs=3)
    log = world.scheduler.kv.collect_events()
    index = Index()
    for number in range(data.draw(st.integers(1, 8))):
        prompt = [1] * data.draw(st.integers(1, 20)) + [2 + number % 3] * data.draw(
            st.integers(0, 8)
        )
        world.submit(request(number, prompt, max_tokens=data.draw(st.integers(1, 10))))
        for _ in range(data.draw(st.integers(0, 6))):
            world.step()
        index.apply(log.take())
    world.run()
    index.apply(log.take())
    held = world.scheduler.kv.index.blocks(log.group)
    assert set(index.prefixes) == {block_hash(digest) for digest in held}
    for prefix in index.prefixes.values():
        assert len(prefix) % world.block_size == 0
        assert set(prefix[:1]) == {1}
    world.engine.reset_prefix_cache()
    index.apply(log.take())
    assert index.prefixes == {}


def test_subscriber_reads_three_frames(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, topic="kv-events")
    world = World()
    publisher = KVEventPublisher(config, world.scheduler.kv.collect_events(), rank=0)
    subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    try:
        subscriber.connect(endpoint)
        subscriber.subscribe(b"kv-events")
        received: list[list[bytes]] = []
        number = 0
        while not received:  # until the subscription has arrived
            world.submit(request(number, [number % 50] * 9, max_tokens=1))
            world.run()
            publisher.publish()
            publisher.publish()  # without events, nothing is sent
            number += 1
            if subscriber.poll(50):
                received.append(subscriber.recv_multipart())
        world.engine.reset_prefix_cache()
        publisher.publish()
        while True:
            received.append(subscriber.recv_multipart())
            timestamp, events, rank = msgspec.msgpack.decode(received[-1][2])
            if events[0][0] == "BlockRemoved":
                break
    finally:
        subscriber.close()
        publisher.close()
    topics, numbers, _ = zip(*received, strict=True)
    assert set(topics) == {b"kv-events"}
    sequence = [int.from_bytes(each, "big") for each in numbers]
    assert all(len(each) == 8 for each in numbers)
    assert sequence == list(range(sequence[0], sequence[0] + len(sequence)))
    assert isinstance(timestamp, float)
    assert rank == 0
    _, (first, second), _ = msgspec.msgpack.decode(received[0][2])
    assert first[0] == second[0] == "BlockStored"
    assert (first[2], second[2]) == (None, first[1][0])
    assert first[4] == second[4] == len(first[3]) == 4


def test_endpoint_in_use_is_reported(tmp_path: Path) -> None:
    config = KVEventsConfig(endpoint="tcp://127.0.0.1:0")
    log = World().scheduler.kv.collect_events()
    publisher = KVEventPublisher(config, log)
    port = publisher._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    with pytest.raises(CapacityError, match="kv-events-config"):
        KVEventPublisher(KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"), log)
    publisher.close()


def test_ranks_publish_on_consecutive_ports() -> None:
    config = KVEventsConfig(endpoint="tcp://*:5557")
    assert [config.endpoint_of(rank) for rank in range(3)] == [
        "tcp://*:5557",
        "tcp://*:5558",
        "tcp://*:5559",
    ]


def test_published_example_is_accepted() -> None:
    text = (
        '{"enable_kv_cache_events":true,"publisher":"zmq",'
        '"endpoint":"tcp://*:5557","topic":"kv-events"}'
    )
    given_config = Config.from_keywords(kv_events_config=text)
    config = Config.from_wire(json.loads(json.dumps(given_config.to_wire()))).kv_events_config
    assert config is not None
    assert config.enable_kv_cache_events
    assert (config.endpoint, config.topic) == ("tcp://*:5557", "kv-events")


@pytest.mark.parametrize(
    "wrong",
    ['{"endpoint": "tcp://*"}', '{"publisher": "nats"}', '{"topics": "a"}', "yes", '{"a'],
)
def test_wrong_config_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_config"):
        Config.from_keywords(kv_events_config=wrong)
