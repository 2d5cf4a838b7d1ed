"""How the demo checkpoint is made: generated data, tokenizer, training."""
