"""The moe kernels for Blackwell."""
