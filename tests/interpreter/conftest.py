"""Enable Triton's interpreter before any kernel is imported. Other tests must run in another process."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    import triton

    assert triton.knobs.runtime.interpret, "a kernel was imported before TRITON_INTERPRET was set"


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> None:
    """Remove work of the interpreter that changes no result, but takes two fifths of the time of these tests."""
    from triton.language import core
    from triton.runtime import interpreter

    # Checks of integer overflow are computed, and only used if `debug` is on.
    builder: Any = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    # The names of the builtins in a module do not change.
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

    # A table of dtypes is built for each conversion.
    numpy_dtype = interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}

    def find_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = find_dtype

    # The attributes of a type of blocks, and those that a tensor has from its type, are computed for each value.
    make_block_type = core.block_type.__init__
    block_types: dict[Any, dict[str, Any]] = {}

    def find_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (each.value if isinstance(each, core.constexpr) else each for each in shape)
        key = (element_ty.name, *sizes)
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            block_types[key] = dict(vars(self))
        vars(self).update(block_types[key])

    core.block_type.__init__ = find_block_type
    make_tensor = core.tensor.__init__
    tensors: dict[str, dict[str, Any]] = {}

    def find_tensor(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in tensors:
            make_tensor(self, handle, kind)
            tensors[kind.name] = {k: v for k, v in vars(self).items() if k != "handle"}
        vars(self).update(tensors[kind.name], handle=handle)

    core.tensor.__init__ = find_tensor

    # Calls within a kernel replace the builtins of `triton.language` again.
    patch_language = interpreter._patch_lang
    patched: set[Any] = set()  # modules
    is_running = False

    @functools.cache
    def languages(function: Any) -> frozenset[Any]:
        modules = (core, interpreter.tl)
        values = list(function.__globals__.values())
        return frozenset(each for each in modules if any(each is value for value in values))

    def patch_once(function: Any) -> Any:
        nonlocal is_running
        wanted = languages(function)
        if is_running and wanted <= patched:
            return interpreter._LangPatchScope()
        scope = patch_language(function)
        patched.update(wanted)
        if not is_running:  # a kernel, which restores the builtins at its end
            is_running, restore = True, scope.restore

            def end() -> None:
                nonlocal is_running
                is_running = False
                patched.difference_update(wanted)
                restore()

            scope.restore = end
        return scope

    interpreter._patch_lang = patch_once
