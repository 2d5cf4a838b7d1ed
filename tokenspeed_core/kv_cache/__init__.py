"""The KV manager: cache groups, blocks, block tables and the prefix index. No tensors here."""
