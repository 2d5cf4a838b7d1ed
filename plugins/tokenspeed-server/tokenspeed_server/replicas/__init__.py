"""Several engines with the same model (`--data-parallel-size`): the router, and the handling of an engine's death."""
