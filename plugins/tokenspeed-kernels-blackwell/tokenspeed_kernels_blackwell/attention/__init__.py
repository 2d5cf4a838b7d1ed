"""The attention kernels for Blackwell."""
