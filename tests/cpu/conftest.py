"""Fixtures of tests that need torch and no device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tokenspeed_core.api import Capability, KernelSpec
from tokenspeed_core.models import ModelSpec
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import load_target
from tokenspeed_core.runner.config import RunnerConfig
from tokenspeed_core.runner.local import LocalRunner, build
from tokenspeed_core.testing.kernel import KernelConformance

sys.path.insert(0, str(Path(__file__).parent))  # the helpers that stand beside the tests
sys.path.append(str(Path(__file__).parents[2] / "docs"))  # and what makes the pages

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 97, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1, "torch_dtype": "float32",
}


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KernelConformance]:
    """Return a maker of suites whose kernel is a factory of the test; keywords are what its spec says it can do."""

    def make(op: str, factory: Any, **capability: Any) -> KernelConformance:
        module = ModuleType("kernel_under_test")
        module.factory = factory  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kernel_under_test", module)
        said = Capability(**{"platforms": ("cpu",), "dtypes": ("float32", "bfloat16"), **capability})
        spec = KernelSpec(op, "acme/mine", said, load="kernel_under_test:factory")
        return type("Mine", (KernelConformance,), {"spec": spec})()

    return make


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return Catalog.discover()


@pytest.fixture(scope="session")
def tiny_config(catalog: Catalog) -> Callable[..., RunnerConfig]:
    """Return a maker of configurations for a two-layer Qwen3 of random weights; keywords change them."""
    spec = catalog.load(catalog.get("models", "Qwen3ForCausalLM"), ModelSpec, required=True)
    assert spec is not None
    defaults: dict[str, Any] = {
        "checkpoint_path": "", "hf_config": TINY, "model_spec": spec, "model_info": load_target(spec.describe)(TINY),
        "dtype": "float32", "device": "cpu", "load_format": "dummy", "max_model_len": 256, "max_num_seqs": 8,
        "max_num_tokens": 256, "block_size": 4, "max_total_tokens": 4096,
    }
    return lambda **changes: RunnerConfig(**{**defaults, **changes})


@pytest.fixture(scope="session")
def make_runner(catalog: Catalog, tiny_config: Callable[..., RunnerConfig]) -> Callable[..., LocalRunner]:
    """Return a builder of runners whose weights are large enough that tokens depend on all that came before."""

    def make(**changes: Any) -> LocalRunner:
        runner = build(tiny_config(**changes), catalog, lambda what, done, total: None)
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
    """Return a runner whose slots are as new."""
    shared_runner.forget()
    yield shared_runner
    shared_runner.forget()
