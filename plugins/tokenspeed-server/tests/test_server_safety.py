"""Nothing that a client, a checkpoint or another process sends is ever executed or unpickled."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenspeed_core

FILES = sorted(Path(tokenspeed_core.__file__).parent.rglob("*.py"))
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
    """Yield what a file must not do."""
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
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(offences(ast.parse(source)))


def test_the_core_executes_and_unpickles_nothing() -> None:
    found = {
        str(path): told for path in FILES if (told := list(offences(ast.parse(path.read_text()))))
    }
    assert found == {}
    assert len(FILES) > 30


def test_the_api_process_imports_no_tensor_library() -> None:
    code = (
        "import sys, tokenspeed_server.serve, tokenspeed_core.text, tokenspeed_core.engine.requests;"
        "bad = {'torch', 'transformers', 'triton', 'safetensors'} & set(sys.modules); print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
