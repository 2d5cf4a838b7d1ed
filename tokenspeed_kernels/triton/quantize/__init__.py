"""Quantization of activations to FP8, alone or fused with the norm or activation before it."""
