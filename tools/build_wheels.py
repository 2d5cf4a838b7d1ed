"""Build the wheel of each distribution, all in one process: `build_wheels.py OUTPUT FOLDER...`."""

from __future__ import annotations

import sys
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder


def main(output: str, *folders: str) -> None:
    """Build a wheel for each folder that has a pyproject.toml."""
    Path(output).mkdir(parents=True, exist_ok=True)
    for folder in folders:
        for path in WheelBuilder(str(Path(folder).resolve())).build(
            directory=str(Path(output).resolve()), versions=["standard"]
        ):
            print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
