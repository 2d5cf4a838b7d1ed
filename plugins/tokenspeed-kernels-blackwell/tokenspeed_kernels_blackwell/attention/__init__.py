"""Attention backends: Triton prefill, FlashAttention-4, and FlashInfer's TensorRT-LLM kernels."""
