"""Block-scaled (MXFP8, NVFP4) mixture of experts."""
