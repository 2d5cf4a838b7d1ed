"""Signatures of vendor libraries, read from their wheels without importing them.

A mock that is `restricted_to` a recorded signature rejects calls that the library would reject.
`python -m tokenspeed_testing.signatures FILE WHEEL ...` rewrites the file. Its "read" entry lists
"path/in/wheel.py:function" or ":Class.method", and for compiled code "path/in/wheel.so:name", the
schema of a registered torch op.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

MADE_BY = "python -m tokenspeed_testing.signatures"


def kept(path: Path) -> Mapping[str, Mapping[str, str]]:
    """Return the recorded signatures by library (with version) and name."""
    libraries: Mapping[str, Mapping[str, str]] = json.loads(path.read_text(encoding="utf-8"))[
        "libraries"
    ]
    return libraries


def restricted_to(function: Callable[..., Any], *signatures: str) -> Callable[..., Any]:
    """Return a function that raises TypeError for arguments that a recorded signature does not take."""
    taken = [parsed(each) for each in signatures]

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        for each in taken:
            each.bind(*args, **given)
        return function(*args, **given)

    return checked


def parsed(signature: str) -> inspect.Signature:
    """Return a recorded signature of a Python function; its defaults are `...`."""
    (made,) = ast.parse(f"def made{signature}: pass").body
    assert isinstance(made, ast.FunctionDef)
    kinds, given, empty = inspect.Parameter, made.args, inspect.Parameter.empty
    plain = [*given.posonlyargs, *given.args]
    first = len(plain) - len(given.defaults)
    parameters = [
        kinds(
            each.arg,
            kinds.POSITIONAL_ONLY
            if index < len(given.posonlyargs)
            else kinds.POSITIONAL_OR_KEYWORD,
            default=empty if index < first else ...,
        )
        for index, each in enumerate(plain)
    ]
    parameters += [kinds(given.vararg.arg, kinds.VAR_POSITIONAL)] if given.vararg else []
    parameters += [
        kinds(each.arg, kinds.KEYWORD_ONLY, default=empty if default is None else ...)
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    parameters += [kinds(given.kwarg.arg, kinds.VAR_KEYWORD)] if given.kwarg else []
    return inspect.Signature(parameters)


def read(wheel: Path, name: str) -> str:
    """Return the signature of "path:function", "path:Class.method" or an op in a wheel. Raises LookupError."""
    path, _, wanted = name.partition(":")
    with zipfile.ZipFile(wheel) as archive:
        try:
            content = archive.read(path)
        except KeyError:
            raise LookupError(f"{wheel.name} has no {path}") from None
    found = (
        _in_source(ast.parse(content), wanted)
        if path.endswith(".py")
        else _in_code(content, wanted)
    )
    if not found:
        raise LookupError(f"{path} of {wheel.name} has no {wanted}")
    return found


def _in_source(tree: ast.Module, wanted: str) -> str:
    """Return the signature of a function without types and default values."""
    body: list[ast.stmt] = tree.body
    *owners, last = wanted.split(".")
    for owner in owners:
        body = [
            node
            for each in body
            if isinstance(each, ast.ClassDef) and each.name == owner
            for node in each.body
        ]
    aliases = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
    }
    # Functions may be nested, such as in `try: import LIBRARY`. The last one counts, and those of the module.
    nodes = (*ast.walk(tree), *tree.body) if not owners else body
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    found = functions.get(last) or functions.get(aliases.get(last, ""))
    if found is None:
        return ""
    given = found.args
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None
    given.defaults = [ast.Constant(...) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(...) for default in given.kw_defaults]
    return f"({ast.unparse(given)})"


def _in_code(content: bytes, wanted: str) -> str:
    found = re.search(
        rb"(?<!\w)" + re.escape(wanted.encode()) + rb"(\([^\0]*?\) -> [^\0]*)\0", content
    )
    return re.sub(r",(?=\S)", ", ", found[1].decode()).strip() if found else ""


def renew(path: Path, wheels: Iterable[Path]) -> None:
    """Rewrite a file with the signatures in each wheel that its "read" entry lists. Raises LookupError."""
    names = json.loads(path.read_text(encoding="utf-8"))["read"]
    libraries = {library_of(wheel): {name: read(wheel, name) for name in names} for wheel in wheels}
    command = f"{MADE_BY} {path.name} WHEEL ..., of {', '.join(libraries)}"
    made = {"made by": command, "read": names, "libraries": libraries}
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def library_of(wheel: Path) -> str:
    """Return "name==version" of a wheel."""
    name, version = wheel.name.split("-")[:2]
    return f"{name.replace('_', '-')}=={version}"


if __name__ == "__main__":
    renew(Path(sys.argv[1]), map(Path, sys.argv[2:]))
