"""Triton kernels of quantize."""
