"""The sizes of captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tokenspeed_core.errors import ConfigError
from tokenspeed_core.worker.staged import BucketSize

_STEP, _LONG_STEP = 8, 16
_PLAIN_DECODES = 16  # from here on plain ones have a bucket of their own
_MANY_DECODES = 64  # from here on rows of padding cost less than a graph more does
_MAX_DECODES = 256
_MAX_CHUNKS = 64
_MAX_TOKENS = 4096  # more take longer to run than to launch: no padding then, and attention is told the rows' lengths
_FEW_TOKENS = 512  # up to here, padding decodes costs as much as the chunk itself
_SMALLEST_CHUNK, _CHUNK_STEP = 32, 64
_TOKENS_OF_A_CHUNK = (
    16  # of a bucket, so that prompts find rows: a row that none takes costs its kernels time too
)
_FEW_CHUNKS = 16


def decode_sizes(
    max_num_seqs: int, most: int | None, wanted: Sequence[int] | None
) -> tuple[int, ...]:
    """Return rows of decode steps, ascending: `wanted` ones within reach, else 1, 2, 4, 8, 16, …, 64, 80, …, `most`.

    Raises ConfigError if none that is wanted is within reach.
    """
    if wanted is not None:
        sizes = tuple(sorted({size for size in wanted if size <= max_num_seqs}))
        if not sizes:
            raise ConfigError(
                f"--cudagraph-capture-sizes has no size up to --max-num-seqs {max_num_seqs}; add one, or say "
                "--enforce-eager"
            )
        return sizes
    largest = min(max_num_seqs, most or _MAX_DECODES)
    steps = (
        1,
        2,
        4,
        *range(_STEP, _MANY_DECODES, _STEP),
        *range(_MANY_DECODES, largest, _LONG_STEP),
    )
    return (*(size for size in steps if size < largest), largest)


def bucket_sizes(
    decodes: Sequence[int], max_num_tokens: int, max_num_seqs: int
) -> tuple[BucketSize, ...]:
    """Return the buckets of decodes alone, then those with chunks, in which tokens ascend.

    Steps are of 64 tokens up to 512, then of a quarter of the last power of two, up to 4,096. The largest hold decodes
    and chunks together: the more of the ones, the fewer of the others. Last come the plain ones, for decodes that are
    many and not lost among chunks.
    """
    tokens, largest = [_SMALLEST_CHUNK], min(max_num_tokens, _MAX_TOKENS)
    while tokens[-1] < largest:
        power = 1 << (tokens[-1].bit_length() - 1)
        tokens.append(tokens[-1] + (min(power, _CHUNK_STEP) if power < _FEW_TOKENS else power // 4))
    most, chunks = decodes[-1], min(_MAX_CHUNKS, max_num_seqs)
    middle = [size for size in (16, 64) if size < most]
    mixed = [
        BucketSize(each, min(chunks, max(_FEW_CHUNKS, count // _TOKENS_OF_A_CHUNK)), count)
        for count in tokens[:-1]
        for each in (0, *(middle if count <= _FEW_TOKENS else middle[1:]), most)
    ]
    step = max(_MANY_DECODES, -(-most // 4))
    full = (0, 0, *range(step, most, step), most)
    mixed += [
        BucketSize(each, chunks, largest - fewer)
        for fewer, each in pairwise(full)
        if fewer < largest
    ]
    sizes = (*(BucketSize(each, 0, 0) for each in decodes), *mixed)
    return sizes + tuple(
        replace(size, no_shared_prefix=True)
        for size in sizes
        if size.num_chunk_tokens <= _FEW_TOKENS
        and size.num_decodes >= (_MANY_DECODES if size.num_chunks else _PLAIN_DECODES)
    )
