"""Block-wise FP8 linear layers on a device: Triton kernels and a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenspeed_testing.conformance import check, make_inputs
from tokenspeed_testing.shapes import contract_of

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.targets import load_target
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton.linear import gemm_fp8_block
from tokenspeed_kernels.triton.linear.gemm_fp8 import MAX_ROWS
from tokenspeed_kernels.triton.linear.gemm_fp8_block import FEW_ROWS, MIDDLE_ROWS

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
OPS = ("quantize_fp8_groups", "add_rms_norm_fp8_groups", "silu_mul_fp8_groups", "linear_fp8_block")
TRITON = (*descriptors.TRITON_LINEAR, *descriptors.TRITON_NORM, *descriptors.TRITON_ACTIVATION)
SPECS = [spec for spec in TRITON if spec.op in OPS]
ROWS = (
    0,
    1,
    7,
    *(each + more for each in (FEW_ROWS, MAX_ROWS, MIDDLE_ROWS) for more in (0, 1)),
    1090,
)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.08,
    "vocab_size": 101,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FP8, reason="needs a device of compute capability 8.9 or more"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.op)
def test_kernels_conform_in_graphs(spec: KernelSpec) -> None:
    assert check(spec, torch.device("cuda"), num_rows=ROWS) >= len(ROWS)


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("num_rows", [1, 64, 128, 2046, 2048])
@pytest.mark.parametrize(
    ("in_size", "out_size"), [(4096, 6144), (12288, 4096), (4096, 24576), (4224, 4096)]
)
def test_gemm_is_exact_to_rounding_at_model_sizes(
    num_rows: int,
    in_size: int,
    out_size: int,
    *,
    has_library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_library:
        monkeypatch.setattr(gemm_fp8_block, "library_takes", lambda problem: False)
    (spec,) = (each for each in SPECS if each.op == "linear_fp8_block")
    problem = {"in_size": in_size, "out_size": out_size, "dtype": "bfloat16"}
    given = make_inputs(contract_of(spec), problem, num_rows, torch.device("cuda"), strided=True)
    found = spec.factory()(problem)(*given.values())
    reference = load_target(contract_of(spec).reference)({**problem, "dtype": "float32"})
    wide = {
        name: value.float() if name == "bias" and value is not None else value
        for name, value in given.items()
    }
    expected = reference(*wide.values())
    assert (found.float() - expected).norm() / expected.norm() < 4e-3


def test_tiny_model_matches_the_reference(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(11)
    config = transformers.LlamaConfig(**SIZES)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    prompt = {"prompt_token_ids": list(range(3, 60))}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)
    firsts = {}
    for backend in ("triton", "torch"):
        wishes = dict.fromkeys(OPS, backend)
        with LLM(
            str(tmp_path),
            quantization="fp8-block",
            kernel_backend=wishes,
            skip_tokenizer_init=True,
            max_total_tokens=1024,
            max_num_seqs=2,
        ) as llm:
            assert {planned.backend for op in OPS for planned in llm.kernel_plan.find(op)} == {
                backend
            }
            firsts[backend] = llm.generate([prompt], params)[0].outputs[0].logprobs or []
    (ours,), (theirs,) = firsts["triton"], firsts["torch"]
    shared = set(ours) & set(theirs)
    assert len(shared) >= 3, "of the five most probable tokens"
    assert max(abs(ours[token].logprob - theirs[token].logprob) for token in shared) < 0.3
