"""The KV manager: cache groups, pages, block tables and the prefix index. No tensors here."""
