"""The inputs of captured steps: buffers at fixed addresses, and attention inputs bounded by the sizes of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.worker.inputs import Columns, GroupInputs, StepBuffers
from tokenspeed_core.worker.slots import SHORT, SlotState
from tokenspeed_core.worker.staged import BucketSize


class SharedBuffers:
    """Buffers that all buckets share, sized for the largest."""

    def __init__(self, state: SlotState, sizes: Sequence[BucketSize], num_int64: int) -> None:
        """Allocate buffers for steps of these sizes, and for uploads of `num_int64` values."""
        device = state.words.device
        num_rows = max(size.num_rows for size in sizes)
        num_tokens = max(size.num_tokens for size in sizes)
        num_sampled = max(size.num_sampled for size in sizes)
        num_decode_tokens = max(size.num_tokens for size in sizes if not size.num_chunks)
        self.staged = torch.zeros(num_int64, dtype=torch.int64, device=device)
        self.decode_start = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self.decode_inputs = torch.zeros((2, num_decode_tokens), dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.new_positions = torch.zeros(num_sampled, dtype=torch.int64, device=device)
        self.ids = torch.zeros(num_sampled, dtype=torch.int32, device=device)
        # With draft tokens, the host gets the ids and the numbers of new tokens in one copy.
        self._verified = torch.zeros(
            _aligned(num_rows) + num_sampled, dtype=torch.int32, device=device
        )
        self.places = torch.arange(num_sampled, device=device)
        self.tables = [torch.zeros_like(table[:1]).repeat(num_rows, 1) for table in state.tables]
        self.kv_slots = [
            torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in state.tables
        ]
        self.logits: torch.Tensor | None = None  # allocated by the first capture, the largest

    def verified(self, size: BucketSize) -> torch.Tensor:
        """Return the results of a bucket with draft tokens, int32: the number of new tokens of each row, padding, token ids."""
        return self._verified[: _aligned(size.num_rows) + size.num_sampled]

    def of(self, size: BucketSize, columns: Columns) -> StepBuffers:
        """Return a bucket's views."""
        if size.num_chunks:
            token_ids, positions = columns["ids"], columns["positions"]
        else:
            token_ids, positions = self.decode_inputs[:, : size.num_tokens]
        return StepBuffers(
            token_ids=token_ids,
            positions=positions,
            seq_lens=self.seq_lens[: size.num_rows],
            new_positions=self.new_positions[: size.num_sampled],
            tables=[table[: size.num_rows] for table in self.tables],
            kv_slots=[kv_slots[: size.num_tokens] for kv_slots in self.kv_slots],
        )


def _aligned(num_rows: int) -> int:
    """Round up a number of int32 values to a multiple of 16 bytes."""
    return -(-num_rows // 4) * 4


def captured_group_inputs(
    size: BucketSize,
    kv_slots: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    decode_start: torch.Tensor,
    chunk_start: torch.Tensor | None,
    max_model_len: int,
    max_drafts: int = 0,
    *,
    takes_drafts: bool = True,
) -> GroupInputs:
    """Return the attention inputs of a bucket's cache group, with the bucket's sizes as bounds.

    `decode_start` is the `query_start` of decodes; `chunk_start` that of chunks, None without chunks. A decode has at
    most `max_drafts` draft tokens. Without `takes_drafts`, rows with draft tokens are served as chunks.
    """
    decodes = AttentionStep(
        num_rows=size.num_decodes,
        num_tokens=size.num_decodes + size.num_draft_tokens,
        max_num_query=1 + min(size.num_draft_tokens, max_drafts),
        max_seq_len=min(SHORT, max_model_len) if size.no_shared_prefix else max_model_len,
        query_start=decode_start[: size.num_decodes + 1],
        seq_lens=seq_lens[: size.num_decodes],
        block_table=table[: size.num_decodes],
        host_query_start=None,
        host_seq_lens=None,
        shares_prefix=not size.no_shared_prefix,
        overlaps_prefill=size.num_chunks > 0,
    )
    if chunk_start is None:
        are_chunks = size.num_draft_tokens and not takes_drafts
        return GroupInputs(kv_slots, decodes, 0 if are_chunks else size.num_decodes, None, None)
    chunks = AttentionStep(
        num_rows=size.num_chunks,
        num_tokens=size.num_chunk_tokens,
        max_num_query=size.num_chunk_tokens,
        max_seq_len=max_model_len,
        query_start=chunk_start,
        seq_lens=seq_lens[size.num_decodes : size.num_rows],
        block_table=table[size.num_decodes : size.num_rows],
        host_query_start=None,
        host_seq_lens=None,
    )
    if not size.num_decodes:
        return GroupInputs(kv_slots, chunks, 0, None, None)
    return GroupInputs(kv_slots, chunks, size.num_decodes, decodes, chunks)
