"""The portable Triton kernels under Triton's interpreter, against the conformance kit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenspeed_testing.attention import attends_to_steps, serves_layers_and_steps
from tokenspeed_testing.conformance import agrees_with_reference, check, make_inputs, run
from tokenspeed_testing.shapes import contract_of, problems

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.targets import load_target
from tokenspeed_kernels import descriptors

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about log2(0).
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
MAX_ELEMENTS = 2000  # per row: the interpreter is slow
TRITON = [
    spec
    for name, specs in sorted(vars(descriptors).items())
    if name.startswith("TRITON_")
    for spec in specs
]
WITH_ONE_ROW = (
    "linear",
    "add_rms_norm_linear",
    "add_rms_norm_linear_silu_mul",
    "add_rms_norm_linear_gelu_tanh_mul",
)
WITH_DOTS = (
    "moe_experts",
    "moe_biased_experts",
    "moe_biased_experts_mxfp4",
    "fused_block",
    "fused_block_in_place",
    *WITH_ONE_ROW,
    "linear_add",
    "linear_silu_mul",
)
TO_FP8 = (
    "quantize_fp8",
    "add_rms_norm_fp8",
    "silu_mul_fp8",
    "quantize_fp8_groups",
    "add_rms_norm_fp8_groups",
    "silu_mul_fp8_groups",
)
SLOW = (
    "fused_block",
    "moe_experts",
    "moe_biased_experts",
    "moe_biased_experts_mxfp4",
    "moe_logits",
    "moe_route",
    "sample",
    "add_rms_norm_linear_silu_mul",
    # rope_write_kv and qk_norm_rope_write_kv have the same rotation.
    "rope",
    "qk_norm_rope",
    "linear_silu_mul",
)
LIKE_OTHERS = (
    "moe_biased_experts",
    "moe_biased_experts_mxfp4",
)  # like moe_experts, so one case suffices
# Row counts that reach the other kernels.
WITH_TILES = {"linear_fp8_block": (65, 130), "find_shared_prefix": (24, 33)}
OF_ROW_FP8 = (
    "quantize_linear_fp8",
    "add_rms_norm_linear_fp8",
    "add_rms_norm_mlp_fp8",
)
# see test_kernels_mla.py
OF_MLA = ("mla_write", "mla_absorb", "mla_decode", "mla_project", "mla_prefill")
COMPOSED = ("add_rms_norm_linear_gelu_tanh_mul",)  # of kernels that are checked with other ops
INTEGERS = (  # see test_gemm_integers.py
    "linear_w4a16",
    "linear_mxfp4",
    "linear_int8",
    "moe_experts_w4a16",
    "moe_experts_mxfp4",
    "quantize_fp8_static",
)
OF_EXPERTS = (  # see test_moe_w8a8.py
    "moe_experts_fp8",
    "moe_experts_fp8_block",
    "moe_experts_fp8_static",
    "moe_experts_int8",
    "moe_experts_int8_static",
)


CONFORMING = [
    spec
    for spec in TRITON
    if spec.op
    not in ("attention", *TO_FP8, *OF_ROW_FP8, *OF_MLA, *COMPOSED, *INTEGERS, *OF_EXPERTS)
]


def interpreted(spec: KernelSpec) -> tuple[KernelSpec, list[dict[str, Any]]]:
    """Return a spec without dtypes that the interpreter computes wrongly, and its cases."""
    if spec.capability.kv_dtypes == ("float8_e4m3fn",):
        pytest.skip("the interpreter loses the carry when rounding up to a power of two")
    if spec.op in WITH_DOTS:  # bfloat16 dots are wrong in the interpreter
        spec = replace(spec, capability=replace(spec.capability, dtypes=("float32", "float16")))
    cases = [dict(p) for p in problems(spec) if p.get("vocab_size", 0) < MAX_ELEMENTS]
    return spec, cases[:1] if spec.op in LIKE_OTHERS else cases


def conforms(spec: KernelSpec) -> None:
    """Run every comparison of the conformance kit."""
    spec, cases = interpreted(spec)
    check(spec, CPU, cases=cases, num_rows=(0, 1, 5, *WITH_TILES.get(spec.op, ())))


@pytest.mark.parametrize(
    "spec", [spec for spec in CONFORMING if spec.op not in SLOW], ids=lambda spec: spec.op
)
def test_kernel_conforms(spec: KernelSpec) -> None:
    conforms(spec)


@pytest.mark.release
@pytest.mark.parametrize(
    "spec", [spec for spec in CONFORMING if spec.op in SLOW], ids=lambda spec: spec.op
)
def test_slow_kernel_conforms(spec: KernelSpec) -> None:
    conforms(spec)


@pytest.mark.parametrize(
    "spec", [spec for spec in CONFORMING if spec.op in SLOW], ids=lambda spec: spec.op
)
def test_slow_kernel_matches_the_reference(spec: KernelSpec) -> None:
    spec, cases = interpreted(spec)
    contract = contract_of(spec)
    for problem in cases:
        kernel = spec.factory()(problem)
        for num_rows, strided in ((0, False), (5, True)):
            agrees_with_reference(kernel, contract, problem, num_rows, CPU, strided=strided)


@pytest.mark.parametrize("spec", [s for s in TRITON if s.op in TO_FP8], ids=lambda s: s.op)
@pytest.mark.parametrize(("dtype", "num_rows"), [("float32", 5), ("float16", 3), ("float16", 0)])
def test_quantization_matches_the_reference(spec: KernelSpec, dtype: str, num_rows: int) -> None:
    contract = contract_of(spec)
    for problem in ({**case, "dtype": dtype} for case in contract.cases):
        found = run(
            spec.factory()(problem),
            contract,
            make_inputs(contract, problem, num_rows, CPU, strided=True),
        )
        given = make_inputs(contract, problem, num_rows, CPU, strided=True)
        codes, scale, *others = run(load_target(contract.reference)(problem), contract, given)
        torch.testing.assert_close(found[1], scale, rtol=2e-3, atol=0)
        torch.testing.assert_close(found[2:], others)
        # The interpreter loses the carry when a value is rounded up to a power of two.
        sure = codes.view(torch.uint8) & 7 != 0
        same = torch.isclose(found[0].float()[sure], codes.float()[sure], rtol=0.13, atol=4e-3)
        assert sure.sum() >= codes.numel() / 2
        assert same.sum() >= 0.98 * sure.sum()


@pytest.mark.parametrize("op", WITH_ONE_ROW)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.release)])
def test_gemv_kernel_adds_a_bias(op: str, dtype: str) -> None:
    (spec,) = (
        spec
        for spec in TRITON
        if spec.op == op and spec.load.startswith("tokenspeed_kernels.triton.linear.gemv:")
    )
    contract = contract_of(spec)
    for problem in ({**case, "dtype": dtype} for case in contract.cases):
        # Inputs with an even number of rows have a bias.
        given = make_inputs(contract, problem, 2, CPU, strided=True)
        assert given["bias"] is not None
        one = {name: value[1:] if name in contract.rows else value for name, value in given.items()}
        expected = run(load_target(contract.reference)(problem), contract, one)
        tolerance = contract.tolerance(dtype)
        for got, want in zip(run(spec.factory()(problem), contract, one), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance.relative, atol=tolerance.absolute)


def attention_problem(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: str,
    kv_dtype: str,
    **features: Any,
) -> AttentionProblem:
    """Return a problem of the phase decode."""
    return AttentionProblem(
        "decode",
        num_heads,
        num_kv_heads,
        head_size,
        dtype,
        kv_dtype,
        block_size,
        head_size**-0.5,
        **{"window": None, **features},
    )


FP8 = "float8_e4m3fn"
ATTENTION = {
    "float32": attention_problem(4, 2, 32, 16, "float32", "float32"),
    "window and sinks": attention_problem(
        7, 1, 48, 8, "float16", "float16", window=20, has_sinks=True
    ),
    "soft cap and sinks": attention_problem(
        2, 2, 16, 64, "float16", "float16", soft_cap=1.0, has_sinks=True
    ),
    "fp8 and window": attention_problem(4, 2, 24, 16, "float16", FP8, window=20),
    "chunks": attention_problem(4, 2, 16, 8, "float16", "float16", window=12, is_chunked=True),
    "small values": attention_problem(4, 2, 48, 16, "float32", "float32", value_head_size=20),
    "fp8, large values and sinks": attention_problem(
        2, 1, 16, 8, "float16", FP8, value_head_size=32, has_sinks=True
    ),
}


def in_release(*names: str) -> list[Any]:
    """Return parameters for ATTENTION; those with these names are tested before releases."""
    mark = {True: pytest.mark.release, False: ()}
    return [
        pytest.param(problem, id=name, marks=mark[name in names])
        for name, problem in ATTENTION.items()
    ]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("problem", in_release("float32", "soft cap and sinks"))
def test_paged_attention_matches_the_formula(phase: str, problem: AttentionProblem) -> None:
    factory = descriptors.TRITON_ATTENTION[0].factory()
    assert attends_to_steps(factory, replace(problem, phase=phase), CPU) >= 5


@pytest.mark.parametrize("features", [{"window": 12}, {"soft_cap": 1.0, "has_sinks": True}])
def test_whole_prompts_see_later_keys(features: dict[str, Any]) -> None:
    problem = attention_problem(
        4, 2, 16, 8, "float32", "float32", is_bidirectional=True, **features
    )
    factory = descriptors.TRITON_ATTENTION[0].factory()
    assert attends_to_steps(factory, replace(problem, phase="prefill"), CPU) >= 5


# The other features do not change the state that a backend keeps between calls.
WITHOUT_STATE = ("float32", "soft cap and sinks", "fp8 and window", "chunks", "small values")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("problem", in_release(*WITHOUT_STATE))
def test_paged_attention_serves_layers_and_steps(phase: str, problem: AttentionProblem) -> None:
    factory = descriptors.TRITON_ATTENTION[0].factory()
    serves_layers_and_steps(factory, replace(problem, phase=phase), CPU)


@pytest.mark.parametrize(
    ("op", "plain", "quantize"),
    [
        ("add_rms_norm_fp8", "add_rms_norm", "quantize_fp8"),
        ("silu_mul_fp8", "silu_mul", "quantize_fp8"),
        ("add_rms_norm_fp8_groups", "add_rms_norm", "quantize_fp8_groups"),
        ("silu_mul_fp8_groups", "silu_mul", "quantize_fp8_groups"),
    ],
)
@pytest.mark.parametrize("size", [64, 1100])
def test_fused_quantization_matches_separate_kernels_bitwise(
    op: str, plain: str, quantize: str, size: int
) -> None:
    problem = {"size": size, "dtype": "float16"}
    kernels = {
        spec.op: spec.factory()(problem) for spec in TRITON if spec.op in (op, plain, quantize)
    }
    contract = contract_of(next(spec for spec in TRITON if spec.op == op))
    given = (make_inputs(contract, problem, 7, CPU, strided=True) for _ in range(2))
    codes, scale, *total = run(kernels[op], contract, next(given))
    rows, *plain_total = run(kernels[plain], contract, next(given))
    expected = kernels[quantize](rows)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale, expected[1])
    assert all(map(torch.equal, total, plain_total))


@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_split_gemm_matches_unsplit_and_resets_counts(
    num_splits: int,
) -> None:
    from tokenspeed_kernels.triton.linear.gemm_fp8 import FewRows, Tiling

    problem = {"in_size": 208, "out_size": 48, "dtype": "float32"}
    contract = contract_of(next(spec for spec in TRITON if spec.op == "linear_fp8"))
    product = FewRows(48, 208, torch.float32, Tiling(32, 32, 4, 2, num_splits))
    for num_rows in (1, 5, 20):
        given = make_inputs(contract, problem, num_rows, CPU, strided=True)
        expected = load_target(contract.reference)(problem)(**given)
        for _ in range(2):
            torch.testing.assert_close(product(**given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("programs", [128, 114, 78, 7])
def test_fused_block_tiles_cover_every_feature(
    programs: int,
) -> None:
    from tokenspeed_kernels.triton.fused.fused_block import tiling

    for heads, hidden, inner, out_size in (
        (2048, 1024, 3072, 4096),
        (4096, 4096, 12288, 6144),
        (128, 64, 192, 256),
    ):
        tiles = tiling(heads, hidden, inner, out_size, programs)
        assert 0 < tiles.G_N <= tiles.G_BLOCK <= 128
        assert 0 < tiles.Q_N <= tiles.Q_BLOCK <= 64
        assert heads % (tiles.O_SPLIT * tiles.O_K) == inner % (tiles.D_SPLIT * tiles.D_K) == 0
        assert hidden % tiles.G_K == hidden % tiles.Q_K == 0
