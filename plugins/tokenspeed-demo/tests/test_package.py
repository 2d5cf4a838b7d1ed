"""What an installed tokenspeed-demo offers, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from tokenspeed_demo import CHECKPOINT


def test_importing_the_package_imports_no_tensor_library() -> None:
    code = "import sys, tokenspeed_demo; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_entry_point_leads_to_the_packaged_checkpoint() -> None:
    (entry,) = entry_points(group="tokenspeed.checkpoints", name="demo")
    assert entry.extras == ["api1"]
    assert entry.load() == CHECKPOINT


def test_the_checkpoint_holds_every_file_of_the_hugging_face_format() -> None:
    present = {path.name for path in Path(CHECKPOINT.path).iterdir()}
    assert present >= {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_weights_stay_within_twelve_megabytes() -> None:
    assert (Path(CHECKPOINT.path) / "model.safetensors").stat().st_size <= 12_000_000
