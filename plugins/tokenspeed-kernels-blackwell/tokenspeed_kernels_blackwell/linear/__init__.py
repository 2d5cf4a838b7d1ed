"""The linear kernels for Blackwell."""
