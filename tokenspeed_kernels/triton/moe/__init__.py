"""Triton kernels of moe."""
