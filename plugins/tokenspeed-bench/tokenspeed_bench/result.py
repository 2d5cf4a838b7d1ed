"""A result: one JSON object with the figures and everything needed to repeat them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenspeed_bench.baselines import rows_of

SCHEMA = 1
LIBRARIES = (
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "pydantic",
    "uvicorn",
    "pyzmq",
    "flashinfer-python",
    "flashinfer-jit-cache",
    "flash-attn-3",
    "sgl-deep-gemm",
    "deep-gemm",
)
OURS, GROUPS = "tokenspeed-", "tokenspeed."
SECRETS = ("api_key",)
SECONDS_TO_ASK = 10  # for the programs that know the device and the commit


def new(kind: str, model: str, shape: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result without runs. `kind` is "offline" or "serve"; `settings` are the given flags."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["tokenspeed", *_without_key(sys.argv[1:])],
        "model": model,
        "shape": shape,
        "settings": {name: value for name, value in settings.items() if name not in SECRETS},
        "device": None,
        "gpus": _gpus(),
        "machine": machine(),
        "versions": versions(),
        "commit": _commit(),
        "environment": _environment(),
        "kernel_plan": None,
        "backends": None,
        "is_interrupted": False,
        "runs": [],
    }


def add_plan(result: dict[str, Any], plan: Mapping[str, Any]) -> None:
    """Add a kernel plan, and the backends in use by op family."""
    backends: dict[str, list[str]] = {}
    for op in plan["ops"]:
        names = backends.setdefault(op["family"], [])
        if op["backend"] and op["backend"] not in names:
            names.append(op["backend"])
    result["kernel_plan"], result["backends"] = dict(plan), backends
    result["device"] = plan["platform"]


def add_run(
    result: dict[str, Any], traffic: Mapping[str, Any], figures: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Add a run with its known lower bounds, and return it."""
    run: dict[str, Any] = {"traffic": dict(traffic), "figures": dict(figures), **more}
    run["floors"] = {
        row.metric: {"floor": round(row.floor, 3), "ratio": row.ratio(figures[row.metric])}
        for row in rows_of(result, run)
        if row.floor is not None
    }
    result["runs"].append(run)
    return run


def runs_of(result: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield every run with the result that contains it; a result of `anchors` contains others."""
    for part in result.get("results", (result,)):
        for run in part["runs"]:
            yield part, run


def is_traffic(run: Mapping[str, Any]) -> bool:
    """Return whether a run is traffic, not the start or the first request."""
    return run["traffic"]["name"] not in ("start", "first")


def has_traffic(result: Mapping[str, Any]) -> bool:
    """Return whether any traffic was measured."""
    return any(is_traffic(run) for _, run in runs_of(result))


def versions() -> dict[str, str]:
    """Return the versions of Python, our distributions, other plugins, and relevant libraries."""
    found = {"python": platform.python_version()}
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"]).lower().replace("_", "-")
        is_plugin = any(entry.group.startswith(GROUPS) for entry in distribution.entry_points)
        if is_plugin or name.startswith(OURS) or name in LIBRARIES:
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def machine() -> str:
    """Return the number and name of the CPUs, and the operating system."""
    model = platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.is_file():
        lines = cpus.read_text(errors="replace").splitlines()
        model = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
            model,
        )
    return f"{os.cpu_count()} CPUs, {model}, {platform.system()} {platform.release()}"


def _environment() -> dict[str, str]:
    """Return the environment variables that affect TokenSpeed, without the key."""
    secrets = {f"TOKENSPEED_{name.upper()}" for name in SECRETS}
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("TOKENSPEED_") and name not in secrets
    }


def _gpus() -> str | None:
    """Return the GPUs that the driver reports, or None without a driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    output = _ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return (
        "; ".join(
            f"{name} (driver {driver})"
            for name, _, driver in (line.partition(", ") for line in (output or "").splitlines())
        )
        or None
    )


def _commit() -> str | None:
    """Return the commit of the checkout, with "+" if files were changed."""
    folder = str(Path(__file__).parent)
    commit = _ask("git", "-C", folder, "rev-parse", "--short", "HEAD")
    tracked = commit and _ask("git", "-C", folder, "ls-files", "--error-unmatch", __file__)
    if not commit or not tracked:
        return None
    return commit + (
        "+" if _ask("git", "-C", folder, "status", "--short", "--untracked-files=no") else ""
    )


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_TO_ASK, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _without_key(words: list[str]) -> list[str]:
    """Return a command line with the API key masked."""
    masked, hides = [], False
    for word in words:
        masked.append(
            "***" if hides else "--api-key=***" if word.startswith("--api-key=") else word
        )
        hides = word == "--api-key"
    return masked
