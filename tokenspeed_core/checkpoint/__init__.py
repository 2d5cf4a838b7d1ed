"""Checkpoints: finding one by name, downloading it, and reading its configuration."""
