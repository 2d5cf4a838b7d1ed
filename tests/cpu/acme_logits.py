"""Example plugins with logits processors: no token twice, and one that fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenspeed_core.api import LogitsProcessorContext, LogitsProcessorSpec, LogitsRows

if TYPE_CHECKING:
    import torch


def check(params: Mapping[str, Any]) -> None:
    """Check the parameters of `NoRepeat`: `penalty`, a number, and `prompt`, whether its tokens count."""
    for name, value in params.items():
        if name not in ("penalty", "prompt"):
            raise ValueError(f"unknown parameter {name!r}; available: penalty, prompt")
        if not isinstance(value, bool if name == "prompt" else int | float):
            raise ValueError(
                f"{name} is {value!r}: must be {'true or false' if name == 'prompt' else 'a number'}"
            )


class NoRepeat:
    """Subtracts `penalty` (1000 by default) from the logits of tokens that a sequence already has."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        import torch

        self.seen = torch.zeros(
            context.num_slots, context.vocab_size, dtype=torch.bool, device=context.device
        )
        self.penalty = torch.zeros(context.num_slots, 1, device=context.device)
        self.skip = torch.zeros(context.num_slots, dtype=torch.bool, device=context.device)

    def begin(
        self, slot: int, params: Mapping[str, Any], token_ids: Any, num_prompt_tokens: int
    ) -> None:
        import torch

        start = 0 if params.get("prompt") else num_prompt_tokens
        self.seen[slot] = False
        self.seen[slot, torch.from_numpy(token_ids[start:].astype(np.int64))] = True
        # The first call repeats the last known token: without output, that is the prompt's.
        self.skip[slot] = start == len(token_ids)
        self.penalty[slot] = float(params.get("penalty", 1000))

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        import torch

        slots = torch.tensor(rows.slots, device=logits.device)
        self.seen[slots, rows.last_tokens] |= ~self.skip[slots]
        self.skip[slots] = False
        logits -= self.penalty[slots] * self.seen[slots]


class Broken:
    """Fails where its parameters say."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self.fails_later: set[int] = set()

    def begin(
        self, slot: int, params: Mapping[str, Any], token_ids: Any, num_prompt_tokens: int
    ) -> None:
        if params.get("at") == "begin":
            raise RuntimeError("broken at begin")

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        raise RuntimeError("broken at apply")


def check_nothing(params: Mapping[str, Any]) -> None:
    """Accept anything."""


NO_REPEAT = LogitsProcessorSpec("acme_logits:NoRepeat", "acme_logits:check", {"penalty": 5})
BROKEN = LogitsProcessorSpec("acme_logits:Broken", "acme_logits:check_nothing", {})
