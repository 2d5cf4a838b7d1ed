"""Attention in captured steps, for each installed backend: decode-only and mixed steps.

Backends that compile at their first call are tested only if they are compiled already.
"""

from __future__ import annotations

import pytest
import torch
from tokenspeed_testing.replays import replays

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import KernelSpec, PlatformInfo
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

pytestmark = pytest.mark.gpu

BLOCKS = {"blackwell": 64}


def spec_of(backend: str, problem: AttentionProblem) -> KernelSpec:
    """Return the descriptor that supports the problem here, or skip with the reasons."""
    catalog, capability = Catalog.discover(), torch.cuda.get_device_capability()
    selector = Selector(
        installed_kernels(catalog),
        PlatformInfo("cuda", capability),
        [Override.parse("attention", (backend,))],
        ops=installed_ops(catalog),
        needs=frozenset({"graph_safe"}),
    )
    try:
        spec = selector.select_attention(problem).spec
    except SelectionError as error:
        pytest.skip(str(error))
    if spec.needs_compile:
        pytest.skip(
            f"{backend} would compile for minutes; compile its modules for heads of 128 first"
        )
    return spec


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("window", [None, 20], ids=["whole", "window"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("backend", ["triton", "fa3", "flashinfer", "blackwell", "trtllm", "fa4"])
def test_captured_step_replays_on_other_rows(
    backend: str, phase: str, window: int | None, kv_dtype: str
) -> None:
    problem = AttentionProblem(
        phase, 8, 2, 128, "bfloat16", kv_dtype, BLOCKS.get(backend, 16), 128**-0.5, window
    )
    replays(spec_of(backend, problem), problem, torch.device("cuda"))
