"""The model families of this distribution, one module per architecture."""
