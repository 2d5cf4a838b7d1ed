"""The Blackwell kernels under Triton's interpreter, against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_kernels_blackwell import BLOCK_SCALED, MLA, PREFILL
from tokenspeed_kernels_blackwell.linear.block_scaled import TILINGS
from tokenspeed_kernels_blackwell.linear.reference import nvfp4_values
from tokenspeed_kernels_blackwell.mla import decode as mla_decode
from tokenspeed_testing.attention import Rows, attends, check_attention, limits_of, make_fixture
from tokenspeed_testing.conformance import agrees_with_reference, check, make_inputs
from tokenspeed_testing.shapes import contract_of

from tokenspeed_core.api.attention import AttentionProblem

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about log2(0).
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
SHAPES = [
    (7, 1, 64, 20),
    (3, 3, 128, None),
    (2, 1, 256, 20),
    pytest.param(4, 2, 64, None, marks=pytest.mark.release),
    pytest.param(16, 2, 256, 20, marks=pytest.mark.release),
    pytest.param(4, 2, 64, 20, marks=pytest.mark.release),
    pytest.param(7, 1, 64, None, marks=pytest.mark.release),
    pytest.param(3, 3, 128, 20, marks=pytest.mark.release),
    pytest.param(16, 2, 256, None, marks=pytest.mark.release),
]


def problem(
    num_heads: int, num_kv_heads: int, head_size: int, window: int | None
) -> AttentionProblem:
    # bfloat16 dots are wrong in the interpreter.
    return AttentionProblem(
        "prefill",
        num_heads,
        num_kv_heads,
        head_size,
        "float16",
        "float16",
        64,
        head_size**-0.5,
        window,
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size", "window"), SHAPES)
def test_prefill_matches_the_formula(
    num_heads: int, num_kv_heads: int, head_size: int, window: int | None
) -> None:
    cases = [problem(num_heads, num_kv_heads, head_size, window)]
    assert check_attention(PREFILL, CPU, cases=cases) >= 5


@pytest.mark.parametrize("window", [None, 70, 64])
def test_prefill_with_several_tiles_matches_the_formula(window: int | None) -> None:
    # Three query tokens with 40 heads leave eight rows of a tile of 128 unused.
    given = problem(40, 1, 64, window)
    rows = Rows((1, 64, 2, 65, 1), (129, 192, 2, 130, 64))
    fixture = make_fixture(given, rows, CPU, seed=0)
    attends(PREFILL.factory()(given, limits_of(fixture), CPU), given, fixture, rows)


MORE_ROWS = (0, 1, TILINGS[0].block_t + 1, TILINGS[-1].block_t + 3)


def test_mxfp8_gemm_conforms() -> None:
    assert check(BLOCK_SCALED[0], CPU, num_rows=MORE_ROWS) >= 3 * len(MORE_ROWS)


@pytest.mark.parametrize("num_rows", MORE_ROWS)
def test_nvfp4_gemm_applies_each_group_scale(num_rows: int) -> None:
    """The interpreter reads an e4m3 scale as an exponent. The expected values here do the same."""
    contract = contract_of(BLOCK_SCALED[1])
    for case in contract.cases:
        problem = {**case, "dtype": "float16"}
        given = make_inputs(contract, problem, num_rows, CPU, strided=True)
        found = BLOCK_SCALED[1].factory()(problem)(*given.values())
        x, weight = (
            nvfp4_values(
                given[name], torch.exp2(given[f"{name}_scale"].view(torch.uint8).float() - 127)
            )
            for name in ("x", "weight")
        )
        expected = x @ weight.T * given["scale"] + (0 if given["bias"] is None else given["bias"])
        torch.testing.assert_close(found.float(), expected, rtol=6e-3, atol=6e-3)
        assert num_rows == 0 or (x @ weight.T).abs().max() > 0


@pytest.mark.parametrize(
    ("num_heads", "latent_size", "rope_size", "min_share"),
    [
        (3, 64, 16, 32),
        (70, 64, 16, mla_decode.MIN_SHARE),
        (16, 512, 64, mla_decode.MIN_SHARE),
        pytest.param(3, 64, 16, mla_decode.MIN_SHARE, marks=pytest.mark.release),
        pytest.param(70, 64, 16, 32, marks=pytest.mark.release),
        pytest.param(16, 512, 64, 32, marks=pytest.mark.release),
    ],
)
def test_mla_decode_conforms(
    num_heads: int,
    latent_size: int,
    rope_size: int,
    min_share: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mla_decode, "MIN_SHARE", min_share)
    sizes = {
        "num_heads": num_heads,
        "latent_size": latent_size,
        "rope_size": rope_size,
        "block_size": 64,
        "dtype": "float16",
        "kv_dtype": "float16",  # bfloat16 dots are wrong in the interpreter
    }
    kernel = MLA.factory()(sizes)
    for rows, strided in ((0, False), (1, True), (8, False)):
        agrees_with_reference(kernel, contract_of(MLA), sizes, rows, CPU, strided=strided)


@pytest.mark.parametrize("min_share", [mla_decode.MIN_SHARE, 32], ids=["whole", "split"])
def test_mla_decode_ignores_unwritten_entries(
    min_share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_decode, "MIN_SHARE", min_share)
    sizes = {
        "num_heads": 3,
        "latent_size": 64,
        "rope_size": 16,
        "block_size": 64,
        "dtype": "float16",
        "kv_dtype": "float16",
    }
    cache = torch.full((4, 64, 80), float("nan"), dtype=torch.float16)
    cache[2], cache[0, :21] = 1.0, 1.0
    table, lengths = (
        torch.tensor([[2, 0], [-1, -1]], dtype=torch.int32),
        torch.tensor([85, 0], dtype=torch.int32),
    )
    y = MLA.factory()(sizes)(
        torch.ones(2, 3, 80, dtype=torch.float16), cache, table, lengths, 85, 0.1
    )
    assert torch.equal(y[0], torch.ones_like(y[0])) and torch.equal(y[1], torch.zeros_like(y[1]))
