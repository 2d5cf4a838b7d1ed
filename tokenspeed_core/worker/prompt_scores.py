"""Log-probabilities of prompt tokens: the LM head over chunks of rows, so that memory is bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tokenspeed_core.api.step import I64, PromptLogprobs, PromptTargets, StepPlan
from tokenspeed_core.worker.sampler import RankedTokens, rank_tokens

MAX_LOGITS = 1 << 24  # logits at a time; their log-softmax takes 64 MiB


class RawPromptLogprobs(RankedTokens):
    """The log-probabilities of prompt tokens."""

    @staticmethod
    def result(arrays: Sequence[np.ndarray[Any, Any]]) -> PromptLogprobs:
        """Return the result's columns from the host copies of `tensors`."""
        chosen, ranks, top_ids, top_values = arrays
        return PromptLogprobs(
            top_ids.shape[1], chosen, ranks, top_ids.reshape(-1), top_values.reshape(-1)
        )


def query_tokens(plan: StepPlan, targets: PromptTargets) -> I64:
    """Return the indices of the query tokens that the targets follow, among all query tokens of a plan."""
    ends = np.cumsum(plan.num_query_tokens, dtype=np.int64)
    first = ends[targets.rows] - plan.num_query_tokens[targets.rows] + targets.starts
    offsets = np.cumsum(targets.counts, dtype=np.int64) - targets.counts
    return np.repeat(first - offsets, targets.counts) + np.arange(len(targets.token_ids))


def score_prompt(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    width: int,
    vocab_size: int,
) -> RawPromptLogprobs:
    """Score tokens with a model's `logits`, `MAX_LOGITS` at a time; log-softmax is in float32.

    hidden [N, H] with N >= 1, token_ids int64 [N], the tokens that follow.
    """
    rows = max(1, MAX_LOGITS // vocab_size)
    parts = [
        rank_tokens(torch.log_softmax(logits(part).float(), dim=-1), ids, width).tensors()
        for part, ids in zip(torch.split(hidden, rows), torch.split(token_ids, rows), strict=True)
    ]
    return RawPromptLogprobs(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
