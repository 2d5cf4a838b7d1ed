"""Fused kernels of plugins give the tokens of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import save_reference
from tokenspeed_testing.plans import PlanMaker

from tokenspeed_core.api import Capability, KernelSpec, Problem
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.kernels.installed import InstalledKernel, installed_kernels
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker import assemble
from tokenspeed_core.worker.local import LocalRunner, build
from tokenspeed_kernels.contracts import DENSE, ROPE_CACHE
from tokenspeed_kernels.reference import fused_linear
from tokenspeed_models.layers import fusion

PROMPTS = {"a": list(range(3, 26)), "b": [7, 7, 90, 1], "c": list(range(60, 20, -1))}


def start(folder: Path) -> LocalRunner:
    """Return a worker for a checkpoint."""
    catalog = Catalog.discover()
    config = Config(
        model=str(folder),
        device="cpu",
        max_model_len=128,
        max_num_seqs=4,
        chunked_prefill_size=128,
        block_size=4,
        max_total_tokens=2048,
    )
    resolved = resolve(config, catalog)
    return build(resolved, catalog, lambda what, done, total: None)


def check_against_transformers(family: str, folder: Path) -> LocalRunner:
    """Run a family's tiny checkpoint and compare its tokens; return the worker."""
    reference = save_reference(family, folder)
    runner = start(folder)
    maker = PlanMaker(runner.block_size, runner.layout.blocks_per_page)
    for slot, (name, prompt) in enumerate(PROMPTS.items()):
        maker.add(name, prompt, slot)
    maker.step(runner, chunks={"a": 23})
    maker.step(runner, decodes=["a"], chunks={"b": 4, "c": 11})
    maker.step(runner, decodes=["a", "b"], chunks={"c": 29})
    for _ in range(12):
        maker.step(runner, decodes=list(PROMPTS))
    for name, sequence in maker.sequences.items():
        with torch.inference_mode():
            logits = reference(torch.tensor([sequence.tokens])).logits[0]
        for at in range(sequence.num_prompt - 1, len(sequence.tokens) - 1):
            chosen = logits[at, sequence.tokens[at + 1]]
            assert logits[at].max() - chosen <= 1e-4, f"{name}, position {at}"
    return runner


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_rotation_and_cache_write_are_fused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [
        InstalledKernel(
            KernelSpec(
                contract.name, "own", Capability(("cpu",), ("float32",)), contract.reference
            ),
            "a-plugin",
        )
        for contract in ROPE_CACHE
    ]
    monkeypatch.setattr(
        assemble, "installed_kernels", lambda *arguments: (*installed_kernels(*arguments), *own)
    )
    runner = check_against_transformers(family, tmp_path)
    ops = {planned.op: planned for planned in runner.kernel_plan.ops}
    assert not {"rope", "qk_norm_rope", "write_kv"} & set(ops)
    fused = ops["rope_write_kv" if family == "Llama" else "qk_norm_rope_write_kv"]
    assert (fused.backend, fused.layers) == ("own", (0, 1, 2))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("fused_block", [23, 16, 31, *[3] * 12]),
        ("fused_block_in_place", [23, 31]),
    ],
)
@pytest.mark.parametrize(
    ("family", "is_fused"), [("Llama", True), ("Mistral", True), ("Qwen2", False)]
)
def test_fused_block_gives_the_same_tokens(
    family: str,
    is_fused: bool,
    op: str,
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if op == "fused_block_in_place":  # prompts here are shorter than its default
        monkeypatch.setattr(fusion, "MAX_SMALL_BATCH", 16)
        monkeypatch.setattr(fusion, "MIN_LARGE_BATCH", 20)
    contract = next(each for each in DENSE if each.name == op)
    own = InstalledKernel(
        KernelSpec(op, "own", Capability(("cpu",), ("float32",)), contract.reference), "a-plugin"
    )
    monkeypatch.setattr(
        assemble, "installed_kernels", lambda *arguments: (*installed_kernels(*arguments), own)
    )
    num_rows: list[int] = []
    reference = getattr(fused_linear, op)

    def counting(problem: Problem) -> Callable[..., Any]:
        kernel = reference(problem)

        def apply(x: torch.Tensor, *others: Any) -> Any:
            num_rows.append(len(x))
            return kernel(x, *others)

        return apply

    monkeypatch.setattr(fused_linear, op, counting)
    runner = check_against_transformers(family, tmp_path)
    # Three layers have two fused blocks. The op takes no biases, which Qwen2 has.
    assert num_rows == ([n for n in expected for _ in range(2)] if is_fused else [])
    assert [planned.layers for planned in runner.kernel_plan.find(op)] == [(0, 1)] * is_fused
