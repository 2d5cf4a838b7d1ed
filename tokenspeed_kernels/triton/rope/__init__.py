"""Triton kernels of rope."""
