"""Time `--help` and `plugins list` with many installed plugins.

    python benchmarks/plugin_startup.py --plugins 0 30 100

The plugins are generated, each with a kernel and a command. Prints medians of wall-clock seconds, process start
included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = (
    ("--help",),
    ("plugins", "list"),
    ("plugins", "list", "--json"),
    ("serve", "--help"),
    ("--version",),
)
DESCRIPTOR = """from tokenspeed_core.api import Capability, KernelSpec
SPEC = KernelSpec(op="attention", backend="{name}/attention", capability=Capability(("cuda",), ("bfloat16",)),
                  load="{module}.kernel:make")
def run(words):
    return 0
"""


def install(site: Path, number: int) -> None:
    """Write a distribution as pip installs it: a package, its metadata and its RECORD."""
    name, module = f"stranger-{number}", f"stranger_{number}"
    (site / module).mkdir(parents=True)
    (site / module / "__init__.py").write_text(DESCRIPTOR.format(name=name, module=module))
    (site / module / "kernel.py").write_text("import torch\n")
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: tokenspeed-core<0.3,>=0.1\n"
    )
    (info / "entry_points.txt").write_text(
        f"[tokenspeed.kernels.attention]\n{name}/attention = {module}:SPEC [api1]\n"
        f"[tokenspeed.commands]\n{name} = {module}:run [api1]\n"
    )
    (info / "RECORD").write_text(
        f"{module}/__init__.py,,\n{module}/kernel.py,,\n{info.name}/METADATA,,\n"
    )


def seconds(site: Path, words: tuple[str, ...]) -> float:
    """Return the wall-clock time of a command. Raises CalledProcessError."""
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-P", "-m", "tokenspeed_core.cli", *words],
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - begin


def main() -> None:
    """Measure every command with every number of plugins, without the first run of each, which fills caches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plugins", type=int, nargs="+", default=[0, 30], help="numbers of plugins"
    )
    parser.add_argument("--repeats", type=int, default=15, help="runs of each command")
    arguments = parser.parse_args()
    for num_plugins in arguments.plugins:
        with tempfile.TemporaryDirectory() as name:
            for number in range(num_plugins):
                install(Path(name), number)
            for words in COMMANDS:
                runs = [seconds(Path(name), words) for _ in range(arguments.repeats + 1)][1:]
                figures = {
                    "median_s": round(statistics.median(runs), 3),
                    "worst_s": round(max(runs), 3),
                }
                print(
                    json.dumps({"plugins": num_plugins, "command": " ".join(words), **figures}),
                    flush=True,
                )


if __name__ == "__main__":
    main()
