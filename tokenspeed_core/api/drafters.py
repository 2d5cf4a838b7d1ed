"""The contract of drafters: they propose the next tokens of sequences, and the target model verifies them.

A drafter changes how many steps an output takes, never the output. A `DrafterSpec` runs on the host, a
`ModelDrafterSpec` names a model that runs on the device after each step. Imports no tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tokenspeed_core.targets import load_target

if TYPE_CHECKING:
    from tokenspeed_core.api.models import ModelInfo, ModelSpec
    from tokenspeed_core.api.step import F32, I32


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The environment of a drafter. A slot is the place of a running sequence, from 0 to `num_slots - 1`."""

    vocab_size: int
    num_slots: int
    max_model_len: int  # tokens of a sequence
    max_drafts: int  # maximum number of tokens proposed for a sequence
    options: Mapping[
        str, Any
    ]  # the algorithm's own settings, which `DrafterSpec.check` has accepted


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Proposed tokens of S sequences: `counts[i]` (0 or more) for sequence i, concatenated in `token_ids`.

    `probabilities`, one for each token, estimate how probable a token is if all before it are right. None: the drafter
    has no estimate.
    """

    counts: I32
    token_ids: I32
    probabilities: F32 | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens on the host. All calls come from the engine's thread, so they delay every step.

    For each sequence: `begin`, then any number of `extend` and `propose`, then `end`. A sequence that was preempted
    ends, and begins again with all its tokens. If a drafter raises, or proposes too many tokens or a token outside the
    vocabulary, the engine disables it and logs an error. Outputs are not affected.
    """

    def begin(self, slot: int, token_ids: I32, num_prompt_tokens: int, tenant: str) -> None:
        """Start a sequence. Its first `num_prompt_tokens` tokens are its prompt.

        `tenant` identifies the API key and the request's cache salt. The sequences of a tenant must not affect the
        proposals for another tenant.
        """

    def extend(self, slots: I32, counts: I32, token_ids: I32) -> None:
        """Add tokens that were generated: `counts[i]` (1 or more) for the sequence in `slots[i]`, concatenated."""

    def propose(self, slots: I32, max_drafts: I32) -> Drafts:
        """Return at most `max_drafts[i]` (1 or more) tokens that probably follow the sequence in `slots[i]`.

        `propose` may be called while the tokens of a step in flight are not known yet. If its proposals show that waiting
        is worthwhile, the engine drops them, waits, passes the new tokens to `extend`, and calls `propose` again. A step
        may also verify fewer tokens than proposed, or none.

        Proposing few tokens, or none, is better than proposing improbable ones: each token makes the step longer.
        """

    def end(self, slot: int) -> None:
        """Free the memory of the sequence in a slot. `begin` and `extend` have received all its tokens."""


@dataclass(frozen=True, slots=True)
class AnyDrafterSpec:
    """A drafter of any kind, registered in `tokenspeed.drafters` under the name of its algorithm."""

    # "module:function"; `function(options)` raises ValueError, with the name and the rule, for wrong options
    check: str

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for wrong options."""
        load_target(self.check)(options)


@dataclass(frozen=True, slots=True)
class DrafterSpec(AnyDrafterSpec):
    """A drafter that runs on the host."""

    load: str  # "module:factory"; `factory(context: DrafterContext)` returns a Drafter

    def make(self, context: DrafterContext) -> Drafter:
        """Return a drafter. Raises ImportError, AttributeError, or the factory's exception."""
        drafter: Drafter = load_target(self.load)(context)
        return drafter


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """The checkpoint of the target or of a draft model.

    `spec` and `info` describe its model family. Both are None if no installed family supports its architecture.
    """

    path: Path
    config: Mapping[str, Any]  # config.json
    spec: ModelSpec | None
    info: ModelInfo | None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The input of a drafter's `plan`. `draft` is the checkpoint of `--speculative-draft-model-path`, if given."""

    target: DraftCheckpoint
    draft: DraftCheckpoint | None
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelDrafterSpec(AnyDrafterSpec):
    """A drafter that is a model and runs on the device."""

    # "module:function"; `function(request: DraftRequest)` returns a DraftModelInfo. It raises ValueError if the target
    # or the draft model does not fit, and imports no tensor library.
    plan: str
    # Whether `--speculative-draft-model-path` is required. If not, the flag is rejected.
    needs_checkpoint: bool
