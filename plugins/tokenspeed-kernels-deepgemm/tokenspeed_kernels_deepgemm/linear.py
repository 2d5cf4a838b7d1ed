"""Block-wise FP8 linear layers with DeepGEMM (Zhao et al., 2025)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import Problem

LIBRARY = "deep_gemm"  # import name of DeepSeek's own build and of the distribution sgl-deep-gemm
GROUP = 128  # features that share a scale
MAX_ROWS = 16384  # rows of a step up to which every kernel is compiled at start
# Numbers of rows that may need a separate kernel: tiles of 16, 32 and multiples of 64 rows.
ROWS = (1, 16, 32, *range(64, MAX_ROWS + 1, 64))
COMPILES_S = 1.0  # if loading takes longer, kernels are being compiled

log = logging.getLogger("tokenspeed.kernels")

Linear = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def linear_fp8_block(problem: Problem) -> Linear:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`. Raises ImportError without the library."""
    multiply = import_module(LIBRARY).fp8_gemm_nt
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        y = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
        if x.shape[0]:
            operands = (x.contiguous(), x_scale.contiguous()), (weight, weight_scale)
            # Scales are any float32, not powers of two.
            multiply(*operands, y, disable_ue8m0_cast=True)
        return y if bias is None else y.add_(bias)

    if torch.cuda.is_available():
        compile_all(linear, problem["in_size"], problem["out_size"], torch.device("cuda"))
    return linear


def compile_all(linear: Linear, in_size: int, out_size: int, device: torch.device) -> None:
    """Call `linear` for every number of rows that may need another kernel, so that no request waits for one.

    The library compiles a kernel in seconds at its first call and caches it on disk; with a full cache this takes a
    few tenths of a second. Needs memory for one step of MAX_ROWS rows and one weight.
    """
    x = torch.zeros((MAX_ROWS, in_size), dtype=torch.float8_e4m3fn, device=device)
    x_scale = torch.ones((MAX_ROWS, in_size // GROUP), device=device)
    weight = torch.zeros((out_size, in_size), dtype=torch.float8_e4m3fn, device=device)
    weight_scale = torch.ones((out_size // GROUP, in_size // GROUP), device=device)
    begin = time.monotonic()
    is_logged = False
    for num_rows in ROWS:
        linear(x[:num_rows], x_scale[:num_rows], weight, weight_scale, None)
        if not is_logged and time.monotonic() - begin > COMPILES_S:
            is_logged = True
            text = "DeepGEMM is compiling kernels for in_size=%d, out_size=%d; this takes up to a minute the first time"
            log.info(text, in_size, out_size)
