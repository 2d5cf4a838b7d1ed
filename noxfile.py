"""Every check of the repository: `nox` runs them all, `nox -s NAME` one.

Third-party packages are installed once, into `.nox/base`. `.nox/all` sees them and holds this tree as
editable installs; most sessions run there. `wheels` builds what users install and tests it outside the tree.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import nox

ROOT = Path(__file__).parent
NOX, WHEELS = ROOT / ".nox", ROOT / ".nox" / "wheelhouse"
TORCH = "torch==2.13.0"  # what the set-up installs; the code works from 2.11 on
CORE = "tokenspeed_core"
PLUGINS = [
    "tokenspeed_kernels",
    "tokenspeed_models",
    "plugins/tokenspeed-bench",
    "plugins/tokenspeed-chat",
    "plugins/tokenspeed-demo",
    "plugins/tokenspeed-models-mistral",
    "plugins/tokenspeed-parsers",
    "plugins/tokenspeed-plugin-tools",
    "plugins/tokenspeed-server",
    "plugins/tokenspeed-testing",
    "plugins/tokenspeed-kernels-hopper",
    "plugins/tokenspeed-kernels-blackwell",
    "plugins/tokenspeed-kernels-deepgemm",
    "plugins/tokenspeed-kernels-flashinfer",
]
OURS = [CORE, *PLUGINS]
ALONE = {  # tests in this tree that need one distribution, and the core, alone
    "tokenspeed_kernels": [
        "tests/cpu/test_kernels_reference.py",
        "tests/cpu/test_kernels_conformance.py",
    ],
    "tokenspeed_models": ["tests/cpu/test_models_placement.py"],
    "plugins/tokenspeed-models-mistral": ["tests/cpu/test_models_describe.py"],
}
VENDORS = {  # tests that compare ours with a vendor's wheel, and its versions: the oldest taken, and the newest taken
    "plugins/tokenspeed-kernels-hopper/tests": ("tokenspeed-fa3==3.0.0.post20260810",),
    "plugins/tokenspeed-kernels-blackwell/tests/test_flashinfer.py": (
        "flashinfer-python==0.7.2.post1",
    ),
    "plugins/tokenspeed-kernels-blackwell/tests/flash_attn_4": ("flash-attn-4==4.0.0b36",),
    "plugins/tokenspeed-kernels-flashinfer/tests/test_attention.py": (
        "flashinfer-python==0.6.14",
        "flashinfer-python==0.6.18.post1",
    ),
    "plugins/tokenspeed-kernels-deepgemm/tests": ("sgl-deep-gemm==0.1.4", "sgl-deep-gemm==0.2.5"),
}
MODULES = [Path(folder).name.replace("-", "_") for folder in OURS]
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a script's background job ignores it, and tests send it
WORKERS = min(
    4, os.cpu_count() or 1
)  # processes that run tests beside each other; each may hold torch

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "core", "cpu", "interpreter", "wheels"]


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, and who may import whom."""
    python = everything(session)
    run(session, python, "-m", "ruff", "check", ".")
    run(session, python, "-m", "mypy", *(f"-p{module}" for module in MODULES))
    run(session, python, "-m", "mypy", "--allow-untyped-calls", "benchmarks")
    run(
        session,
        python,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
    )


@nox.session
def core(session: nox.Session) -> None:
    """Tests that need no tensor library."""
    pytest(session, everything(session), "tests/core")


@nox.session
def cpu(session: nox.Session) -> None:
    """Tests on the CPU, the plugins' own among them."""
    own = [f"{folder}/tests" for folder in PLUGINS if (ROOT / folder / "tests").is_dir()]
    pytest(session, everything(session), "tests/cpu", *own)


@nox.session
def interpreter(session: nox.Session) -> None:
    """Triton kernels under Triton's interpreter, which must be chosen before a kernel is imported."""
    pytest(session, everything(session), "tests/interpreter", TRITON_INTERPRET="1")


@nox.session
def gpu(session: nox.Session) -> None:
    """Tests on a GPU, with the Python (and its torch) that runs nox."""
    pytest(session, sys.executable, "tests/gpu", num_workers=1)


@nox.session
def vendors(session: nox.Session) -> None:
    """Download the vendors' libraries, which are large, write anew what is kept of them, and check our calls.

    No GPU is needed. What is kept, `signatures.json` beside the tests, is what the calls are held to everywhere else.
    """
    python, wheels = everything(session), NOX / "vendors"
    for tests, libraries in VENDORS.items():
        folders = [wheels / library for library in libraries]
        for folder in folders:
            run(
                session,
                python,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "-d",
                str(folder),
                folder.name,
            )
        beside = (
            ROOT / (tests if not tests.endswith(".py") else Path(tests).parent) / "signatures.json"
        )
        found = [str(wheel) for folder in folders for wheel in folder.glob("*.whl")]
        run(session, python, "-m", "tokenspeed_testing.signatures", str(beside), *found)
        for folder in folders:
            pytest(session, python, tests, TOKENSPEED_VENDOR_WHEELS=str(folder))


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the wheels; test the core's without torch, and each plugin's with only what it declares."""
    base = third_party(session)
    shutil.rmtree(WHEELS, ignore_errors=True)
    run(
        session,
        base,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(WHEELS),
        *(f"./{folder}" for folder in OURS),
    )
    core_alone(session)
    for folder in PLUGINS:
        plugin_alone(session, folder)
    together(session)


def core_alone(session: nox.Session) -> None:
    """Install the core's wheel from scratch: no tensor library comes, and the torch-free tests pass."""
    python = environment(session, "core-alone")
    run(session, python, "-m", "pip", "install", "-q", wheel(CORE), *group("test"))
    run(
        session,
        python,
        "-c",
        "import importlib.util as u, sys; sys.exit(bool(u.find_spec('torch')))",
    )
    outside(session, python, "tests/core")


def plugin_alone(session: nox.Session, folder: str) -> None:
    """Install a plugin's wheel, and of ours only what it declares; it loads, and its own tests pass."""
    python = environment(session, f"{Path(folder).name}-alone", shares_base=True)
    run(
        session,
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--find-links",
        str(WHEELS),
        wheel(folder),
    )
    own = [f"{folder}/tests"] if (ROOT / folder / "tests").is_dir() else []
    outside(session, python, "tests/wheels", *own, *ALONE.get(folder, ()))


def together(session: nox.Session) -> None:
    """Install what `tokenspeed-core[default]` names, and use it as a user would."""
    python = environment(session, "together", shares_base=True)
    run(
        session,
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--find-links",
        str(WHEELS),
        "tokenspeed-core[default]",
    )
    outside(
        session, python, "tests/wheels", "tests/together", num_workers=1
    )  # one test installs, another lists


def outside(session: nox.Session, python: str, *tests: str, num_workers: int = WORKERS) -> None:
    """Run copies of some tests in a folder from which this tree cannot be imported."""
    with tempfile.TemporaryDirectory(prefix="tokenspeed-") as copy:
        for folder in {str(Path(path).parent) if path.endswith(".py") else path for path in tests}:
            shutil.copytree(
                ROOT / folder, Path(copy, folder), ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", copy)
        with session.chdir(copy):
            pytest(session, python, "-m", "not tree", *tests, num_workers=num_workers)


def pytest(
    session: nox.Session, python: str, *arguments: str, num_workers: int = WORKERS, **variables: str
) -> None:
    """Run pytest, a few files beside each other, without the settings that the developer has in the environment.

    With arguments of the developer's (`nox -s core -- -k name`) it is one process, as a debugger needs it.
    """
    ours = {name: None for name in os.environ if name.startswith("TOKENSPEED_")}
    is_one = num_workers == 1 or session.posargs
    spread = (
        [] if is_one else ["-n", str(num_workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    )
    environ = {**ours, "OMP_NUM_THREADS": "1", **variables}
    run(
        session,
        python,
        "-P",
        "-m",
        "pytest",
        "-q",
        *spread,
        *arguments,
        *session.posargs,
        **environ,
    )


def everything(session: nox.Session) -> str:
    """Return the Python that has this tree, editable, and everything it needs."""
    third_party(session)
    editable = [part for folder in OURS for part in ("-e", f"./{folder}")]
    manifests = [(ROOT / folder / "pyproject.toml").read_text() for folder in OURS]
    return environment(
        session,
        "all",
        "--no-deps",
        "--no-build-isolation",
        *editable,
        shares_base=True,
        made_of=manifests,
    )


def third_party(session: nox.Session) -> str:
    """Return the Python of the environment with all that is not ours."""
    tools = [*group("build"), *group("test"), *group("oracle"), *group("lint")]
    return environment(session, "base", TORCH, *sorted(set(declared())), *tools)


def environment(
    session: nox.Session,
    name: str,
    *packages: str,
    shares_base: bool = False,
    made_of: Sequence[str] = (),
) -> str:
    """Make an environment and return its Python; one whose packages are there already stays.

    One without packages is made afresh each time, and one with other `packages` or `made_of` than before.
    One that shares sees what is installed in `.nox/base`, pip included.
    """
    home, python = NOX / name, NOX / name / "bin" / "python"
    stamp, wanted = (
        home / "stamp",
        hashlib.sha256("\n".join([*packages, *made_of]).encode()).hexdigest(),
    )
    if packages and stamp.is_file() and stamp.read_text() == wanted:
        return str(python)
    shutil.rmtree(home, ignore_errors=True)
    run(
        session,
        sys.executable,
        "-m",
        "venv",
        *(["--without-pip"] if shares_base else []),
        str(home),
    )
    if shares_base:
        (site,) = home.glob("lib/python*/site-packages")
        (shared,) = (NOX / "base").glob("lib/python*/site-packages")
        (site / "base.pth").write_text(f"{shared}\n")
    if packages:
        run(session, str(python), "-m", "pip", "install", "-q", *packages)
        stamp.write_text(wanted)
    return str(python)


def declared() -> Iterator[str]:
    """Return the third-party requirements of our distributions, without the vendors' libraries, which are large."""
    vendors = tuple(each.partition("==")[0] for libraries in VENDORS.values() for each in libraries)
    for folder in OURS:
        project = nox.project.load_toml(ROOT / folder / "pyproject.toml")["project"]
        extras = project.get("optional-dependencies", {})
        for line in [
            *project["dependencies"],
            *(line for lines in extras.values() for line in lines),
        ]:
            if not line.startswith(("tokenspeed", *vendors)):
                yield line


def group(name: str) -> list[str]:
    """Return a dependency group of the root pyproject.toml."""
    return list(nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), name))


def wheel(folder: str) -> str:
    """Return the path of a distribution's wheel."""
    (path,) = WHEELS.glob(f"{Path(folder).name.replace('-', '_')}-*.whl")
    return str(path)


def run(session: nox.Session, *command: str, **variables: str | None) -> None:
    """Run a program of an environment that nox did not make."""
    session.run(*command, external=True, env=variables)
