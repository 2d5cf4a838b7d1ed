"""`tokenspeed env`: versions, machine and plugins, for bug reports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from typing import Annotated, Any

import typer

from tokenspeed_core import __version__
from tokenspeed_core.commands import Catalog
from tokenspeed_plugin_tools.listing import table

LIBRARIES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "pydantic",
    "uvicorn",
    "pyzmq",
    "msgspec",
    "pluggy",
    "typer",
)
SECRETS = frozenset({"KEY", "TOKEN", "SECRET", "PASSWORD"})


def describe(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Print versions, the machine and the installed plugins."""
    catalog = Catalog.discover(check=False)
    facts = {
        "tokenspeed": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs, {_memory()}",
        "libraries": {name: _version(name) for name in LIBRARIES},
        "accelerators": _accelerators(),
        "environment": _environment(),
    }
    if as_json:
        plugins = [
            f"{e.kind} {e.name} {e.distribution} {e.version} {e.status} {e.reason}".strip()
            for e in catalog.all()
        ]
        typer.echo(json.dumps({**facts, "plugins": plugins, "digest": catalog.digest()}, indent=2))
        return 0
    for name, value in facts.items():
        typer.echo(f"{name + ':':<14} {_inline(value)}")
    typer.echo(f"{'plugins:':<14} {catalog.digest()}\n\n{table(catalog.all())}")
    return 0


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items()) or "none"
    return ", ".join(value) or "none" if isinstance(value, list) else str(value)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _memory() -> str:
    import psutil

    return f"{psutil.virtual_memory().total / 2**30:.1f} GiB"


def _accelerators() -> list[str]:
    """Return the GPUs that torch finds, or why there are none."""
    if importlib.util.find_spec("torch") is None:
        return ["unknown: torch is not installed"]
    try:
        import torch
    except (ImportError, OSError) as error:
        return [f"unknown: torch fails to import: {error}"]
    if not torch.cuda.is_available():
        return [
            f"none (torch is built for CUDA {torch.version.cuda})" if torch.version.cuda else "none"
        ]
    found = []
    for index in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(index)
        found.append(
            f"{each.name} (sm_{each.major}{each.minor}, {each.total_memory / 2**30:.0f} GiB)"
        )
    return [*found, f"CUDA {torch.version.cuda}"]


def _environment() -> dict[str, str]:
    """Return the environment variables that affect TokenSpeed, with secrets masked."""
    return {
        name: "***" if SECRETS & set(name.split("_")) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(("TOKENSPEED_", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE"))
    }
