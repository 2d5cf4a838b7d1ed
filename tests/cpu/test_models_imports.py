"""Model families import only public modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenspeed_models_mistral

import tokenspeed_models

PUBLIC = {
    "tokenspeed_models.config",
    "tokenspeed_models.describe",
    "tokenspeed_models.layers",
    "tokenspeed_models.sharding",
    "tokenspeed_models.weights",
    "tokenspeed_models.testing",
}


def imports(package: str) -> Iterator[str]:
    for file in Path(package).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                yield node.module
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)


@pytest.mark.parametrize(
    "package", [tokenspeed_models.__file__, tokenspeed_models_mistral.__file__]
)
def test_only_the_api_of_the_core_is_imported(package: str) -> None:
    ours = {
        name
        for name in imports(package)
        if name.startswith(("tokenspeed_core", "tokenspeed_kernels"))
    }
    assert ours == {"tokenspeed_core.api"}


def test_family_plugin_imports_only_public_modules() -> None:
    shared = {
        name
        for name in imports(tokenspeed_models_mistral.__file__)
        if name.startswith("tokenspeed_models.")
    }
    assert shared
    assert shared <= PUBLIC
