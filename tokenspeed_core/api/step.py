"""The step contract: all that the runner hears, and all that it says.

The runner never sees a request. The host plans with upper bounds; exact lengths and accepted counts
live on the device and come back ragged. Every record here survives the wire (`tokenspeed_core.engine.wire`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tokenspeed_core.errors import TokenSpeedError

# Written out, because the wire reads its schema from them and numpy.typing's alias differs between releases.
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
class BlockCopy:
    """Blocks of one cache group to copy, all at once, before the step's forward: `src[i]` to `dst[i]`."""

    src: I32
    dst: I32


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingSpan:
    """Query tokens `[start, start + length)` of a row, whose embeddings media fill instead of ids."""

    row: int
    start: int
    length: int
    media_id: int


@dataclass(frozen=True, slots=True, eq=False)
class SlotInits:
    """What the device must know of the sequences that take a slot with this step, as columns of N.

    `logprobs` is the number of alternatives wanted, -1 for none. `bias_*` and `history_*` are ragged:
    sequence i owns `[starts[i], starts[i + 1])`. `history_ids` holds the known tokens of sequences
    with penalties only, prompt first (`history_num_prompt` of them).
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


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One forward of the engine, for S rows; decode rows stand first.

    A decode row's first query token is the last token that its slot holds on the device, the rest are
    the drafts there. A chunk row's query tokens are in `token_ids`, concatenated in row order.
    """

    step_id: int
    num_decodes: int
    slots: I32  # [S] the device-side place of each row's sequence
    num_query_tokens: I32  # [S] tokens of the row in this step: one, a chunk, or one plus drafts
    num_computed_tokens: I32  # [S] tokens in the KV cache before it; for decodes an upper bound
    wants_logits: Bool  # [S] the row samples: after its last query token, or verifies its drafts
    token_ids: I32  # prompt tokens of the chunk rows
    adapter_ids: I32  # [S] 0: the base model
    block_deltas: tuple[BlockDelta, ...]  # one per cache group
    block_copies: tuple[BlockCopy, ...]  # one per cache group
    slot_inits: SlotInits | None  # None: nobody new
    embedding_spans: tuple[EmbeddingSpan, ...]
    group_num_tokens: (
        I32  # [replicas] query tokens of each replica of the step group; [0] when alone
    )

    @property
    def num_rows(self) -> int:
        """Rows in the step; zero when only the step group needs it."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return int(self.num_query_tokens.sum())


@dataclass(frozen=True, slots=True, eq=False)
class LateInputs:
    """Host inputs of the sampling launch, which may depend on the step before.

    `mask` packs one bit per vocabulary entry (1: allowed) for each row of `rows` and draft position:
    int32 words, `[len(rows) * positions * words]` flat.
    """

    rows: I32
    num_positions: int
    mask: I32


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Log-probabilities of the sampled tokens of the rows that asked, as columns.

    `rows` are row indices of the plan; `chosen` and `ranks` [len(rows)]; `top_ids` and `top_values` are
    flat [len(rows) * width], the row's wanted number of alternatives being its first ones.
    """

    rows: I32
    width: int
    chosen: F32
    ranks: I32
    top_ids: I32
    top_values: F32


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step gave: `num_tokens[i]` tokens for row i (0 where it sampled nothing), concatenated."""

    step_id: int
    num_tokens: I32
    token_ids: I32
    logprobs: StepLogprobs | None


class StepFailed(TokenSpeedError):
    """A step that raised on the device or in a kernel; its blocks hold nothing of use."""


class OutOfMemory(StepFailed):
    """A step that found too little free memory, and harmed nothing: later ones may run."""


class Runner(Protocol):
    """Executes steps in the order of their ids. `forward` and `sample` launch; `collect` waits."""

    def forward(self, plan: StepPlan) -> None:
        """Launch the forward of a step. Raises StepFailed."""

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Launch the sampling of the step whose forward was launched last. Raises StepFailed."""

    def collect(self, step_id: int) -> StepResult:
        """Wait for the oldest launched step. Raises StepFailed."""

    def close(self) -> None:
        """Free the device. Safe to call twice."""
