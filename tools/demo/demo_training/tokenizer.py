"""A byte-level BPE tokenizer trained on generated conversations.

Words never carry the space before them and every digit is its own token, so that a word or a number
has the same tokens everywhere in a text. The model can then copy token by token and add digit by digit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenspeed_demo.render import END_OF_TURN, TEMPLATE, Renderer

from .tasks import TrainingItems

END_OF_TEXT = "<|endoftext|>"
# Only the markers of turns are special, so that skipping special tokens keeps tool calls.
CONTROL = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_PIECES = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"


def _texts(seed: int, num_items: int) -> Iterator[str]:
    stream, renderer = TrainingItems(f"{seed} tokenizer"), Renderer()
    for _ in range(num_items):
        item = stream.next()
        yield renderer.prompt(item) + renderer.completion(item)


def train_tokenizer(seed: int, vocab_size: int, num_items: int) -> Tokenizer:
    """Return a tokenizer of exactly `vocab_size` tokens; control tokens and marks come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*CONTROL, *MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_items), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"asked for {vocab_size} tokens, the data gave {tokenizer.get_vocab_size()}"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    (folder / "tokenizer.json").write_text(
        json.dumps(state, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": ["<|im_start|>", END_OF_TURN],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    target = folder / TEMPLATE.name
    if target.resolve() != TEMPLATE:
        target.write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
