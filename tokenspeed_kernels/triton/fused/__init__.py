"""Fused decoder blocks: everything between the attention of two layers."""
