"""Quantization of activations to FP8 or INT8, alone or fused with the norm or activation before it."""
