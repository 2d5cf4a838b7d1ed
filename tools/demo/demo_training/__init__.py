"""Code that makes the demo checkpoint: generated data, tokenizer, training."""
