"""Fixtures for tests that need torch but no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helper modules

from plugin_files import write_acme_moe

# The process that starts the workers of pytest-xdist imports this file too. It runs no test, so it needs no torch.
if TYPE_CHECKING:
    from process_pool import ProcessPool
    from tokenspeed_testing.kernel import KernelConformance

    from tokenspeed_core.plugins.catalog import Catalog
    from tokenspeed_core.resolved import Resolved
    from tokenspeed_core.worker.local import LocalRunner

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Four processes that compute together."""
    from process_pool import ProcessPool

    processes = ProcessPool(4)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def acme_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the plugin of a third-party family with experts."""
    folder: Path = tmp_path_factory.mktemp("acme_moe")
    write_acme_moe(folder)
    return folder


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KernelConformance]:
    """Return a function that makes the conformance suite of a kernel factory; keywords are its capability."""
    from tokenspeed_testing.kernel import KernelConformance

    from tokenspeed_core.api import Capability, KernelSpec

    def make(op: str, factory: Any, **capability: Any) -> KernelConformance:
        module = ModuleType("kernel_under_test")
        module.factory = factory  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kernel_under_test", module)
        defaults: dict[str, Any] = {"platforms": ("cpu",), "dtypes": ("float32", "bfloat16")}
        declared = Capability(**{**defaults, **capability})
        spec = KernelSpec(op, "acme/mine", declared, load="kernel_under_test:factory")
        return type("Suite", (KernelConformance,), {"spec": spec})()

    return make


@pytest.fixture
def many_processors(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make Python subprocesses of a test see sixteen processors."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "sitecustomize.py").write_text(
        "import os\nos.sched_getaffinity = lambda pid: set(range(16))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    from tokenspeed_core.plugins.catalog import Catalog

    return Catalog.discover()


@pytest.fixture(scope="session")
def tiny(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Resolved]:
    """Return a function that resolves a two-layer Qwen3 with dummy weights; keywords are settings."""
    from tokenspeed_core.config import Config
    from tokenspeed_core.engine.factory import resolve

    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    defaults: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "load_format": "dummy",
        "max_num_seqs": 8,
        "chunked_prefill_size": 256,
        "block_size": 4,
        "max_total_tokens": 4096,
    }
    return lambda **settings: resolve(Config.from_keywords(**{**defaults, **settings}), catalog)


@pytest.fixture(scope="session")
def make_runner(catalog: Catalog, tiny: Callable[..., Resolved]) -> Callable[..., LocalRunner]:
    """Return a function that builds a runner with weights so large that each token depends on all earlier ones."""
    from tokenspeed_core.worker.local import build

    def make(**settings: Any) -> LocalRunner:
        runner = build(tiny(**settings), catalog, lambda what, done, total: None)
        for slot in runner._model.weight_map():  # type: ignore[attr-defined]
            if slot.kind != "norm":
                slot.target.mul_(12.0)
        return runner

    return make


@pytest.fixture(scope="module")
def shared_runner(make_runner: Callable[..., LocalRunner]) -> LocalRunner:
    return make_runner()


@pytest.fixture
def runner(shared_runner: LocalRunner) -> Iterator[LocalRunner]:
    """Return a runner with empty slots."""
    shared_runner.forget()
    yield shared_runner
    shared_runner.forget()
