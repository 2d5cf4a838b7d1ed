"""Triton kernels of fused."""
