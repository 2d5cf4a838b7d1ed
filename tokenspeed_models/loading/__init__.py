"""Weight readers, one module per load format. Each has a `WeightReader`."""
