"""Products of e4m3 operands with a scale a block by DeepGEMM (Zhao et al. 2025)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import Problem

LIBRARY = (
    "deep_gemm"  # what DeepSeek's own build and the distribution sgl-deep-gemm are imported as
)
GROUP = 128  # features that share a scale
MAX_ROWS = 16384  # of a step, up to which nothing is compiled when it comes
ROWS = (
    1,
    16,
    32,
    *range(64, MAX_ROWS + 1, 64),
)  # the library chooses a kernel by tiles of 16, 32, or times 64 rows
COMPILES_S = 1.0  # what takes longer is not found but compiled

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
            multiply(
                *operands, y, disable_ue8m0_cast=True
            )  # scales are any float32, not powers of two
        return y if bias is None else y.add_(bias)

    if torch.cuda.is_available():
        compile_all(linear, problem["in_size"], problem["out_size"], torch.device("cuda"))
    return linear


def compile_all(linear: Linear, in_size: int, out_size: int, device: torch.device) -> None:
    """Call `linear` with every number of rows that may take a kernel of its own, so that no request waits for one.

    The library compiles a kernel at the first call that takes it, for seconds, and keeps it on disk: where all are
    there, this takes a few tenths of a second. Memory: what a step of MAX_ROWS takes, and a weight.
    """
    x = torch.zeros((MAX_ROWS, in_size), dtype=torch.float8_e4m3fn, device=device)
    x_scale = torch.ones((MAX_ROWS, in_size // GROUP), device=device)
    weight = torch.zeros((out_size, in_size), dtype=torch.float8_e4m3fn, device=device)
    weight_scale = torch.ones((out_size // GROUP, in_size // GROUP), device=device)
    begin, is_told = time.monotonic(), False
    for num_rows in ROWS:
        linear(x[:num_rows], x_scale[:num_rows], weight, weight_scale, None)
        if not is_told and time.monotonic() - begin > COMPILES_S:
            is_told = True
            text = "DeepGEMM compiles its kernels for %d features in and %d out: up to a minute, the first time"
            log.info(text, in_size, out_size)
