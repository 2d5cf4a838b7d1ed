"""Paged attention, shared-prefix (cascade) attention, and writes to the KV cache."""
