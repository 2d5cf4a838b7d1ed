"""Model families import only public modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenspeed_models_deepseek
import tokenspeed_models_gemma
import tokenspeed_models_mistral
import tokenspeed_models_olmo
import tokenspeed_models_phi

import tokenspeed_models

PUBLIC = {
    "tokenspeed_models.config",
    "tokenspeed_models.describe",
    "tokenspeed_models.layers",
    "tokenspeed_models.moe_config",
    "tokenspeed_models.rope_config",
    "tokenspeed_models.sharding",
    "tokenspeed_models.weights",
    "tokenspeed_models.testing",
}
PLUGINS = [
    module.__file__
    for module in (
        tokenspeed_models_deepseek,
        tokenspeed_models_gemma,
        tokenspeed_models_mistral,
        tokenspeed_models_olmo,
        tokenspeed_models_phi,
    )
]


def imports(package: str) -> Iterator[str]:
    for file in Path(package).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                yield node.module
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("package", [tokenspeed_models.__file__, *PLUGINS])
def test_only_the_api_of_the_core_is_imported(package: str) -> None:
    ours = {
        name
        for name in imports(package)
        if name.startswith(("tokenspeed_core", "tokenspeed_kernels"))
    }
    assert ours == {"tokenspeed_core.api"}


@pytest.mark.parametrize("package", PLUGINS)
def test_family_plugin_imports_only_public_modules(package: str) -> None:
    shared = {name for name in imports(package) if name.startswith("tokenspeed_models.")}
    assert shared
    assert shared <= PUBLIC
