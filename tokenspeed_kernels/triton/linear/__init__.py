"""Triton kernels of linear."""
