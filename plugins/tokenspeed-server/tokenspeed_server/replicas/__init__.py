"""Several engines with the same model (`--data-parallel-size`): which one gets a request, and what happens if one dies."""
