"""A fake `LLM` that answers at once. Tests set its vocabulary, context length and speed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tokenspeed_core import BadRequestError, RequestOutput, SequenceOutput


class Plan:
    platform = "FAKE GPU"

    def to_json(self) -> str:
        op = {"op": "attend", "family": "attention", "backend": "fake"}
        return json.dumps({"platform": self.platform, "ops": [op, {**op, "backend": "other"}, op]})


@dataclass
class FakeLLM:
    """`slow` is the duration of the first request in seconds. Call number `raise_at` raises KeyboardInterrupt."""

    vocab_size: int = 100_000
    max_len: int = 10_000
    slow: float = 0.0
    raise_at: int = -1
    drafts: bool = False
    is_draft_paused: bool = False
    calls: list[list[int]] = field(default_factory=list)  # lengths of the prompts of each
    resets: list[int] = field(default_factory=list)  # calls before each reset
    is_shut_down: bool = False
    kernel_plan: Any = field(default_factory=Plan)

    def generate(self, prompts: Any, sampling_params: Any = None) -> list[RequestOutput]:
        params = (
            sampling_params
            if isinstance(sampling_params, list)
            else [sampling_params] * len(prompts)
        )
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        if any(max(each) >= self.vocab_size for each in ids):
            raise BadRequestError(f"ids must be below {self.vocab_size}", "prompt")
        if any(
            len(each) + p.max_tokens > self.max_len for each, p in zip(ids, params, strict=True)
        ):
            raise BadRequestError(
                f"the context is {self.max_len}", "prompt", "context_length_exceeded"
            )
        self.calls.append([len(each) for each in ids])
        if len(self.calls) - 1 == self.raise_at:
            raise KeyboardInterrupt
        time.sleep(self.slow if len(self.calls) == 1 else 0.001)
        return [
            RequestOutput(
                None,
                each,
                [SequenceOutput(0, [1] * p.max_tokens, None, "length", None)],
                len(each) // 2,
            )
            for each, p in zip(ids, params, strict=True)
        ]

    def stats(self) -> Any:
        """Count two steps with three drafts each for every call, if the model drafts."""
        num = 2 * len(self.calls) if self.drafts else 0
        return SimpleNamespace(
            num_draft_rows=num,
            num_draft_tokens=3 * num,
            num_accepted=(num, num // 2),
            num_output_tokens=0,
            num_drafted=(num, num, num),
            is_draft_paused=self.is_draft_paused,
        )

    def reset_prefix_cache(self) -> None:
        self.resets.append(len(self.calls))

    def shutdown(self) -> None:
        self.is_shut_down = True
