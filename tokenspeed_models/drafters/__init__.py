"""Draft models that read the hidden states of any target."""
