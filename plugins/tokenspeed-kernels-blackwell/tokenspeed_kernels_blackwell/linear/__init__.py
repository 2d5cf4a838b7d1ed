"""Block-scaled (MXFP8, NVFP4) linear layers and quantization."""
