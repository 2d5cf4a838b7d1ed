"""The packaged checkpoint: transformers loads it, and it answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenspeed_demo import CHECKPOINT, DEEPSEEK
from tokenspeed_demo.items import REQUIRED, held_out_set
from tokenspeed_demo.score import is_right, with_transformers

torch = pytest.importorskip("torch", reason="the checkpoint is read by torch")
pytest.importorskip("transformers", reason="the reference is transformers'")

FOLDER = Path(CHECKPOINT.path)


def test_weights_are_bf16_and_tied() -> None:
    from safetensors.torch import load_file

    weights = load_file(FOLDER / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"]


def test_draft_layer_has_the_published_names() -> None:
    from safetensors import safe_open

    with safe_open(Path(DEEPSEEK.path) / "model.safetensors", "pt") as file:
        names = set(file.keys())
    kept = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")
    assert {f"model.layers.4.{name}.weight" for name in kept} <= names
    assert "model.layers.4.mlp.experts.15.down_proj.weight" in names


@pytest.mark.parametrize(
    "num_items", [2, pytest.param(6, marks=pytest.mark.release, id="more items")]
)
def test_most_held_out_items_are_answered_exactly(num_items: int) -> None:
    items = [item for task in REQUIRED for item in held_out_set(task, num_items)]
    texts = with_transformers(FOLDER, "cpu", len(items))(items)
    wrong = [
        (item, text) for item, text in zip(items, texts, strict=True) if not is_right(item, text)
    ]
    assert len(wrong) <= num_items // 2, [(item.task, item.answer, text) for item, text in wrong]


def test_digits_are_tokens_and_words_have_no_space() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.encode("120+7").tokens == ["1", "2", "0", "+", "7"]
    assert not [
        token for token in tokenizer.get_vocab() if token.startswith("Ġ") and token[1:2].isalnum()
    ]
    assert not [
        token for token in tokenizer.get_vocab() if len(token) > 1 and any(map(str.isdigit, token))
    ]


def test_any_text_survives_the_tokenizer() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for text in (
        "naïve 🚀 日本語\r\n\ttabs  ",
        '{"a": [1, 2]}',
        "<think>\nx\n</think>",
        "\x00\x7f",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_only_control_tokens_are_skipped_as_special() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = "<think>\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    assert tokenizer.decode(tokenizer.encode(text + "<|im_end|>").ids) == text
