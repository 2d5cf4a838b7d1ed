"""The sizes of captured steps, and the choice of a size for a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from tokenspeed_core.api.step import StepPlan, StepSize
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.worker.staged import BucketSize

_STEP, _LONG_STEP = 8, 16
_PLAIN_DECODES = 16  # from this many on, decodes also get a variant without shared-prefix attention
_MANY_DECODES = 64  # from this many on, padding rows cost less than another graph
_MAX_DECODES = 256
_MAX_CHUNKS = 64
# Larger steps run longer than their launch takes. They run eagerly, without padding and with exact lengths.
_MAX_TOKENS = 4096
_FEW_TOKENS = 512  # up to this size, padding decodes costs as much as the chunk itself
_SMALLEST_CHUNK, _CHUNK_STEP = 32, 64
# A bucket has one chunk row for this many tokens. Unused rows cost kernel time too.
_TOKENS_PER_CHUNK = 16
_FEW_CHUNKS = 16
# Chunk tokens of the buckets that have a variant for a draft model, whatever the size of the models.
_FOLLOWED_CHUNKS = (32, 64, 128, 256, 512)
# Operations that a device computes while the host launches a step that a draft model follows, kernel by kernel: an H200
# computes about 600 TFLOP/s, and a launch was measured to take 12 to 20 ms.
_LAUNCH_FLOPS = 9e12
# Decodes of the largest bucket with draft tokens. Larger steps verify drafts eagerly.
_MAX_DRAFTING = 64
# Draft tokens per row of these buckets, besides the maximum. Few tokens take about as long as one.
_FEW_DRAFTING, _DRAFTS_OF_FEW, _DRAFTS_OF_MANY = 8, (4,), (1, 2, 4)


def decode_sizes(
    max_num_seqs: int, max_size: int | None, wanted: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the row counts of captured decode steps, ascending.

    These are the `wanted` sizes up to `max_num_seqs`, or by default 1, 2, 4, 8, 16, …, 64, 80, … up to `max_size`.
    Raises ConfigError if all wanted sizes are larger.
    """
    if wanted is not None:
        sizes = tuple(sorted({size for size in wanted if size <= max_num_seqs}))
        if not sizes:
            raise ConfigError(
                f"--cudagraph-capture-sizes has no size up to --max-num-seqs {max_num_seqs}; add one, or "
                "set --enforce-eager"
            )
        return sizes
    largest = min(max_num_seqs, max_size or _MAX_DECODES)
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
    """Return the decode-only buckets, then those with chunks by ascending tokens, then the `no_shared_prefix` variants.

    Token counts grow by 64 up to 512, then by a quarter of the last power of two, up to 4,096. In the largest buckets,
    decodes and chunk tokens share this maximum. Only buckets with many decodes and few chunk tokens get a variant.
    """
    tokens, largest = [_SMALLEST_CHUNK], min(max_num_tokens, _MAX_TOKENS)
    while tokens[-1] < largest:
        power = 1 << (tokens[-1].bit_length() - 1)
        tokens.append(tokens[-1] + (min(power, _CHUNK_STEP) if power < _FEW_TOKENS else power // 4))
    most, chunks = decodes[-1], min(_MAX_CHUNKS, max_num_seqs)
    middle = [size for size in (16, 64) if size < most]
    mixed = [
        BucketSize(each, min(chunks, max(_FEW_CHUNKS, count // _TOKENS_PER_CHUNK)), count)
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


def draft_sizes(
    decodes: Sequence[int], max_drafts: int, max_draft_tokens: int
) -> tuple[BucketSize, ...]:
    """Return the buckets of decodes with draft tokens, at most `max_drafts` of a row and `max_draft_tokens` in all.

    Their decodes are some of the captured `decodes`: the smallest, numbers that are each at least twice the one before,
    and the largest up to 64. Rows share the draft tokens of a bucket, so that one may have more than another.
    """
    small = [each for each in decodes if each <= _MAX_DRAFTING]
    chosen: list[int] = []
    for each in small:
        if not chosen or each >= 2 * chosen[-1] or each == small[-1]:
            chosen.append(each)
    sizes = []
    for each in chosen if max_drafts else ():
        usual = _DRAFTS_OF_FEW if each <= _FEW_DRAFTING else _DRAFTS_OF_MANY
        per_row = (*(drafts for drafts in usual if drafts < max_drafts), max_drafts)
        counts = sorted({min(each * drafts, max_draft_tokens) for drafts in per_row})
        sizes += [BucketSize(each, 0, 0, num_draft_tokens=count) for count in counts]
    return tuple(sizes)


def followed_sizes(sizes: Sequence[BucketSize], num_parameters: int) -> tuple[BucketSize, ...]:
    """Return variants of sizes with chunks, after which a draft model runs.

    They have separate graphs, since keeping hidden states costs time. Their tokens are powers of two up to 512, and all
    larger numbers for which models with `num_parameters` in all take less time to compute than to launch.
    """
    max_tokens = _LAUNCH_FLOPS / (2 * num_parameters)
    return tuple(
        replace(size, is_followed=True)
        for size in sizes
        if size.num_chunk_tokens in _FOLLOWED_CHUNKS
        or _FEW_TOKENS < size.num_chunk_tokens <= max_tokens
        if not size.no_shared_prefix
    )


class BucketFinder:
    """Finds the bucket of a step among those without `no_shared_prefix`."""

    def __init__(self, sizes: Sequence[BucketSize]) -> None:
        """Sort the sizes by kind of step."""
        self._decodes = sorted(
            size.num_decodes for size in sizes if size.num_tokens == size.num_decodes
        )
        self._drafts = _by_tokens(size for size in sizes if size.num_draft_tokens)
        mixed = _by_tokens(size for size in sizes if size.num_chunks)
        self._mixed = [size for size in mixed if not size.is_followed]
        self._followed = [size for size in mixed if size.is_followed]

    def find(self, plan: StepPlan) -> BucketSize | None:
        """Return the bucket with the fewest tokens, then decodes, that holds a step.

        No bucket holds both chunks and drafts, or computes prompt logprobs.
        """
        if plan.prompt_targets is not None:  # graphs keep the hidden states of sampling rows only
            return None
        decodes = plan.num_decodes
        chunks = plan.num_rows - decodes
        is_followed = plan.next_drafts is not None
        if plan.num_draft_tokens or (is_followed and not chunks):
            return None if chunks else self._with_drafts(decodes, plan.num_draft_tokens)
        if not chunks:
            return self._with_decodes(decodes) if plan.wants_logits.all() else None
        among = self._followed if is_followed else self._mixed
        return _with_chunks(among, decodes, chunks, len(plan.token_ids))

    def find_shared(self, sizes: Sequence[StepSize]) -> BucketSize | None:
        """Return the bucket that holds each of these steps, for several engines to execute together."""
        if any(each.is_eager for each in sizes):
            return None
        decodes = max(each.num_decodes for each in sizes)
        chunks = max(each.num_chunks for each in sizes)
        drafts = max(each.num_draft_tokens for each in sizes)
        if drafts:
            return None if chunks else self._with_drafts(decodes, drafts)
        if not chunks:
            return self._with_decodes(decodes)
        tokens = max(each.num_chunk_tokens for each in sizes)
        return _with_chunks(self._mixed, decodes, chunks, tokens)

    def _with_decodes(self, decodes: int) -> BucketSize | None:
        place = bisect_left(self._decodes, decodes)
        return BucketSize(self._decodes[place], 0, 0) if place < len(self._decodes) else None

    def _with_drafts(self, decodes: int, draft_tokens: int) -> BucketSize | None:
        for size in self._drafts:
            if size.num_draft_tokens >= draft_tokens and size.num_decodes >= decodes:
                return size
        return None


def _with_chunks(
    among: Sequence[BucketSize], decodes: int, chunks: int, chunk_tokens: int
) -> BucketSize | None:
    for size in among:
        if (
            size.num_chunk_tokens >= chunk_tokens
            and size.num_decodes >= decodes
            and size.num_chunks >= chunks
        ):
            return size
    return None


def _by_tokens(sizes: Iterable[BucketSize]) -> list[BucketSize]:
    return sorted(sizes, key=lambda size: (size.num_tokens, size.num_decodes))
