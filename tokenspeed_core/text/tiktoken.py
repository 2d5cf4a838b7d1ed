"""Reads tiktoken vocabularies: tokens and their ranks in tiktoken.model, merged in the order of ranks."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.files import read_text
from tokenspeed_core.text.byte_level import byte_characters
from tokenspeed_core.text.split_pattern import read_split_pattern

RANKS = "tiktoken.model"
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tiktoken(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Load tiktoken.model as a byte-level BPE. Takes about 1 s for 160,000 tokens. Raises CheckpointError.

    `config` is the content of tokenizer_config.json. Its `added_tokens_decoder` has the added tokens by id; ids
    without an entry are not tokens, and have no text.
    """
    file = folder / RANKS
    ranks = _read_ranks(file)
    added = _added_tokens(folder, config)
    pattern = read_split_pattern(folder)
    # The strings that represent the tokens in a byte-level vocabulary.
    characters = {byte: character for character, byte in byte_characters().items()}
    names = {rank: token.decode("latin-1").translate(characters) for token, rank in ranks.items()}
    vocabulary = {name: rank for rank, name in names.items()}
    # The library numbers added tokens without gaps, unless they are in the vocabulary.
    vocabulary |= {token.content: token_id for token_id, token in added.items()}
    if len(vocabulary) < len(ranks) + len(added) or not added.keys().isdisjoint(names):
        raise CheckpointError(
            f"{folder}/tokenizer_config.json repeats tokens or ids of {RANKS} in added_tokens_decoder"
        )
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"{folder}: pat_str is not a regular expression: {error}") from error
    merges = [(names[left], names[right]) for left, right in _merges(ranks)]
    # tiktoken looks up a whole piece before it merges.
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token in added.values() if token.special])
    backend.add_tokens([token for token in added.values() if not token.special])
    return backend


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Return the rank of each token, which is its id. A line has a token in base64 and its rank."""
    ranks: dict[bytes, int] = {}
    num_tokens = 0
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = _token_id(rank)
        except ValueError as error:
            raise CheckpointError(
                f"cannot read {file}: line {number} is not a token in base64 and its rank"
            ) from error
        num_tokens += 1
    if len(set(ranks.values())) < num_tokens:
        raise CheckpointError(f"cannot read {file}: a token or a rank appears twice")
    num_missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if num_missing:
        raise CheckpointError(f"cannot read {file}: {num_missing} of the 256 bytes are not tokens")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[int, int]]:
    """Return the ranks of all pairs of tokens that make a token, in the order of its rank, then of theirs.

    tiktoken merges the pair whose result has the lowest rank, so every such pair is a merge.
    """
    find = ranks.get
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = []
        for at in range(1, len(token)):
            left = find(token[:at])
            if left is not None:
                right = find(token[at:])
                if right is not None:
                    pairs.append((left, right))
        pairs.sort()
        merges += pairs
    return merges


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens by id."""
    file = folder / "tokenizer_config.json"
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"{file} has no added_tokens_decoder, which gives the ids of special tokens"
        )
    added = {}
    for token_id, entry in entries.items():
        try:
            options = {name: bool(entry[name]) for name in _OPTIONS if name in entry}
            added[_token_id(token_id)] = AddedToken(entry["content"], **options)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file}: entry {token_id!r} of added_tokens_decoder is not an id with a content"
            ) from error
    return added


def _token_id(text: str) -> int:
    """Return a token id, an int32. Raises ValueError."""
    token_id = int(text)
    if not 0 <= token_id < 2**31:
        raise ValueError(f"{token_id} is not an id")
    return token_id
