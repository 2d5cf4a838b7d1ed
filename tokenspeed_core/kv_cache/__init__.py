"""The KV cache: blocks, block tables and the prefix index. Contains no tensors."""
