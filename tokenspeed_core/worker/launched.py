"""A launched step, from its forward until its result is collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenspeed_core.api.step import I64, StepPlan, StepResult
from tokenspeed_core.worker.captured_step import GraphLaunch
from tokenspeed_core.worker.draft_model import TargetStep
from tokenspeed_core.worker.prompt_scores import RawPromptLogprobs
from tokenspeed_core.worker.sampler import RawLogprobs, SamplingRows
from tokenspeed_core.worker.transfer import Fetch, HostDeviceTransfer


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step between its forward and its collection. `graph` is set if a graph ran, which sampled greedily.

    `at` are the indices of the sampling rows among the fetched tokens, None if all rows sampled.
    """

    plan: StepPlan
    logits: torch.Tensor | None
    rows: SamplingRows | None
    graph: GraphLaunch | None = None
    at: I64 | None = None
    fetch: Fetch | None = None
    num_new: torch.Tensor | None = None  # with drafts, the new tokens of each row that samples
    verified: torch.Tensor | None = None  # starts with `num_new` and ends with the chosen tokens
    target: TargetStep | None = None  # set if a draft model runs after the step
    drafts: Fetch | None = None  # its draft tokens for the next step
    logprobs: RawLogprobs | None = None
    prompt: RawPromptLogprobs | None = None

    def fetch_to_host(self, transfer: HostDeviceTransfer, ids: torch.Tensor) -> None:
        """Start to copy the chosen tokens, int32 [R], and all log-probabilities to the host."""
        found = (self.logprobs, self.prompt)
        others = [tensor for each in found if each is not None for tensor in each.tensors()]
        if others:
            self.verified = None
        if self.verified is not None:
            self.fetch = transfer.fetch_ids(self.verified)
            return
        if self.num_new is not None:
            others.insert(0, self.num_new)
        self.fetch = transfer.fetch((ids, *others)) if others else transfer.fetch_ids(ids)

    def wait(self) -> Sequence[np.ndarray[Any, Any]]:
        """Wait for the step. Returns the arrays of `fetch_to_host`, then the draft tokens if they were fetched."""
        assert self.fetch is not None, "a step is sampled before it is collected"
        arrays = self.fetch()
        if self.verified is not None:
            assert self.rows is not None and self.num_new is not None, "draft tokens were verified"
            (verified,) = arrays
            arrays = [verified[-len(self.rows.plan_rows) :], verified[: len(self.num_new)]]
        if self.drafts is not None:
            arrays += self.drafts()
        return arrays

    def result(self, arrays: Sequence[np.ndarray[Any, Any]]) -> StepResult:
        """Return the result of the step from the arrays of `wait`."""
        step_id, rows = self.plan.step_id, self.rows
        ids, *scores = arrays
        drafts = None if self.drafts is None else scores.pop().reshape(-1)
        num_tokens = np.zeros(self.plan.num_rows, np.int32)
        prompt = None if self.prompt is None else self.prompt.result(scores[-4:])
        if rows is None:
            return StepResult(step_id, num_tokens, ids, None, prompt)
        if self.at is not None:
            ids = ids[self.at]
        is_kept = None
        if rows.drafts is None:
            num_tokens[rows.plan_rows] = 1
        else:
            num_new, *scores = scores
            num_tokens[rows.drafts.host.rows] = num_new
            is_kept = rows.drafts.is_kept(num_new)
            ids = ids[is_kept]
        logprobs = None if self.logprobs is None else self.logprobs.result(scores[:4], is_kept)
        return StepResult(step_id, num_tokens, ids, logprobs, prompt, drafts)
