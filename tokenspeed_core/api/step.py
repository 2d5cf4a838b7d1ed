"""Step plans and results: the contract between the scheduler, which plans steps, and the runner, which executes them.

The runner never sees a request. The host plans with upper bounds; exact lengths and the numbers of accepted draft
tokens are known on the device and come back in the result. Every record here can be serialized
(`tokenspeed_core.engine.wire`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tokenspeed_core.errors import TokenSpeedError

# Written out because the wire format is derived from these types, and numpy.typing's alias differs between releases.
I32 = np.ndarray[Any, np.dtype[np.int32]]
I64 = np.ndarray[Any, np.dtype[np.int64]]
F32 = np.ndarray[Any, np.dtype[np.float32]]
Bool = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, eq=False)
class BlockDelta:
    """Changes to the device's block tables of one cache group: `table[slots[i], indices[i]] = blocks[i]`."""

    slots: I32
    indices: I32
    blocks: I32


@dataclass(frozen=True, slots=True, eq=False)
class SlotInits:
    """The sampling state of the N sequences that take a slot in this step, as columns.

    `logprobs` is the number of alternatives per token, -1 for no log-probabilities. `bias_*` and `history_*` are
    ragged: sequence i owns `[starts[i], starts[i + 1])`. `history_ids` holds the tokens of sequences with penalties,
    or logits processors, starting with `history_num_prompt` prompt tokens; it is empty for all others.
    `processors` is JSON, the parameters of logits processors by their names, "" for none; it is empty if no
    sequence has any. The next `num_endless[i]` tokens of sequence i must not be one of its `end_ids`, which are
    empty if that number is 0.
    """

    slots: I32
    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    presence_penalty: F32
    frequency_penalty: F32
    repetition_penalty: F32
    seed: I64
    logprobs: I32
    bias_starts: I32
    bias_ids: I32
    bias_values: F32
    history_starts: I32
    history_ids: I32
    history_num_prompt: I32
    num_endless: I32
    end_starts: I32
    end_ids: I32
    processors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptTargets:
    """The prompt tokens of a step with requested log-probabilities, in C chunk rows.

    Row `rows[i]` of the plan scores `counts[i]` consecutive query tokens from its query token `starts[i]` on.
    `token_ids` [sum(counts)] are the tokens that follow them in the prompt; each gets `width` alternatives.
    """

    rows: I32
    starts: I32
    counts: I32
    width: int
    token_ids: I32


@dataclass(frozen=True, slots=True, eq=False)
class NextDrafts:
    """The work of a draft model after a step: its cache entries of the step, then draft tokens for the next one.

    It makes `num_drafts` tokens for each row that samples, and keeps them on the device. `following` [chunk rows] are
    the prompt tokens after chunks; those of rows that sample are not used. `capacity` [S] counts the tokens that the
    row's blocks hold: entries beyond them are not kept. With `returns_ids` the tokens are part of the step's result
    too, which then waits for the draft model.
    """

    num_drafts: int
    following: I32
    capacity: I32
    returns_ids: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step of S rows: decodes first, then chunks of prompts.

    The first query token of a decode row is the last token of its slot, which is on the device. Its draft tokens
    follow. The query tokens of chunk rows are in `token_ids`, concatenated in row order.

    The runner verifies the draft tokens. At each query token of a decode row it chooses the next token as it would
    without drafts: with the same kernel, the slot's seed, and the random number of that position. The row keeps its
    draft tokens up to the first that differs from the chosen one, and the token that was chosen there. So every output
    is what it would be without drafts, greedy or sampled. A draft token x is a fixed guess, accepted with the
    probability p(x) that the model gives it: as often as by rejection sampling, which accepts with probability
    min(1, p(x) / q(x)), where q(x) = 1 for a fixed guess (Leviathan et al., 2023, arXiv:2211.17192).
    """

    step_id: int
    num_decodes: int
    slots: I32  # [S] slot of each row's sequence
    num_query_tokens: I32  # [S] one, a chunk, or one plus draft tokens
    # [S] tokens in the KV cache before the step; an upper bound for decodes
    num_computed_tokens: I32
    # [S] the row samples after its last query token, or verifies its draft tokens
    wants_logits: Bool
    token_ids: I32  # prompt tokens of the chunk rows
    adapter_ids: I32  # [S] 0: the base model
    block_deltas: tuple[BlockDelta, ...]  # one per cache group
    slot_inits: SlotInits | None  # None: no sequence takes a slot
    prompt_targets: PromptTargets | None = None
    num_draft_tokens: int = 0  # of all decode rows
    # [num_draft_tokens] the draft tokens in row order; None: none, or the device has them
    draft_token_ids: I32 | None = None
    next_drafts: NextDrafts | None = None  # None: no draft model runs

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return int(self.num_query_tokens.sum())


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of one engine's step. From all sizes, engines that share experts choose how to execute the step.

    The defaults describe the step of an engine without requests.
    """

    num_decodes: int = 0
    num_draft_tokens: int = 0  # of all decode rows
    num_chunks: int = 0
    num_chunk_tokens: int = 0
    is_eager: bool = False  # it cannot be captured
    no_shared_prefix: bool = True  # its decodes are short and share no prefix

    @property
    def num_decode_tokens(self) -> int:
        """Query tokens of decodes."""
        return self.num_decodes + self.num_draft_tokens

    @property
    def num_tokens(self) -> int:
        """Query tokens in an eager step; without rows, it has one padding token."""
        return self.num_decode_tokens + self.num_chunk_tokens or 1


@dataclass(frozen=True, slots=True, eq=False)
class LateInputs:
    """Inputs of the sampling launch that may depend on the result of the previous step.

    `mask` has one bit per vocabulary entry (1: allowed) for each of `rows`, as flat int32 words `[len(rows) * words]`.
    The rows are ascending; a row with draft tokens occurs once for each of its query tokens, in their order. The mask
    may be written again once the step was collected.
    """

    rows: I32
    mask: I32


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Log-probabilities of sampled tokens, as columns, for the rows that requested them.

    `rows` are row indices of the plan. `chosen` and `ranks` have an entry for each new token of these rows, in order.
    `top_ids` and `top_values` have `width` for each; a row that requested fewer alternatives uses its first ones.
    """

    rows: I32
    width: int
    chosen: F32
    ranks: I32
    top_ids: I32
    top_values: F32


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of the N tokens of a plan's `prompt_targets`, in their order.

    `chosen` and `ranks` are [N], `top_ids` and `top_values` flat [N * width].
    """

    width: int
    chosen: F32
    ranks: I32
    top_ids: I32
    top_values: F32


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The tokens of a step: `num_tokens[i]` for row i, concatenated. A token of -1: the row had no finite logit.

    `next_draft_ids` are the draft tokens for the next step, `NextDrafts.num_drafts` of each row that samples; None
    unless the plan asks for them with `returns_ids`.
    """

    step_id: int
    num_tokens: I32
    token_ids: I32
    logprobs: StepLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None
    next_draft_ids: I32 | None = None


class StepFailed(TokenSpeedError):
    """A step failed on the device or in a kernel. The content of its blocks is undefined."""


class OutOfMemory(StepFailed):
    """A step ran out of device memory. Later steps may still succeed."""


class Runner(Protocol):
    """Executes steps in the order of their ids. `forward` and `sample` only launch work; `collect` waits for it."""

    def forward(self, plan: StepPlan) -> None:
        """Launch the forward of a step. Raises StepFailed."""

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Launch the sampling of the step launched last. Raises StepFailed."""

    def collect(self, step_id: int) -> StepResult:
        """Wait for the oldest launched step. Raises StepFailed."""

    def close(self) -> None:
        """Free the device memory. Can be called twice."""
