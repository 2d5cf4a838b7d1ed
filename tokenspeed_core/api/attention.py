"""The contract of attention backends over paged KV: per-step work shared by layers, then one call a layer.

Rows stand decodes first. A backend is built once per cache group, phase and distinct layer problem; its
buffers are allocated then, so that graphs can replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What one layer's attention must do, known when the model is built.

    `phase` is "prefill" (rows of any number of query tokens, mixed ones included) or "decode" (every row
    has the same small number of query tokens, one unless drafts are verified).
    """

    phase: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kv_dtype: str
    block_size: int
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """The most that any step asks of a backend, for sizing its buffers."""

    max_num_rows: int
    max_num_tokens: int
    max_model_len: int
    max_num_blocks: int  # entries of a row of the block table


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep:
    """One step as a backend sees it. Tensors are views of buffers whose addresses never change.

    `seq_lens` counts the tokens in the cache after the step's own are written. `max_*` are host-side upper
    bounds (in a captured graph: the graph's own). Query token t of row i stands at position
    `seq_lens[i] - (query_start[i + 1] - query_start[i]) + (t - query_start[i])` and attends to positions up
    to its own. A padding row has `seq_lens` 0 and may be written with anything but NaN. `num_tokens` may
    exceed `query_start[num_rows]` in a padded graph. The last two are hints, given to captured steps alone.
    """

    num_rows: int
    num_tokens: int
    max_num_query: int
    max_seq_len: int
    query_start: torch.Tensor  # int32 [S + 1], the first 0
    seq_lens: torch.Tensor  # int32 [S]
    block_table: torch.Tensor  # int32 [S, max_num_blocks]
    host_query_start: tuple[int, ...] | None  # exact on the host, outside graphs
    host_seq_lens: (
        tuple[int, ...] | None
    )  # upper bounds on the host (exact unless drafts), outside graphs
    shares_prefix: bool = (
        True  # False: not all rows lead with the same 256 tokens, so none need be looked for
    )
    overlaps_prefill: bool = False  # decodes of a mixed step, beside whose prompts they may run


class AttentionKernel(Protocol):
    """A bound attention backend: `prepare` once a step and group, `forward` once a layer.

    A backend whose `prepare` of a captured step touches nothing on the device may have an attribute
    `prepares_on_host = True`: then the step is replayed without calling it again.
    """

    def prepare(self, step: AttentionStep) -> None:
        """Do the per-step work. Called outside graphs; fills buffers that `forward` reads."""

    def forward(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend. q, out [T, H, D]; k_cache, v_cache [B, block_size, K, D] (strided on B). Writes `out`.

        The two parts of a mixed step, each of which has its own rows of `out`, may run beside each other.
        Captured into graphs: allocates nothing that a replay could not find again.
        """


class AttentionFactory(Protocol):
    """What a kernel spec of the op `attention` loads."""

    def __call__(
        self, problem: AttentionProblem, limits: AttentionLimits, device: torch.device
    ) -> AttentionKernel:
        """Build a backend and allocate its buffers. Raises ValueError on a problem it did not declare."""
