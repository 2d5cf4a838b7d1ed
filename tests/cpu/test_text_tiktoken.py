"""Tokenizers from tiktoken.model: ids equal those of transformers' converter, and streamed text the whole text."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter

from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.text.byte_level import byte_characters
from tokenspeed_core.text.split_pattern import MAX_SOURCE_CHARS, read_split_pattern
from tokenspeed_core.text.tokenizer import Tokenizer, load_tokenizer

PARTS = [
    r"[\p{Han}]+",
    r"[^\s\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'ll)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s+(?!\S)",
    r"\s+",
]
PATTERN = "|".join(PARTS)
# The imported packages are not installed, and the pattern is inside a class.
SOURCE = f"""
import no_such_package

raise SystemExit("the source must not run")

class TiktokenTokenizer(no_such_package.PreTrainedTokenizer):
    "A docstring with an escape: \\d"

    pat_str = "|".join({PARTS!r})
"""
TEXTS = [
    "",
    "hello world,  hello   worlds \n\n\t and more ",
    "it's IT'S they'll THEY'LL don't",
    "1 12 123 1234567 3.14159 ²٣٤",
    "中文分词是自然语言处理。中文English混合 12汉字漢字",
    "def f(x: int) -> str:\n    return f'{x!r}'  # done\r\n",
    "naïve e\u0301 ﬁ 🙂👩\u200d👩\u200d👧 \u00a0\u3000\u2028",
]


def trained() -> dict[bytes, int]:
    """Return the ranks of a byte-level BPE that was trained on the texts."""
    backend = tokenizers.Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    to_byte = byte_characters()
    return {
        bytes(to_byte[character] for character in name): rank
        for name, rank in backend.get_vocab().items()
    }


RANKS = trained()
# Ids after the last rank, with a gap.
BOS, END, CALL = len(RANKS), len(RANKS) + 1, len(RANKS) + 5
ADDED = {
    str(BOS): {"content": "<s>", "special": True, "normalized": False},
    str(END): {"content": "<|end|>", "special": True, "normalized": False},
    str(CALL): {"content": "<call>", "special": False, "normalized": False},
}
CONFIG: dict[str, Any] = {"bos_token": "<s>", "eos_token": "<|end|>", "added_tokens_decoder": ADDED}


def lines(ranks: dict[bytes, int]) -> str:
    return "".join(f"{b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())


def write(
    folder: Path, *, ranks: str = lines(RANKS), source: str | None = SOURCE, **config: Any
) -> Path:
    (folder / "tiktoken.model").write_text(ranks)
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    if source is not None:
        (folder / "tokenization_tiny.py").write_text(source)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("tiktoken")))


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    """Return the tokenizer of transformers' converter, without the package tiktoken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TikTokenConverter, "load_tiktoken_bpe", staticmethod(lambda _: RANKS))
        converter = TikTokenConverter("", PATTERN, extra_special_tokens=["<s>", "<|end|>"])
        return converter.converted()


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
    return ids


def check_round_trip(tokenizer: Tokenizer, ids: list[int], text: str) -> None:
    """Check that decoding returns the text, at once and token by token."""
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    streamed = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join([*streamed, detokenizer.flush()]) == text


@pytest.mark.parametrize("text", [*TEXTS, "".join(TEXTS), "<s>hi<|end|>中文<|end|> <|end"])
def test_ids_equal_transformers(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    ids = encode(tokenizer, text)
    assert ids == reference.encode(text).ids
    assert tokenizer.encode(text, add_special_tokens=True).tolist() == ids
    check_round_trip(tokenizer, ids, text)


PIECES = st.one_of(st.text(), st.sampled_from([*TEXTS, "<s>", "<|end|>", "<|end", "'S", " "]))


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join))
def test_any_text_equals_transformers(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    ids = encode(tokenizer, text)
    assert ids == reference.encode(text).ids
    check_round_trip(tokenizer, ids, text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, CALL), max_size=20))
def test_any_tokens_stream_like_a_whole_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    for skip in (False, True):
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
        streamed = [detokenizer.push([token_id]) for token_id in ids]
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join([*streamed, detokenizer.flush()]) == whole


def test_added_tokens_keep_their_ids_and_kinds(tokenizer: Tokenizer) -> None:
    text = "<s>hello<call>x<|end|>"
    ids = encode(tokenizer, text)
    assert [token_id for token_id in ids if token_id >= BOS] == [BOS, CALL, END]
    assert tokenizer.decode(ids) == "hello<call>x"
    assert tokenizer.special_ids == {BOS, END}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert tokenizer.token_bytes(CALL) == b"<call>"
    assert tokenizer.token_bytes(CALL - 1) == b""


def test_whole_piece_is_looked_up_before_merging(tmp_path: Path) -> None:
    # No two tokens make this one, so merges do not reach it.
    ranks = {**{bytes([byte]): byte for byte in range(256)}, b"unreachable": 256}
    config = {"added_tokens_decoder": {}, "bos_token": None, "eos_token": None}
    tokenizer = load_tokenizer(write(tmp_path, ranks=lines(ranks), **config))
    assert encode(tokenizer, "unreachable") == [256]
    assert len(encode(tokenizer, "unreachably")) == len("unreachably")


def test_tokenizer_json_takes_precedence(tmp_path: Path) -> None:
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    assert encode(load_tokenizer(write(tmp_path, source=None, bos_token=None)), "a") == [0]


@pytest.mark.parametrize(
    "source",
    [
        "pat_str = 'a|b'",
        "class A:\n    pat_str: str\n    pat_str: str = r'a' r'|b'",
        "class A:\n    pat_str = '|'.join(('a', 'b'))",
        "class A:\n    pat_str = 'a' + '|' + 'b'\n    pat_str = 'other'",
    ],
)
def test_pattern_is_read_from_constants(tmp_path: Path, source: str) -> None:
    assert read_split_pattern(write(tmp_path, source=source)) == "a|b"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, r"no tokenization_\*\.py that assigns pat_str"),
        ("other = 'a'", r"no tokenization_\*\.py that assigns pat_str"),
        ("def f():\n    pat_str = g()", "tokenization_tiny.py, line 2: pat_str is not a constant"),
        ("pat_str = ','.join(['a', 'b'])", "pat_str is not a constant"),
        ("pat_str = b'a'", "pat_str is not a constant"),
        ("pat_str = " + "+".join(["'a'"] * 50_000), "tokenization_tiny.py"),
        ("#" * (MAX_SOURCE_CHARS + 1), "more than"),
        ("pat_str = (", "cannot read .*tokenization_tiny.py"),
        ("pat_str = 'a\0'", "cannot read .*tokenization_tiny.py"),
        ("pat_str = '(a'", "not a regular expression"),
        (r"pat_str = r'\p{N}{1,3}+|\s+'", r"\{1,3\}\+"),
        (r"pat_str = r'\s+$'", r"'\$'"),
        (r"pat_str = r'^a|[^\s]+'", r"'\^'"),
    ],
)
def test_bad_pattern_is_refused(tmp_path: Path, source: str | None, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected) as caught:
        load_tokenizer(write(tmp_path, source=source))
    assert "\n" not in str(caught.value)


BYTES = lines({bytes([byte]): byte for byte in range(256)})


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ("", "256 of the 256 bytes"),
        (BYTES[: BYTES.rindex("\n", 0, -1) + 1], "1 of the 256 bytes"),
        (BYTES + "YWI=\n", "line 257"),
        (BYTES + "YWI= x\n", "line 257"),
        (BYTES + "\n*** 256\n", "line 258"),
        (BYTES + "YWI= 255\n", "appears twice"),
        (BYTES + "YWI= 256\nYWI= 257\n", "appears twice"),
        (BYTES + "YWI= -1\n", "line 257"),
        (BYTES + "YWI= 99999999999\n", "line 257"),
        ("ÿ 1\n", "line 1"),
    ],
)
def test_broken_ranks_are_refused(tmp_path: Path, ranks: str, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected) as caught:
        load_tokenizer(write(tmp_path, ranks=ranks))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (None, "has no added_tokens_decoder"),
        ({"x": {"content": "<s>"}}, "entry 'x'"),
        ({"-1": {"content": "<s>"}}, "entry '-1'"),
        ({"900": {"content": 1}}, "entry '900'"),
        ({"900": {}}, "entry '900'"),
        ({"900": "<s>"}, "entry '900'"),
        ({"3": {"content": "<s>"}}, "repeats tokens or ids"),
        ({"900": {"content": "!"}}, "repeats tokens or ids"),
        ({"900": {"content": "<s>"}, "901": {"content": "<s>"}}, "repeats tokens or ids"),
    ],
)
def test_bad_added_tokens_are_refused(tmp_path: Path, added: Any, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected) as caught:
        load_tokenizer(write(tmp_path, added_tokens_decoder=added))
    assert "tokenizer_config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
