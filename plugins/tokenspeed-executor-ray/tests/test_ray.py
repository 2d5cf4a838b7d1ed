"""Ranks on a Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.errors import EngineDeadError, PluginError

# Starting Ray takes 10 to 20 s.
pytestmark = pytest.mark.release

SETTINGS = {
    "device": "cpu",
    "tensor_parallel_size": 2,
    "kv_cache_memory": "8MB",
    "distributed_executor_backend": "ray",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2, include_dashboard=False)
    ray.init(address=made.address)
    yield made
    ray.shutdown()
    made.shutdown()  # type: ignore[no-untyped-call]


def rank_processes() -> list[psutil.Process]:
    """Return the ranks that Ray's actors started."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "tokenspeed_core.worker.process" in (process.info["cmdline"] or ())
        and "ray::" in " ".join(psutil.Process(process.ppid()).cmdline())
    ]


def test_cluster_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(PluginError, match=f"RAY_ADDRESS={address}"):
        LLM(**SETTINGS)  # type: ignore[arg-type]


def test_two_nodes_answer_until_a_rank_dies(cluster: Cluster) -> None:
    with LLM(**SETTINGS, nnodes=2) as llm:  # type: ignore[arg-type]
        (rank,) = rank_processes()
        (actor,) = llm._engine.runner._ranks._executor._workers.values()  # type: ignore[attr-defined]
        where = actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
        assert ray.get(where) != ray.get_runtime_context().get_node_id()
        answer = llm.chat("What is 23 + 45?", SamplingParams(temperature=0, max_tokens=60))
        assert "68" in str(answer[0].outputs[0].text)
        rank.kill()
        with pytest.raises(EngineDeadError, match="rank 1 of 2 was killed by SIGKILL"):
            llm.generate(["a"] * 64, SamplingParams(max_tokens=1000, ignore_eos=True))
    assert not psutil.pid_exists(rank.pid)


def test_server_on_two_nodes_answers_until_a_rank_dies(cluster: Cluster, tmp_path: Path) -> None:
    command = (sys.executable, "-P", "-m", "tokenspeed_core.cli", "serve", "demo", "--port", "0")
    nodes = ("--tp", "2", "--nnodes", "2", "--distributed-executor-backend", "ray")
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "TMPDIR": str(tmp_path)}
    with (tmp_path / "stderr").open("w+") as errors:
        server = subprocess.Popen(
            [*command, *nodes, "--device", "cpu", "--kv-cache-memory", "8MB"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        try:
            assert server.stdout is not None
            found = re.search(r"at (http://\S+)", server.stdout.readline())
            assert found, (tmp_path / "stderr").read_text()
            (rank,) = rank_processes()
            children = psutil.Process(server.pid).children(recursive=True)
            messages = [{"role": "user", "content": "What is 23 + 45?"}]
            with httpx.Client(base_url=found[1], trust_env=False, timeout=60) as client:
                answer = client.post(
                    "/v1/chat/completions", json={"messages": messages, "temperature": 0}
                )
            assert "68" in answer.json()["choices"][0]["message"]["content"]
            rank.kill()
            assert server.wait(5) == 2
        finally:
            server.kill()
            server.wait()
    assert "rank 1 of 2 was killed by SIGKILL" in (tmp_path / "stderr").read_text()
    assert not psutil.wait_procs([rank, *children], timeout=60)[1]


def test_missing_nodes_are_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed_executor_ray.executor.PLACEMENT_SECONDS", 1.0)
    with pytest.raises(PluginError, match="3 nodes"):
        LLM(**{**SETTINGS, "tensor_parallel_size": 3}, nnodes=3)  # type: ignore[arg-type]
