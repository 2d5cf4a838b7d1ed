"""Linear layers: GEMV for one token, GEMM for more, in 16 bits and in FP8."""
