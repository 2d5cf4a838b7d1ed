"""Enable Triton's interpreter before any kernel is imported. Other tests must run in another process."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    import triton

    assert triton.knobs.runtime.interpret, "a kernel was imported before TRITON_INTERPRET was set"


@pytest.fixture(scope="session", autouse=True)
def _fast_calls() -> None:
    """Let calls of functions within a kernel find the builtins of `triton.language` quickly.

    For each call, the interpreter inspects all members of the module to replace the builtins, which takes a quarter
    of the time of these tests. The members do not change, so their names are cached.
    """
    from triton.language import core
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            members = ((name, getattr(package, name)) for name in dir(package))
            names[package] = [name for name, member in members if core.is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if core.is_builtin(member):  # not replaced yet
                interpreter._patch_attr(package, name, member, builder, scope)

    assert hasattr(interpreter, "_patch_builtin")
    interpreter._patch_builtin = patch_builtins
