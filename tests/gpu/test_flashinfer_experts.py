"""FlashInfer's experts on a device, against the reference and in CUDA graphs.

Run only if the library's module is compiled, which takes long:

    python -m tokenspeed_kernels_flashinfer --experts
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from tokenspeed_kernels_flashinfer import EXPERTS
from tokenspeed_kernels_flashinfer.__main__ import experts_module
from tokenspeed_testing.conformance import check, make_inputs, prepared, reference
from tokenspeed_testing.shapes import contract_of

IS_RECENT = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
HAS_LIBRARY = importlib.util.find_spec("flashinfer") is not None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_RECENT, reason="needs a device of compute capability 9.0 or more"),
    pytest.mark.skipif(not HAS_LIBRARY, reason=f"needs its library: {EXPERTS.obtain}"),
    pytest.mark.skipif(
        IS_RECENT and HAS_LIBRARY and not experts_module().is_compiled,
        reason="needs: python -m tokenspeed_kernels_flashinfer --experts",
    ),
]
QWEN3 = {
    "num_experts": 128,
    "top_k": 8,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "dtype": "bfloat16",
}


def test_experts_conform() -> None:
    # The library may add up a token's experts in any order, and the kit compares bits of replayed graphs.
    capability = replace(EXPERTS.capability, features=frozenset())
    assert check(replace(EXPERTS, capability=capability), torch.device("cuda")) >= 8


@pytest.mark.parametrize("num_tokens", [1, 16, 300])
def test_captured_call_replays_on_other_tokens(num_tokens: int) -> None:
    contract, kernel, device = contract_of(EXPERTS), EXPERTS.factory()(QWEN3), torch.device("cuda")
    first, second = (
        make_inputs(contract, QWEN3, num_tokens, device, strided=False, seed=seed)
        for seed in (0, 1)
    )
    expected = reference(
        contract, QWEN3, {**first, **{name: second[name] for name in contract.rows}}
    )
    given = prepared(kernel, contract, first)
    kernel(*given.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(*given.values())
    for name in contract.rows:
        given[name].copy_(second[name])
    graph.replay()
    torch.testing.assert_close(found.float(), expected[0], rtol=3e-2, atol=3e-2)
