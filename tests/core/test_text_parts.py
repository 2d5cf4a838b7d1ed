"""A text encoded in parts has the ids of the whole text, and cached parts are not encoded again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers

from tokenspeed_core.text import tokenizer as module
from tokenspeed_core.text.patterns import any_of
from tokenspeed_core.text.tokenizer import Tokenizer

TEXT = "hello world, how are you? I am fine. <turn> </turn> <think> 12 34 \n\n  HÉLLO thére 🙂"
# Special tokens of real models, and ones that overlap, strip whitespace or depend on their neighbors.
ADDED = (
    AddedToken("<turn>", special=True, normalized=False),
    AddedToken("</turn>", special=True, normalized=False),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("ow", special=False, normalized=True),
    AddedToken("<l>", special=True, normalized=False, lstrip=True),
    AddedToken("<r>", special=True, normalized=False, rstrip=True),
    AddedToken("<n>", special=True, normalized=True),
    AddedToken(" <s>", special=True, normalized=False),
    AddedToken("<in>", special=True, normalized=False),
    AddedToken("<out<in>>", special=False, normalized=False),
    AddedToken("<ab", special=True, normalized=False),
    AddedToken("b>", special=True, normalized=False),
    AddedToken("xyx", special=True, normalized=False),
    AddedToken("[INST]", special=True, normalized=False),
)
PIECES = [
    *(token.content for token in ADDED),
    "<turn",
    "turn>",
    "<out<in>",
    "<ab>",
    "xyxyx",
    " ",
    "  ",
    "\n",
    "\n\n",
    "hello",
    "world",
    "HÉLLO",
    "é",
    "🙂",
    "12",
    "how",
    "'s",
    ",",
    "?!",
    "▁",
    "<",
    ">",
]


def byte_level(add_prefix_space: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
    )
    return backend


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False),
    )
    return backend


def prepending() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False),
    )
    return backend


def word_pieces() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    backend.train_from_iterator(
        [TEXT] * 3,
        trainers.WordPieceTrainer(vocab_size=150, special_tokens=["<unk>"], show_progress=False),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<unk> $A <unk>", special_tokens=[("<unk>", 0)]
    )
    return backend


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.train_from_iterator(
        [TEXT] * 3,
        trainers.UnigramTrainer(
            vocab_size=80, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )
    return backend


BACKENDS = {
    "bytes": byte_level(add_prefix_space=False),
    "bytes, a space first": byte_level(add_prefix_space=True),
    "metaspace, first": metaspace("first"),
    "metaspace, always": metaspace("always"),
    "Llama 2": prepending(),
    "word pieces": word_pieces(),
    "unigram": unigram(),
}
for each in BACKENDS.values():
    each.add_tokens(list(ADDED))
KEPT = {name: Tokenizer(backend, {}) for name, backend in BACKENDS.items()}


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_ids_match_the_library(name: str, text: str) -> None:
    expected = BACKENDS[name].encode(text, add_special_tokens=False).ids
    for _ in range(2):
        assert KEPT[name].encode(text, add_special_tokens=False).tolist() == expected


def test_single_word_tokens_disable_splitting() -> None:
    backend = byte_level(add_prefix_space=False)
    backend.add_tokens(
        [
            AddedToken("bot", special=True, single_word=True, normalized=False),
            AddedToken("END", special=True, normalized=False),
        ]
    )
    tokenizer = Tokenizer(backend, {})
    for text in ("the botEND", "the bot END", "END bot"):
        assert tokenizer.encode(text, add_special_tokens=False).tolist() == backend.encode(text).ids


@settings(deadline=None)
@given(
    st.sets(st.text("<|ab>é", min_size=1, max_size=5), max_size=40), st.text("<|ab>é", max_size=60)
)
def test_all_special_tokens_are_found(marks: set[str], text: str) -> None:
    marks = {
        mark
        for mark in marks
        if not any(other != mark and mark.startswith(other) for other in marks)
    }
    if marks:
        plain = "|".join(map(re.escape, marks))
        assert re.findall(any_of(sorted(marks)), text) == re.findall(plain, text)


def test_text_is_cut_before_special_tokens() -> None:
    marks = module._marks(list(BACKENDS["bytes"].get_added_tokens_decoder().values()))
    assert sorted(marks) == [" <s>", "</turn>", "<ab", "<r>", "<turn>", "[INST]"]


class Spy:
    """A tokenizer that records the encoded texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return BACKENDS["bytes"].get_added_tokens_decoder()

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool) -> Any:
        self.texts += texts
        return BACKENDS["bytes"].encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def spied() -> tuple[Spy, module.PartEncoder]:
    spy: Any = Spy()
    return spy, module.PartEncoder(spy)


def test_earlier_turns_are_cached_per_salt() -> None:
    spy, encoder = spied()
    encoder.encode("<turn>one</turn>\n<turn>two</turn>\n", "")
    assert spy.texts == ["<turn>one", "</turn>\n", "<turn>two"]
    spy.texts.clear()
    encoder.encode("<turn>one</turn>\n<turn>two</turn>\n<turn>three", "")
    assert spy.texts == ["<turn>three"]
    spy.texts.clear()
    encoder.encode("<turn>one", "a tenant's own")
    assert spy.texts == ["<turn>one"]


def test_least_recently_used_parts_are_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_tokens = len(BACKENDS["bytes"].encode("<turn>a", add_special_tokens=False).ids)
    monkeypatch.setattr(
        module, "MAX_BYTES", 3 * (module.ENTRY_BYTES + 4 * (len("<turn>a") + num_tokens))
    )
    spy, encoder = spied()
    for text in ("<turn>a", "<turn>b", "<turn>c", "<turn>a", "<turn>d"):
        encoder.encode(text, "")
    assert [text for _, text in encoder._kept] == ["<turn>c", "<turn>a", "<turn>d"]
    assert spy.texts == ["<turn>a", "<turn>b", "<turn>c", "<turn>d"]
    assert encoder._num_bytes == module.MAX_BYTES
    long = "<turn>" + "a" * 1000
    assert (
        encoder.encode(long, "").tolist()
        == BACKENDS["bytes"].encode(long, add_special_tokens=False).ids
    )
    assert (encoder._kept, encoder._num_bytes) == ({}, 0)


def test_text_of_many_special_tokens_is_encoded_whole() -> None:
    spy, encoder = spied()
    text = "<turn>" * module.MAX_PARTS
    assert len(encoder.encode(text, "")) == module.MAX_PARTS
    assert spy.texts == [text]


def test_threads_share_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 40 * module.ENTRY_BYTES)
    _, encoder = spied()
    texts = [f"<turn>{i % 70}</turn>\n<turn>{i % 50}" for i in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: encoder.encode(text, "").tolist(), texts))
    assert found == [
        each.ids for each in BACKENDS["bytes"].encode_batch(texts, add_special_tokens=False)
    ]
    assert (
        encoder._num_bytes
        == sum(module._num_bytes(*each) for each in encoder._kept.items())
        <= module.MAX_BYTES
    )
