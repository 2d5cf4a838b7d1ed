"""Loading a tokenizer, and the special tokens around a plain prompt."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.text.tokenizer import load_tokenizer


def write(folder: Path, config: dict[str, Any], processor: Any = None) -> Path:
    backend = tokenizers.Tokenizer(
        models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "<s>": 3, "</s>": 4}, "<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor is not None:
        backend.post_processor = processor
    backend.enable_truncation(2)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


BOS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
ENDS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


@pytest.mark.parametrize(
    ("config", "processor", "expected"),
    [
        (ENDS, None, [1, 2, 1]),
        (ENDS, BOS, [3, 1, 2, 1]),
        ({**ENDS, "add_bos_token": True}, None, [1, 2, 1]),
        ({**ENDS, "add_bos_token": False}, BOS, [3, 1, 2, 1]),
    ],
)
def test_plain_prompt_gets_the_post_processors_tokens(
    tmp_path: Path, config: dict[str, Any], processor: Any, expected: list[int]
) -> None:
    tokenizer = load_tokenizer(write(tmp_path, config, processor))
    assert tokenizer.encode("a b a", add_special_tokens=True).tolist() == expected
    assert tokenizer.encode("a b a", add_special_tokens=False).tolist() == [1, 2, 1]


def test_encoding_releases_the_gil(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, ENDS))
    ticks, is_over = [0], threading.Event()

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks[0]
    tokenizer.encode("a b " * 200_000, add_special_tokens=False)
    during = ticks[0] - before
    is_over.set()
    thread.join()
    assert during > 5


def test_special_tokens_have_roles_and_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, ENDS))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.decode([3, 1, 2, 4]) == "a b"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokenizer.model", "only tokenizer.model"),
        ("vocab.json", "only vocab.json"),
        ("readme", "no tokenizer"),
    ],
)
def test_missing_tokenizer_json_error_has_a_hint(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(
        CheckpointError, match=rf"{expected}.*save_pretrained.*--skip-tokenizer-init"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_unreadable_tokenizer_names_its_file(tmp_path: Path, name: str) -> None:
    write(tmp_path, ENDS)
    (tmp_path / name).write_text("[")
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)
