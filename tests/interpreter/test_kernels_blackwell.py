"""The Triton kernels for Blackwell under Triton's interpreter, against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_kernels_blackwell import PROMPTS

from tokenspeed_core.kernels.attention import AttentionProblem
from tokenspeed_core.testing.attention import Rows, attends, check_attention, limits_of, make_scene

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's NumPy warns of log2(0)
]

CPU = torch.device("cpu")
SHAPES = [
    (num_heads, num_kv_heads, head_size, window)
    for num_heads, num_kv_heads, head_size in ((4, 2, 64), (7, 1, 64), (3, 3, 128), (16, 2, 256))
    for window in (None, 20)
]


def problem(num_heads: int, num_kv_heads: int, head_size: int, window: int | None) -> AttentionProblem:
    # the interpreter's bfloat16 products are wrong
    return AttentionProblem(
        "prefill", num_heads, num_kv_heads, head_size, "float16", "float16", 64, head_size**-0.5, window
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size", "window"), SHAPES)
def test_prompts_follow_the_formula(num_heads: int, num_kv_heads: int, head_size: int, window: int | None) -> None:
    cases = [problem(num_heads, num_kv_heads, head_size, window)]
    assert check_attention(PROMPTS, CPU, cases=cases) >= 5


@pytest.mark.parametrize("window", [None, 70, 64])
def test_prompts_of_several_tiles_and_blocks_follow_the_formula(window: int | None) -> None:
    asked = problem(40, 1, 64, window)  # three query tokens fill a tile of 128 rows, and leave eight of them
    rows = Rows((1, 64, 2, 65, 1), (129, 192, 2, 130, 64))
    scene = make_scene(asked, rows, CPU, seed=0)
    attends(PROMPTS.factory()(asked, limits_of(scene), CPU), asked, scene, rows)
