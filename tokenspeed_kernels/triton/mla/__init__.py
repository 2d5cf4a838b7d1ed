"""Multi-head latent attention (MLA): cache writes, absorbed decode, and prefill."""
