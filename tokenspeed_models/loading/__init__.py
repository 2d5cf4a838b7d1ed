"""Readers of weights, one module per load format, each a `WeightReader`."""
