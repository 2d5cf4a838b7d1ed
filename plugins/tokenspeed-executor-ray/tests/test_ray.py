"""Ranks on a Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_missing_nodes_are_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed_executor_ray.executor.PLACEMENT_SECONDS", 1.0)
    with pytest.raises(PluginError, match="3 nodes"):
        LLM(**{**SETTINGS, "tensor_parallel_size": 3}, nnodes=3)  # type: ignore[arg-type]
