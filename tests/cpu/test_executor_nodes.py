"""An engine over two nodes that are started one by one, both on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenspeed_demo
import torch
import zmq
from safetensors.torch import load_file
from serving import COMMAND, DEMO, environment, has_ended, served, wait_until

from tokenspeed_core import LLM
from tokenspeed_core.api.executors import ExecutorJob, WorkerExit
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import discover, resolve
from tokenspeed_core.engine.wire import Message, pack
from tokenspeed_core.errors import ConfigError, EngineDeadError
from tokenspeed_core.executor.local import LocalExecutor
from tokenspeed_core.executor.model_files import digest_models, find_differences
from tokenspeed_core.executor.nodes import (
    NodeAlive,
    NodeJoin,
    NodesExecutor,
    RankEnded,
    _comparable,
    run_node,
)
from tokenspeed_core.plugins.catalog import Catalog

pytestmark = pytest.mark.slow

VERSIONS = Catalog.discover().versions()
NOTHING: Mapping[str, Any] = {}


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def two_nodes(
    address: str, ours_only: Mapping[str, Any] = NOTHING, theirs_only: Mapping[str, Any] = NOTHING
) -> tuple[NodesExecutor, Config]:
    """Return the executor of node 0, and the configuration of node 1. Each node has one process."""
    shared = {"tensor_parallel_size": 2, "nnodes": 2, "dist_init_addr": address}
    ours = Config.from_keywords(**shared, **ours_only)
    theirs = Config.from_keywords(**shared, node_rank=1, **theirs_only)
    return NodesExecutor(ExecutorJob(2, 1, "cpu"), ours, VERSIONS), theirs


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (signal.SIGKILL, "is lost: its node 1"),
        pytest.param(signal.SIGINT, "was stopped with its node 1", marks=pytest.mark.release),
    ],
)
def test_two_nodes_serve_and_end_together(tmp_path: Path, end: int, reason: str) -> None:
    nodes = ("--tp", "2", "--nnodes", "2", "--dist-init-addr", free_address())
    flags = (*nodes, "--kv-cache-memory", "8MB")
    with (tmp_path / "node").open("w") as log:
        node = subprocess.Popen(
            [*COMMAND, "serve", *flags, "--node-rank", "1"], stderr=log, env=environment(tmp_path)
        )
    try:
        with served(tmp_path, *flags) as server:
            assert len(psutil.Process(node.pid).children()) == 1
            assert len(server.engine().children()) == 0
            answer = server.openai().chat.completions.create(
                **DEMO, messages=[{"role": "user", "content": "What is 23 + 45?"}]
            )
            assert "68" in (answer.choices[0].message.content or "")
            assert "processes on 2 nodes: attention TP 2" in server.stderr()
            engine = server.engine()
            body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
            with (
                server.http() as client,
                client.stream("POST", "/v1/completions", json=body) as reply,
            ):
                lines = reply.iter_lines()
                next(lines)
                node.send_signal(end)  # its rank ends with it
                assert "engine_dead" in "".join(lines)
            assert server.process.wait(8) != 0
            assert f"the engine died: rank 1 of 2 {reason}" in server.stderr()
            wait_until(lambda: has_ended(engine), 60, "the engine's end")
    finally:
        node.kill()
        node.wait()


def test_node_with_other_settings_cannot_join() -> None:
    assert_refused({}, {"max_num_seqs": 3}, r"--max-num-seqs is 3 on node 1 and 256 on node 0")


def test_second_node_with_a_rank_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    address = free_address()
    joined = threading.Event()
    monkeypatch.setattr(LocalExecutor, "start", lambda *arguments: joined.set())
    executor, node = two_nodes(address)
    executor.start({}, lambda end: None)
    assert joined.is_set()
    joined.clear()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://{address}")
        stranger.send_multipart([b"not", b"a", b"message"])  # is ignored
        stranger.send(pack(NodeJoin(1, json.dumps(_comparable(node)), VERSIONS)))
        assert stranger.poll(5000), "no answer"
        with pytest.raises(ConfigError, match=r"--node-rank 1: another node"):
            run_node(node, Catalog.discover())
    assert not joined.is_set()
    executor.close(1)


def test_node_ends_when_node_0_has_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    address = free_address()
    started = threading.Event()
    monkeypatch.setattr(LocalExecutor, "start", lambda *arguments: started.set())
    executor, node = two_nodes(address)
    executor.start({}, lambda end: None)
    started.clear()

    def restart() -> None:
        assert started.wait(5), "node 1 did not join"
        executor._identities.clear()  # a successor at this address knows no node

    restarting = threading.Thread(target=restart)
    restarting.start()
    with pytest.raises(EngineDeadError, match="node 0 has started again"):
        run_node(node, Catalog.discover())
    restarting.join()
    executor.close(1)


def test_ranks_of_a_predecessors_node_do_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = free_address()
    monkeypatch.setattr(LocalExecutor, "start", lambda *arguments: None)
    executor, node = two_nodes(address)
    ends: list[WorkerExit] = []
    executor.start({}, ends.append)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(f"tcp://{address}")

        def send(*messages: Message) -> None:
            for message in messages:
                client.send(pack(message))
            assert client.poll(5000), "no answer"
            client.recv()

        send(RankEnded(1, "exited with status 1", ()), NodeAlive(1))
        assert not ends
        send(NodeJoin(1, json.dumps(_comparable(node)), VERSIONS))
        send(RankEnded(1, "exited with status 2", ()), NodeAlive(1))
    assert [end.reason for end in ends] == ["exited with status 2"]
    executor.close(1)


def test_nodes_with_different_weights_are_found(tmp_path: Path) -> None:
    demo = Path(tokenspeed_demo.__file__).parent / "checkpoint"
    copied = shutil.copytree(demo, tmp_path / "other")
    with (copied / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")
    first, copy, other = (
        digest_of(folder) for folder in (demo, shutil.copytree(demo, tmp_path / "copy"), copied)
    )
    assert set(first) == {"config.json", "model.safetensors"}
    assert find_differences(first, copy) == ""
    assert find_differences(first, other) == "model.safetensors"


def test_weights_of_a_draft_model_are_compared_in_its_format(tmp_path: Path) -> None:
    head = Path(tokenspeed_demo.__file__).parent / "checkpoint_eagle3"
    shutil.copy(head / "config.json", tmp_path)
    torch.save(load_file(head / "model.safetensors"), tmp_path / "pytorch_model.bin")
    flags = {"speculative_algorithm": "eagle3", "speculative_draft_model_path": str(tmp_path)}
    found = digest_of(head.parent / "checkpoint", **flags, speculative_draft_load_format="pt")
    assert "model.safetensors" in found
    assert "pytorch_model.bin of the draft model" in found


def test_files_of_an_mtp_layer_are_compared_once() -> None:
    model = Path(tokenspeed_demo.__file__).parent / "checkpoint_deepseek"
    assert digest_of(model, speculative_algorithm="mtp") == digest_of(model)


def digest_of(folder: Path, **flags: Any) -> dict[str, str]:
    settings = {"tensor_parallel_size": 2, "nnodes": 2, "dist_init_addr": "a:1", **flags}
    config = Config.from_keywords(model=str(folder), skip_tokenizer_init=True, **settings)
    catalog = discover(config)
    return digest_models(resolve(config, catalog), catalog)


@pytest.mark.parametrize("version", ["0.0.1", None])
def test_node_with_other_plugins_cannot_join(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {name: each for name, each in VERSIONS.items() if name != "tokenspeed-kernels"}
    if version is not None:
        theirs["tokenspeed-kernels"] = version
    monkeypatch.setattr(Catalog, "versions", lambda self: theirs)
    found = version or "is not installed"
    ours = VERSIONS["tokenspeed-kernels"]
    assert_refused({}, {}, f"tokenspeed-kernels {found} on node 1 and {ours} on node 0")


def test_nodes_may_have_the_draft_model_in_different_folders() -> None:
    def drafting(folder: str) -> dict[str, Any]:
        return {"speculative_algorithm": "draft_model", "speculative_draft_model_path": folder}

    def configured(folder: str) -> dict[str, Any]:
        return {"speculative_config": {"method": "draft_model", "model": folder}}

    for drafter in (drafting, configured):
        theirs = {**drafter("/there"), "strict_plugins": True}
        assert_refused(drafter("/here"), theirs, "--strict-plugins is on on node 1")


def assert_refused(ours_only: dict[str, Any], theirs_only: dict[str, Any], message: str) -> None:
    """Let a node with other settings join, and check why it is refused."""
    executor, theirs = two_nodes(free_address(), ours_only, theirs_only)
    executor.start({}, lambda end: None)
    try:
        with pytest.raises(ConfigError, match=message):
            run_node(theirs, Catalog.discover())
    finally:
        executor.close(1)


def test_other_nodes_are_only_started_by_serve() -> None:
    with pytest.raises(ConfigError, match="tokenspeed serve"):
        LLM(tensor_parallel_size=2, nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:1")
