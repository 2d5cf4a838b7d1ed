"""The installed package: its entry point, files and imports."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tokenspeed_demo import CHECKPOINT, DEEPSEEK, EAGLE3

from tokenspeed_core.api import Checkpoint


def test_import_loads_no_tensor_library() -> None:
    code = "import sys, tokenspeed_demo; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


both = pytest.mark.parametrize("checkpoint", [CHECKPOINT, DEEPSEEK], ids=lambda each: each.name)

every = pytest.mark.parametrize(
    "checkpoint", [CHECKPOINT, DEEPSEEK, EAGLE3], ids=lambda each: each.name
)


@every
def test_entry_point_names_the_checkpoint(checkpoint: Checkpoint) -> None:
    (entry,) = entry_points(group="tokenspeed.checkpoints", name=checkpoint.name)
    assert entry.extras == ["api1"]
    assert entry.load() == checkpoint


@both
def test_checkpoint_has_all_hugging_face_files(checkpoint: Checkpoint) -> None:
    present = {path.name for path in Path(checkpoint.path).iterdir()}
    assert present >= {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@both
def test_weights_are_at_most_16_megabytes(checkpoint: Checkpoint) -> None:
    assert (Path(checkpoint.path) / "model.safetensors").stat().st_size <= 16_000_000


def test_draft_head_has_the_files_of_a_published_one() -> None:
    folder = Path(EAGLE3.path)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").stat().st_size <= 3_000_000
