"""Logits processors: plugins that change the logits of the requests that name them.

A request names a processor and gives it JSON parameters; it cannot send code. The server runs them only with
`--enable-custom-logit-processor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tokenspeed_core.targets import load_target

if TYPE_CHECKING:
    import torch

    from tokenspeed_core.api.step import I32


@dataclass(frozen=True, slots=True)
class LogitsProcessorContext:
    """The environment of a processor. A slot is the place of a running sequence, from 0 to `num_slots - 1`."""

    vocab_size: int
    num_slots: int
    device: str  # as torch writes it, such as "cuda:0"


@dataclass(frozen=True, slots=True, eq=False)
class LogitsRows:
    """The R sequences for which logits are changed.

    `last_tokens` int64 [R], on the device, are the tokens that the model has just read. On the first call after
    `begin`, that is the last of `begin`'s tokens.
    """

    slots: Sequence[int]
    last_tokens: torch.Tensor


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes logits. All calls come from one thread, in the order of the steps.

    An exception ends only the sequences of the call's rows, with an error.
    """

    def begin(
        self, slot: int, params: Mapping[str, Any], token_ids: I32, num_prompt_tokens: int
    ) -> None:
        """Discard the state of the slot: a sequence with these parameters takes it.

        `token_ids` are its prompt and, if it was preempted, the tokens generated before.
        """

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """Change logits float32 [R, V] in place, before sampling; -inf forbids a token.

        Called once for every new token of a sequence. The host runs a step ahead of the device, so waiting for
        the device (`.item()`, `.cpu()`) slows down all requests. Sequences that ended may be among the rows
        once more.
        """


@dataclass(frozen=True, slots=True)
class LogitsProcessorSpec:
    """A logits processor, registered in `tokenspeed.logits_processors` under the name that requests use.

    The module of the spec, and of `check`, imports no tensor library: API processes read it.
    """

    load: str  # "module:factory"; `factory(context: LogitsProcessorContext)` returns a LogitsProcessor
    # "module:function"; `function(params)` raises ValueError, with the name and the rule, for wrong parameters
    check: str
    example: Mapping[str, Any]  # valid parameters, for the conformance kit

    def check_params(self, params: Mapping[str, Any]) -> None:
        """Raise ValueError for wrong parameters."""
        load_target(self.check)(params)

    def factory(self) -> Callable[[LogitsProcessorContext], LogitsProcessor]:
        """Import and return the factory."""
        factory: Callable[[LogitsProcessorContext], LogitsProcessor] = load_target(self.load)
        return factory
