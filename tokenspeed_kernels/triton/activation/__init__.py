"""Triton kernels of activation."""
