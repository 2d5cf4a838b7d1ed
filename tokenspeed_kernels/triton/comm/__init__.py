"""Triton kernels of collectives, which read the memory of other GPUs."""
