"""Our packages do not execute or unpickle data, and the server fetches nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tokenspeed_server
from server_support import running

import tokenspeed_core

SERVER = Path(tokenspeed_server.__file__).parent
CORE = Path(tokenspeed_core.__file__).parent
# All of our packages, if they are in one tree; this file's folder is plugins/tokenspeed-server/tests.
ROOT = Path(__file__).parents[3]
PACKAGES = {
    SERVER,
    CORE,
    *ROOT.glob("tokenspeed_*"),
    *ROOT.glob("plugins/*/tokenspeed_*"),
    *ROOT.glob("benchmarks"),
}
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
CLIENTS = {"urllib.request", "http.client", "requests", "httpx", "aiohttp", "urllib3", "ftplib"}
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
}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_true(keyword: ast.keyword, name: str) -> bool:
    """Whether a keyword argument is `name=True`."""
    match keyword:
        case ast.keyword(arg=found, value=ast.Constant(value=True)):
            return found == name
    return False


def uses_error_only(tree: ast.AST) -> bool:
    """Whether all that a file uses of pickle is the error that torch's safe loader raises."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "pickle"]
    errors = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "UnpicklingError"
        and isinstance(node.value, ast.Name)
    ]
    return bool(errors) and len(names) == len(errors)


def offences(tree: ast.AST) -> Iterator[str]:
    """Yield the unsafe calls and imports of a file."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=[ast.alias(name="pickle")]) if uses_error_only(tree):
                pass
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
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords
            ) if not any(is_true(each, "weights_only") for each in keywords):
                yield "calls torch.load, which unpickles"
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                yield "runs code of a model repository"
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield "starts a shell"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=False)):
                pass
            case ast.keyword(arg="allow_pickle"):
                yield "unpickles arrays"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import x",
        "eval('1')",
        "os.system('x')",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "load(trust_remote_code=True)",
        "run(shell=True)",
        "numpy.load(f, allow_pickle=True)",
        "numpy.load(f, allow_pickle=is_trusted)",
    ],
)
def test_search_finds_unsafe_code(source: str) -> None:
    assert list(offences(ast.parse(source)))


def test_no_package_has_unsafe_code() -> None:
    found = {str(path): unsafe for path in FILES if (unsafe := list(offences(parsed(path))))}
    assert found == {}
    assert len(FILES) > 30


def test_server_has_no_http_client() -> None:
    imported = set()
    for path in sorted(SERVER.rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                imported |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    assert not imported & CLIENTS
    connecting = [
        path.name for path in SERVER.rglob("*.py") if "open_connection" in path.read_text()
    ]
    assert connecting == ["http_client.py"]  # of `run-batch --url`
    users = [path.name for path in SERVER.rglob("*.py") if "batch.http_client" in path.read_text()]
    assert users == ["online.py"]


def test_process_listens_on_its_port_only(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        port = int(server.url.rsplit(":", 1)[1])
        first = psutil.Process(server.process.pid)
        for process in (first, *first.children(recursive=True)):
            for connection in process.net_connections("inet"):
                assert connection.status != psutil.CONN_LISTEN or connection.laddr == (
                    "127.0.0.1",
                    port,
                )


def test_api_worker_imports_no_tensor_library() -> None:
    code = (
        "import sys, tokenspeed_server.serve;"
        "bad = {'torch', 'transformers', 'triton', 'safetensors'} & set(sys.modules); print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
