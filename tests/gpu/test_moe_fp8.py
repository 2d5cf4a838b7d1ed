"""FP8 experts on a device: Triton kernels at model sizes, and a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenspeed_testing.conformance import check, make_inputs, reference
from tokenspeed_testing.shapes import contract_of

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton.moe.tilings import Tiling
from tokenspeed_kernels.triton.moe.tuned import tuned_tilings

TILINGS = tuned_tilings("moe_experts_fp8", Tiling.of)
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
CUDA = torch.device("cuda")
SPECS = {spec.op: spec for spec in descriptors.TRITON_MOE if "fp8" in spec.op}
REAL = {
    "num_experts": 128,
    "top_k": 8,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "dtype": "bfloat16",
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 101,
    "initializer_range": 0.08,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mlp_only_layers": [0],
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FP8, reason="needs a device of compute capability 8.9 or more"),
]


@pytest.mark.parametrize("num_rows", [24, 25, 72, 73, 192, 193, 700])
@pytest.mark.parametrize(("op", "inner"), [("moe_experts_fp8", 80), ("moe_experts_fp8_block", 128)])
def test_experts_conform_around_every_tiling_limit(op: str, inner: int, num_rows: int) -> None:
    case = {
        "num_experts": 6,
        "top_k": 2,
        "hidden_size": 144,
        "intermediate_size": inner,
        "dtype": "bfloat16",
    }
    assert check(SPECS[op], CUDA, cases=[case], num_rows=(num_rows,)) == 2


@pytest.mark.parametrize(
    "num_tokens", [1, 64, *(int(most * 16) for most, _ in TILINGS[1:-1]), 4096]
)
@pytest.mark.parametrize("op", SPECS)
def test_experts_are_exact_to_rounding_at_model_sizes(op: str, num_tokens: int) -> None:
    contract = contract_of(SPECS[op])
    given = make_inputs(contract, REAL, num_tokens, CUDA, strided=False)
    found = SPECS[op].factory()(REAL)(*given.values()).float()
    (expected,) = reference(contract, REAL, given)
    error = float((found - expected).norm() / expected.norm())
    print(f"{num_tokens} tokens: relative error {error:.2e}")
    # Rounding to bfloat16 before quantization may change codes; the effect is far below the quantization error.
    assert error < 2e-2


@pytest.mark.parametrize(
    ("quantization", "op"), [("fp8", "moe_experts_fp8"), ("fp8-block", "moe_experts_fp8_block")]
)
def test_tiny_moe_model_matches_the_reference(quantization: str, op: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(11)
    config = transformers.Qwen3MoeConfig(**SIZES)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    prompt = {"prompt_token_ids": list(range(3, 60))}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)
    firsts = {}
    for backend in ("triton", "torch"):
        with LLM(
            str(tmp_path),
            quantization=quantization,
            kernel_backend={op: backend},
            max_num_seqs=2,
            skip_tokenizer_init=True,
            max_total_tokens=1024,
            enforce_eager=backend == "torch",
        ) as llm:
            assert {planned.backend for planned in llm.kernel_plan.find(op)} == {backend}
            firsts[backend] = llm.generate([prompt], params)[0].outputs[0].logprobs or []
    (ours,), (theirs,) = firsts["triton"], firsts["torch"]
    shared = set(ours) & set(theirs)
    assert len(shared) >= 3, "of the five most probable tokens"
    assert max(abs(ours[token].logprob - theirs[token].logprob) for token in shared) < 0.3
