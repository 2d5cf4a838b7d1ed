"""Triton kernels of norm."""
