"""The tokenizer of a checkpoint: its vocabulary, and the special tokens in tokenizer_config.json."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import AddedToken

from tokenspeed_core.api.step import I32
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.files import read_json
from tokenspeed_core.text.byte_level import byte_characters
from tokenspeed_core.text.detokenizer import ByteDetokenizer, Detokenizer, Kind, WindowDetokenizer
from tokenspeed_core.text.patterns import any_of
from tokenspeed_core.text.tiktoken import RANKS, load_tiktoken
from tokenspeed_core.text.user_text import UserTextGuard, cut_at_breaks

V = TypeVar("V")

MAX_PARTS = 16_384  # per text; every part costs interpreter time
MAX_BYTES = 128 * 2**20  # size of the cache of parts
# Overhead of a cache entry, in addition to its characters (up to 4 bytes each) and ids.
ENTRY_BYTES = 512

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


class _Memo(dict[int, V]):
    """A table over token ids, computed on first use, since texts use a small part of a vocabulary."""

    def __init__(self, compute: Callable[[int], V]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> V:
        value = self[token_id] = self._compute(token_id)
        return value


class PartEncoder:
    """Encodes a text in parts, cut before each special token, with an LRU cache of parts.

    A tokenizer splits a text at special tokens first and encodes each piece on its own, so the joined ids
    of the parts equal the ids of the text. Thread-safe.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        marks = _marks(backend.get_added_tokens_decoder().values())
        self._mark = re.compile(any_of(sorted(marks)) if marks else "(?!)")
        # By salt and text, the most recently used last.
        self._kept: OrderedDict[tuple[str, str], I32] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def encode(self, text: str, salt: str) -> I32:
        """Return the ids of a text, int32 [T].

        Salts do not share entries, so that timing does not reveal texts that were encoded with other salts.
        """
        cuts = [0, *(found.start() for found in self._mark.finditer(text)), len(text)]
        if len(cuts) > MAX_PARTS:
            cuts = [0, len(text)]
        parts = [(salt, text[start:end]) for start, end in pairwise(cuts) if start < end] or [
            (salt, text)
        ]
        ids = {part: kept for part in parts if (kept := self._kept.get(part)) is not None}
        new = [part for part in dict.fromkeys(parts) if part not in ids]
        # Only the batch functions of the library release the GIL.
        encodings = self._backend.encode_batch_fast(
            [part for _, part in new], add_special_tokens=False
        )
        ids |= {
            part: np.array(encoding.ids, np.int32)
            for part, encoding in zip(new, encodings, strict=True)
        }
        with self._lock:
            for part in ids:
                if self._kept.pop(part, None) is None:
                    self._num_bytes += _num_bytes(part, ids[part])
                self._kept[part] = ids[part]
            while self._num_bytes > MAX_BYTES:
                self._num_bytes -= _num_bytes(*self._kept.popitem(last=False))
        return np.concatenate([ids[part] for part in parts])


class Tokenizer:
    """Encodes text and decodes tokens. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """`config` is the content of tokenizer_config.json, which names the special tokens."""
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = _named_tokens(config)
        _add_missing(backend, self.special_tokens.values())
        self._parts = PartEncoder(backend)
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
        steps = [step["type"] for step in decoder.get("decoders", [decoder])]
        self._is_byte_level = steps == ["ByteLevel"]
        self._has_byte_fallback = "ByteFallback" in steps
        self._waits_for_bytes = "ByteLevel" in steps
        self._special_ids = {
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._byte_characters = byte_characters()
        self._pieces = _Memo(self.token_bytes)
        self._texts = _Memo(self._whole_text)
        self._pieces_shown = _Memo(lambda i: b"" if i in self._special_ids else self._pieces[i])
        self._texts_shown = _Memo(lambda i: "" if i in self._special_ids else self._texts[i])
        self._alone = _Memo(lambda i: self._decode_window([i]))
        self._kinds = _Memo(self._kind)
        self._kinds_shown = _Memo(
            lambda i: Kind.NOTHING if i in self._special_ids else self._kinds[i]
        )

    @property
    def special_ids(self) -> frozenset[int]:
        """The special tokens, which are not text."""
        return frozenset(self._special_ids)

    def encode(self, text: str, *, add_special_tokens: bool, salt: str = "") -> I32:
        """Return the ids of a text, int32 [T]. Takes about 1 ms per 1,000 new tokens, without the GIL.

        `add_special_tokens` is for plain prompts and adds the tokens of tokenizer.json's post-processor. As in
        transformers 5, it ignores add_bos_token. Chat templates write their own special tokens, and their texts are
        cached in parts by `salt` (`PartEncoder`). Raises TypeError on lone surrogates.
        """
        if not add_special_tokens:
            return self._parts.encode(text, salt)
        # Only the batch functions of the library release the GIL.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=True)
        return np.array(encoding.ids, np.int32)

    def encode_rendered(
        self, text: str, *, add_special_tokens: bool = False, salt: str = ""
    ) -> I32:
        """Return the ids of a rendered chat, int32 [T]; texts of users may have breaks (`UserTextGuard`).

        The ids equal those of `encode` if there is no break.
        """
        pieces = cut_at_breaks(text)
        if len(pieces) == 1:
            return self.encode(text, add_special_tokens=add_special_tokens, salt=salt)
        ids = [self.encode(piece, add_special_tokens=False, salt=salt) for piece in pieces if piece]
        before, after = self._ends() if add_special_tokens else ([], [])
        return np.concatenate([np.array(before, np.int32), *ids, np.array(after, np.int32)])

    def _ends(self) -> tuple[list[int], list[int]]:
        """Return the ids that `add_special_tokens` puts before and after a text."""
        text = "a"
        plain = self.encode(text, add_special_tokens=False).tolist()
        whole = self.encode(text, add_special_tokens=True).tolist()
        starts = range(len(whole) - len(plain) + 1)
        at = next((i for i in starts if whole[i : i + len(plain)] == plain), 0)
        return whole[:at], whole[at + len(plain) :]

    def user_text_guard(self, template: str) -> UserTextGuard:
        """Return the guard against control tokens in texts of users.

        Control tokens are special tokens, and other added tokens that the template writes. Of these others, pairs
        such as `<think>` and `</think>` mark up content and do not count.
        """
        added = {
            token.content: token for token in self._backend.get_added_tokens_decoder().values()
        }
        control = [
            token
            for content, token in added.items()
            if token.special or (content in template and not _is_paired(content, added))
        ]
        is_normalized = any(token.normalized for token in control)
        normalizer = self._backend.normalizer if is_normalized else None
        normalize = None if normalizer is None else normalizer.normalize_str
        return UserTextGuard([token.content for token in control], normalize)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text without special tokens around it. Keeps nothing."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return len(encoding)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all tokens, decoded in one call, mostly without the GIL (see `encode`)."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a detokenizer for one sequence."""
        if self._is_byte_level:
            if skip_special_tokens:
                return ByteDetokenizer(self._pieces_shown, self._texts_shown)
            return ByteDetokenizer(self._pieces, self._texts)
        kinds = self._kinds_shown if skip_special_tokens else self._kinds
        return WindowDetokenizer(self._decode_window, self._alone, kinds, self._waits_for_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text: possibly none, or part of a character."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            codes = [self._byte_characters.get(character) for character in token]
            return (
                token.encode()
                if None in codes
                else bytes(code for code in codes if code is not None)
            )
        if self._kinds[token_id] is Kind.BYTE:
            return bytes([int(token[3:5], 16)])
        return self._decode_window([token_id, token_id])[len(self._alone[token_id]) :].encode()

    def _decode_window(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _whole_text(self, token_id: int) -> str | None:
        """Return the text of a token, or None if its bytes are not whole characters."""
        try:
            return self._pieces[token_id].decode()
        except UnicodeDecodeError:
            return None

    def _kind(self, token_id: int) -> Kind:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return Kind.NOTHING
        is_byte = (
            self._has_byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">"
        )
        return Kind.BYTE if is_byte else Kind.TEXT


def _num_bytes(part: tuple[str, str], ids: I32) -> int:
    return ENTRY_BYTES + 4 * sum(map(len, part)) + ids.nbytes


def _is_paired(content: str, added: Collection[str]) -> bool:
    opening = content.replace("</", "<", 1)
    return opening in added and opening.replace("<", "</", 1) in added


def _marks(tokens: Collection[AddedToken]) -> list[str]:
    """Return the special tokens that split any text, independent of the characters around them."""
    found_first = [token for token in tokens if not token.normalized]
    contents = {token.content for token in found_first}
    whole = "\0".join(contents)
    ends = {each[at:] for each in contents for at in range(len(each))}
    # A single-word token depends on the characters around it, which may be in the next part.
    if any(token.single_word for token in found_first):
        return []
    marks = []
    for token in found_first:
        starts = (token.content[:length] for length in range(1, len(token.content)))
        is_inside_another = whole.count(token.content) > 1
        overlaps_another = any(start in ends for start in starts)
        if token.special and not (token.lstrip or is_inside_another or overlaps_another):
            marks.append(token.content)
    return marks


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by role. In older files they are objects."""
    given = ((name, config.get(name)) for name in _NAMED_TOKENS)
    named = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in given
    }
    return {name: token for name, token in named.items() if isinstance(token, str)}


def _add_missing(backend: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Make all named tokens special, as transformers does."""
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    missing = [token for token in dict.fromkeys(tokens) if token not in special]
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in missing]
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory: tokenizer.json, or else tiktoken.model. Raises CheckpointError."""
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself for any bad file
            raise CheckpointError(f"cannot read {file}: {error}") from error
        return Tokenizer(backend, config)
    if (folder / RANKS).is_file():
        return Tokenizer(load_tiktoken(folder, config), config)
    other = next(
        (name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()), None
    )
    found = f"only {other}, another format" if other else "no tokenizer"
    raise CheckpointError(
        f"{folder} has {found}; tokenizer.json is needed. Write one with transformers "
        f"(AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(...)), point --tokenizer at a "
        "directory that has one, or serve token ids only with --skip-tokenizer-init."
    )
