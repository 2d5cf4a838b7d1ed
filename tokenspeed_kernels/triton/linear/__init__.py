"""Linear layers: GEMV for one token, GEMM for more, unquantized and with FP8, INT8 or 4-bit weights."""
