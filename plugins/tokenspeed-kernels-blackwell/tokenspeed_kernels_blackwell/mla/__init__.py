"""The mla kernels for Blackwell."""
