"""The installed package: its entry point, files and imports."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from tokenspeed_demo import CHECKPOINT


def test_import_loads_no_tensor_library() -> None:
    code = "import sys, tokenspeed_demo; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_entry_point_names_the_checkpoint() -> None:
    (entry,) = entry_points(group="tokenspeed.checkpoints", name="demo")
    assert entry.extras == ["api1"]
    assert entry.load() == CHECKPOINT


def test_checkpoint_has_all_hugging_face_files() -> None:
    present = {path.name for path in Path(CHECKPOINT.path).iterdir()}
    assert present >= {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_weights_are_at_most_12_megabytes() -> None:
    assert (Path(CHECKPOINT.path) / "model.safetensors").stat().st_size <= 12_000_000
