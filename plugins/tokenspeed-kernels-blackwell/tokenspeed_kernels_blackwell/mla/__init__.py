"""Multi-head latent attention (MLA) for decode."""
