"""Streaming text equals decoding everything at once, for every kind of vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tokenspeed_core.text.tokenizer import Tokenizer

TEXTS = [
    "hello world, it is a fine day",
    "naïve café — déjà vu",
    "日本語のテキスト",
    "🙂👩‍👩‍👧 emoji 🎉",
    "a  b   c\n\n\td",
]
SPECIAL = ["<|end|>", "<s>"]


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    backend.add_tokens([AddedToken(" added token ", special=False)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "<|end|>"})


def metaspace() -> Tokenizer:
    letters = ["▁", "▁hello", "▁a", "b", "▁é", "lo", ".", "�"]
    words = ["<unk>", *SPECIAL, *[f"<0x{i:02X}>" for i in range(256)], *letters]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend, {"bos_token": "<s>"})


def words() -> Tokenizer:
    vocab = {word: i for i, word in enumerate(["<unk>", *SPECIAL, *(f"w{i}" for i in range(60))])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return Tokenizer(backend, {})


def pieces() -> Tokenizer:
    vocab = [
        ("<unk>", 0.0),
        ("▁the", -1.0),
        ("▁", -2.0),
        ("cat", -2.0),
        ("▁日本", -3.0),
        ("s", -3.0),
    ]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, {})


KINDS = {
    "byte-level": byte_level(),
    "byte-fallback": metaspace(),
    "words": words(),
    "metaspace": pieces(),
}


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_joined_deltas_equal_the_whole_text(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer._backend.get_vocab_size() + 2), max_size=24))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    for bounds in ([0, *cuts, len(ids)], list(range(len(ids) + 1))):
        assert "".join(stream(tokenizer, ids, bounds, skip)) == whole


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], bounds: Sequence[int], skip: bool
) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    parts = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*parts, detokenizer.flush()]


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@given(text=st.text(max_size=20))
@settings(max_examples=70, deadline=None)
def test_deltas_of_valid_text_hold_no_replacement_character(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    text = text.replace("�", "").replace("<", "")
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert "�" not in "".join(stream(tokenizer, ids, list(range(len(ids) + 1)), True))


def test_byte_level_token_is_decoded_at_once() -> None:
    tokenizer = KINDS["byte-level"]
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("hello world", add_special_tokens=False).tolist()
    assert all(detokenizer.push([token_id]) for token_id in ids)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_token_bytes_join_to_characters(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("§", add_special_tokens=False).tolist()
    assert len(ids) > 1
    assert b"".join(tokenizer.token_bytes(i) for i in ids).strip() == "§".encode()


def test_token_keeps_its_leading_space() -> None:
    tokenizer = KINDS["byte-fallback"]
    assert tokenizer.token_bytes(tokenizer._backend.token_to_id("▁hello") or 0) == b" hello"
    assert KINDS["words"].token_bytes(5) == b" w2"
