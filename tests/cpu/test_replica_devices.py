"""Engines of --data-parallel-size take their own devices, and say so in one line if there are too few."""

from __future__ import annotations

import os

import pytest
import torch

from tokenspeed_core import LLM, AsyncLLM
from tokenspeed_core.config import Config
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.worker.platform import take_devices


def start_driver() -> int:
    """The driver reads CUDA_VISIBLE_DEVICES when it starts."""
    raise AssertionError("the driver started before the devices were chosen")


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return 4 if visible is None else len(visible.split(","))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(torch.cuda, "current_device", start_driver)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "environ", os.environ)


@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize(
    ("visible", "replica", "num_ranks", "expected"),
    [(None, 1, 1, "1"), (None, 1, 2, "2,3"), ("7,GPU-5,3", 2, 1, "3")],
)
def test_replica_sees_its_own_devices(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    replica: int,
    num_ranks: int,
    expected: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    take_devices("auto", replica, replica + 1, num_ranks)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", expected)  # restored at the end


@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize(("name", "num_replicas", "num_ranks"), [("auto", 5, 1), ("cuda", 3, 2)])
def test_too_few_devices_are_refused(name: str, num_replicas: int, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"needs {num_replicas * num_ranks} CUDA.*finds 4"):
        take_devices(name, 0, num_replicas, num_ranks)


@pytest.mark.usefixtures("four_devices")
def test_one_named_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        take_devices("cuda:1", 0, 2, 1)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_python_classes_refuse_replicas(kind: type) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size"):
        kind(data_parallel_size=2)


def test_replicas_run_on_one_machine() -> None:
    with pytest.raises(ConfigError, match="--data-parallel-size"):
        Config.from_keywords(data_parallel_size=2, nnodes=2, dist_init_addr="a:1", world_size=2)
