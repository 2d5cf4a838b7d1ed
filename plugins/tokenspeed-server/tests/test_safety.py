"""The core and the server do not execute or unpickle data."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenspeed_server

import tokenspeed_core

FILES = [
    path
    for package in (tokenspeed_core, tokenspeed_server)
    for path in sorted(Path(package.__file__).parent.rglob("*.py"))
]
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "xmlrpc",
    "telnetlib",
}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    ("os", "system"),
    ("os", "popen"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("torch", "load"),
}


def offences(tree: ast.AST) -> Iterator[str]:
    """Yield the unsafe calls and imports of a file."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"imports {n.name}" for n in names if n.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield f"imports {module}"
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield f"calls {name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if (
                module,
                name,
            ) in METHODS:
                yield f"calls {module}.{name}"
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield "starts a shell"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield "unpickles arrays"


@pytest.mark.parametrize(
    "source", ["import pickle", "from dill import x", "eval('1')", "os.system('x')"]
)
def test_search_finds_unsafe_code(source: str) -> None:
    assert list(offences(ast.parse(source)))


def test_core_and_server_have_no_unsafe_code() -> None:
    found = {
        str(path): unsafe
        for path in FILES
        if (unsafe := list(offences(ast.parse(path.read_text()))))
    }
    assert found == {}
    assert len(FILES) > 30


def test_api_worker_imports_no_tensor_library() -> None:
    code = (
        "import sys, tokenspeed_server.serve;"
        "bad = {'torch', 'transformers', 'triton', 'safetensors'} & set(sys.modules); print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
