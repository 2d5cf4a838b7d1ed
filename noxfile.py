"""Checks of the repository: `nox` runs the default ones, `nox -s NAME` runs one, `nox -s release` the slow rest.

All of them use `.venv`, which holds every third-party package and an editable install of every distribution. The
distributions are the folders that have a `pyproject.toml`; no list names them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
VENV, NOX = ROOT / ".venv", ROOT / ".nox"
WHEELS, VENDOR_WHEELS = NOX / "wheels", NOX / "vendors"
FROM_WHEELS = ["--no-index", "--find-links", str(WHEELS)]
PYTHON = str(VENV / "bin" / "python")
UV = VENV / "bin" / "uv"
CORE = "tokenspeed_core"
KIT = "tokenspeed-testing"  # tests import it
CORES = os.cpu_count() or 1
# Processes of pytest, each of which may import torch; more than cores, for tests that wait for servers.
WORKERS = min(4, CORES + 2)
CLIENTS: dict[str, Any] = nox.project.load_toml(ROOT / "tests" / "clients" / "environments.toml")
GROUPS = ("build", "test", "oracle", "docs", "lint")
# Third-party modules that most tests import.
IMPORTED = ("anthropic", "openai", "ray", "torch", "transformers.modeling_utils")
# Without cached bytecode, each process would compile the tests and all packages again.
UNSET = ("PYTHONDONTWRITEBYTECODE",)
# Settings of pip, and the variables of uv for the same.
PIP_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}

# Shells start background jobs with SIGINT ignored; the tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
nox.options.default_venv_backend = "none"
nox.options.sessions = ["setup", "lint", "tests", "interpreter", "wheels"]


@dataclass(frozen=True)
class Distribution:
    """One of our distributions: its folder, and its pyproject.toml."""

    folder: str
    manifest: dict[str, Any]

    @property
    def tests(self) -> list[str]:
        """The folder of the distribution's tests, if it has one."""
        return [f"{self.folder}/tests"] if (ROOT / self.folder / "tests").is_dir() else []

    @property
    def settings(self) -> dict[str, Any]:
        """The table [tool.tokenspeed]: settings for the sessions."""
        found: dict[str, Any] = self.manifest.get("tool", {}).get("tokenspeed", {})
        return found

    @property
    def requirements(self) -> list[str]:
        """Third-party requirements, including those of extras, without the large libraries of vendors."""
        project = self.manifest["project"]
        extras = project.get("optional-dependencies", {}).values()
        lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
        vendors = [name for each in self.vendors for name in each["libraries"]]
        ours = ("tokenspeed", *(name.partition("==")[0] for name in vendors))
        return [line for line in lines if not line.startswith(ours)]

    @property
    def vendors(self) -> list[dict[str, Any]]:
        """Tests that compare our calls with vendors' libraries, each with the versions to test."""
        found: list[dict[str, Any]] = self.settings.get("vendors", [])
        return found


def distributions() -> list[Distribution]:
    """Find our distributions: the core first, then by folder."""
    manifests = sorted(ROOT.glob("tokenspeed_*/pyproject.toml"))
    manifests += sorted(ROOT.glob("plugins/*/pyproject.toml"))
    return [
        Distribution(str(path.parent.relative_to(ROOT)), nox.project.load_toml(path))
        for path in manifests
    ]


ALL = distributions()
PLUGINS = [each for each in ALL if each.folder != CORE]
SUITE = [
    "tests/core",
    "tests/cpu",
    "tools/demo/tests",
    *(path for each in ALL for path in each.tests),
]


@nox.session
def setup(session: nox.Session) -> None:
    """Update .venv; other sessions do this too if needed."""
    ready(session)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and import directions."""
    python = ready(session)
    run(session, python, "-m", "ruff", "check", ".")
    run(session, python, "-m", "ruff", "format", "--check", ".")
    run(session, python, "-m", "codespell_lib", "--quiet-level", "2")
    run(session, python, "tools/check_imports.py")


@nox.session
def types(session: nox.Session) -> None:
    """Types, which the tests check too."""
    run(session, ready(session), "tools/check_types.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/ and check its links, as a test does too."""
    run(session, ready(session), "-m", "mkdocs", "build", "--strict")


@nox.session
def tests(session: nox.Session) -> None:
    """Tests of the core, on the CPU, and of the plugins. mypy runs at the same time."""
    python = ready(session)
    if session.posargs:
        pytest(session, python, *SUITE)
        return
    with meanwhile(session, python, "tools/check_types.py"):
        # Many tests depend on the timing of processes. The summary lists those that passed only the second time.
        pytest(session, python, "--reruns", "1", "-raR", *SUITE)


@nox.session
@nox.parametrize("name", list(CLIENTS), ids=list(CLIENTS))
def clients(session: nox.Session, name: str) -> None:
    """Client libraries against a server with the demo, in separate environments."""
    ready(session)
    home = NOX / f"clients-{name}"
    if not home.is_dir():
        run(session, sys.executable, "-m", "venv", "--without-pip", str(home))
    python = str(home / "bin" / "python")
    tools = ("pytest", "pytest-asyncio", "pytest-timeout")
    install(session, *CLIENTS[name]["requirements"], *tools, python=python)
    with session.chdir("tests/clients"):
        run(
            session,
            *(python, "-m", "pytest", "-q", "-c", "pytest.ini"),
            *CLIENTS[name]["tests"],
            *session.posargs,
        )


@nox.session
def pages(session: nox.Session) -> None:
    """The server's pages in headless Chromium, which has to be on the PATH."""
    python = ready(session)
    install(session, "playwright")
    pytest(session, python, "tests/cpu/test_pages.py", num_workers=1)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Requests that schemathesis generates from the server's OpenAPI description; no 5xx is allowed."""
    run(session, ready(session), "tools/fuzz.py", *session.posargs)


@nox.session
def interpreter(session: nox.Session) -> None:
    """Triton kernels under Triton's interpreter, which is chosen before a kernel is imported."""
    options: dict[str, Any] = {"dist": "worksteal", "num_workers": min(4, CORES)}
    pytest(session, ready(session), "tests/interpreter", TRITON_INTERPRET="1", **options)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every wheel; install the core's alone, then all of them together, outside this tree."""
    python = ready(session)
    build_wheels(session, python)
    core_alone(session)
    installed = environment(session, "installed", *map(wheel, ALL))
    outside(session, installed, "tests/wheels", "tests/together/test_demo.py", num_workers=1)


@nox.session
def release(session: nox.Session) -> None:
    """Slow and exhaustive checks, to run before a release: marked tests, and every distribution alone."""
    python = ready(session)
    pytest(session, python, "-m", "release", *SUITE)
    pytest(session, python, "-m", "release", "tests/interpreter", TRITON_INTERPRET="1")
    build_wheels(session, python)
    core = core_alone(session)
    install(session, *FROM_WHEELS, KIT, python=core)
    outside(session, core, "tests/core")
    for each in PLUGINS:
        alone = environment(session, f"{Path(each.folder).name}-alone", wheel(each), KIT)
        outside(session, alone, "tests/wheels", *each.tests, *each.settings.get("alone", ()))
    together = environment(session, "together", "tokenspeed-core[default]")
    outside(session, together, "tests/wheels", "tests/together", num_workers=1)
    session.notify("vendors")


@nox.session
def gpu(session: nox.Session) -> None:
    """Tests on a GPU, with the Python (and its torch) that runs nox."""
    # These use the device that `--device auto` finds.
    anywhere = ("logits_processors", "prompt_logprobs", "structured_outputs")
    files = [f"tests/cpu/test_{name}.py" for name in anywhere]
    pytest(session, sys.executable, "tests/gpu", *files, num_workers=1)


@nox.session
def vendors(session: nox.Session) -> None:
    """Download the vendors' libraries, renew the recorded signatures, and check our calls. Needs no GPU."""
    python = ready(session)
    for plugin in PLUGINS:
        for each in plugin.vendors:
            tests = f"{plugin.folder}/{each['tests']}"
            folders = [VENDOR_WHEELS / library for library in each["libraries"]]
            # The library may have wheels for another Python only.
            options = ["--no-deps"]
            if "python" in each:
                options += ["--only-binary=:all:", "--python-version", each["python"]]
            for folder in folders:
                pip(session, "download", "-q", *options, "-d", str(folder), folder.name)
            home = Path(tests).parent if tests.endswith(".py") else Path(tests)
            found = [str(path) for folder in folders for path in folder.glob("*.whl")]
            kept = str(ROOT / home / "signatures.json")
            run(session, python, "-m", "tokenspeed_testing.signatures", kept, *found)
            for folder in folders:
                pytest(session, python, tests, TOKENSPEED_VENDOR_WHEELS=str(folder))


def ready(session: nox.Session) -> str:
    """Install third-party packages in one call, then our distributions, editable. Return .venv's Python."""
    wanted = {line for each in ALL for line in each.requirements}
    manifest = nox.project.load_toml(ROOT / "pyproject.toml")
    wanted.update(nox.project.dependency_groups(manifest, *GROUPS))
    wanted.update(line for line in requirements() if not line.startswith("-e"))
    packages = sorted(wanted)
    editable = [part for each in ALL for part in ("-e", f"./{each.folder}")]
    manifests = [(ROOT / each.folder / "pyproject.toml").read_text() for each in ALL]
    digest = hashlib.sha256("\n".join([sys.version, *packages, *manifests]).encode()).hexdigest()
    stamp = VENV / "ready"
    if stamp.is_file() and stamp.read_text() == digest:
        return PYTHON
    if not VENV.is_dir():
        run(session, sys.executable, "-m", "venv", str(VENV))
    if not UV.is_file():
        pip(session, "install", "-q", "uv")
    install(session, *packages)
    # uv compiles no bytecode. One process does it here for the modules that most tests import, before several
    # processes of pytest do the same work at once.
    with meanwhile(session, PYTHON, "-c", f"import {', '.join(IMPORTED)}"):
        install(session, "--no-deps", "--no-build-isolation", *editable)
    stamp.write_text(digest)
    return PYTHON


def requirements() -> Iterator[str]:
    """Yield the lines of requirements.txt."""
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            yield line


def build_wheels(session: nox.Session, python: str) -> None:
    """Build the wheels of all distributions."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    folders = [each.folder for each in ALL]
    run(session, python, "tools/build_wheels.py", str(WHEELS), *folders)


def wheel(distribution: Distribution) -> str:
    """Return the path of a distribution's wheel."""
    (path,) = WHEELS.glob(f"{Path(distribution.folder).name.replace('-', '_')}-*.whl")
    return str(path)


def core_alone(session: nox.Session) -> str:
    """Install the core's wheel with only its declared dependencies, and run it without a tensor library."""
    home = NOX / "core-alone"
    shutil.rmtree(home, ignore_errors=True)
    run(session, sys.executable, "-m", "venv", "--without-pip", str(home))
    python = str(home / "bin" / "python")
    tests = nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), "test")
    core = next(each for each in ALL if each.folder == CORE)
    install(session, wheel(core), *tests, python=python)
    absent = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ['torch', 'triton'])))"
    run(session, python, "-c", absent)
    run(session, str(home / "bin" / "tokenspeed"), "--help", silent=True)
    return python


def environment(session: nox.Session, name: str, *packages: str) -> str:
    """Make an environment that sees .venv's third-party packages, install wheels there, and return its Python."""
    home = NOX / name
    shutil.rmtree(home, ignore_errors=True)
    run(session, sys.executable, "-m", "venv", "--without-pip", str(home))
    (site,) = home.glob("lib/python*/site-packages")
    (shared,) = VENV.glob("lib/python*/site-packages")
    for path in shared.iterdir():
        if "tokenspeed" in path.name or path.suffix == ".pth":
            continue
        if path.suffix == ".dist-info":
            shutil.copytree(path, site / path.name)  # uv does not follow links to metadata
        else:
            (site / path.name).symlink_to(path)
    python = str(home / "bin" / "python")
    install(session, *FROM_WHEELS, *packages, python=python)
    return python


def outside(session: nox.Session, python: str, *arguments: str, num_workers: int = WORKERS) -> None:
    """Run copies of some tests in a folder from which this tree cannot be imported."""
    tests = [part for part in arguments if part.startswith(("tests/", "plugins/", "tokenspeed_"))]
    with tempfile.TemporaryDirectory(prefix="tokenspeed-") as copy:
        for folder in {str(Path(path).parent) if path.endswith(".py") else path for path in tests}:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, Path(copy, folder), ignore=ignored)
        for name in ("pyproject.toml", "conftest.py"):
            shutil.copy(ROOT / name, copy)
        with session.chdir(copy):
            marks = "not tree and not release"
            pytest(session, python, "-m", marks, *arguments, num_workers=num_workers)


def pytest(
    session: nox.Session,
    python: str,
    *arguments: str,
    num_workers: int = WORKERS,
    dist: str = "loadfile",
    **variables: str,
) -> None:
    """Run pytest in a few processes, without the developer's settings of TokenSpeed.

    With arguments of the developer's (`nox -s tests -- -k name`) it is one process, as a debugger needs it.
    """
    ours = {name: None for name in os.environ if name.startswith("TOKENSPEED_") or name in UNSET}
    # One thread each, and waiting threads sleep: the processes share the cores.
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    is_one = num_workers == 1 or session.posargs
    spread = ["-n", str(num_workers), "--dist", dist, "--no-loadscope-reorder"]
    run(
        session,
        *(python, "-P", "-m", "pytest", "-q", "--durations=25", "--durations-min=1"),
        *([] if is_one else spread),
        *arguments,
        *session.posargs,
        **{**ours, **threads, **variables},
    )


def install(session: nox.Session, *packages: str, python: str = PYTHON) -> None:
    """Install packages into a Python's environment with uv, which needs a tenth of pip's time."""
    run(session, str(UV), "pip", "install", "-q", "--python", python, *packages, **uv_settings())


@functools.cache
def uv_settings() -> dict[str, str]:
    """Translate pip's configuration (files and variables) for uv, which reads only its own.

    As pip does, uv then takes the best version of all indexes. Variables that are set already win.
    """
    listed = [PYTHON, "-m", "pip", "config", "list"]
    lines = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, str] = {}
    # Later sections win: all commands, `pip install`, the environment.
    for section in ("global.", "install.", ":env:."):
        for line in lines:
            name, _, value = line.removeprefix(section).partition("=")
            if line.startswith(section) and name in PIP_SETTINGS:
                values = str(ast.literal_eval(value)).split()
                separator = "," if name == "find-links" else " "
                found[PIP_SETTINGS[name]] = separator.join(values)
    found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if name not in os.environ}


def pip(session: nox.Session, *arguments: str) -> None:
    """Run .venv's pip."""
    run(session, PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments)


@contextlib.contextmanager
def meanwhile(session: nox.Session, *command: str) -> Iterator[None]:
    """Run a program during a block and print its output afterwards. Its failure fails the session."""
    environ = {name: value for name, value in os.environ.items() if name not in UNSET}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield
            process.wait()
        finally:
            process.kill()  # if the block failed, or was interrupted
            process.wait()
            output.seek(0)
            print(f"nox > {' '.join(command)}\n{output.read()}", end="", flush=True)
    if process.returncode:
        session.error(f"{' '.join(command)} failed")


def run(session: nox.Session, *command: str, silent: bool = False, **variables: str | None) -> None:
    """Run a program of an environment that nox did not make."""
    session.run(*command, external=True, silent=silent, env=variables)
