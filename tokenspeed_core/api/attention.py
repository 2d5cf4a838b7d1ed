"""The contract of attention backends over a paged KV cache: per-step work shared by layers, then one call per layer.

In a step, decode rows come before prefill rows. A backend is built once for each cache group, phase and distinct layer
problem. It allocates its buffers then, so that their addresses stay valid when CUDA graphs replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One layer's attention, known when the model is built.

    `phase` is "prefill" (rows of any number of query tokens, including mixed steps) or "decode" (every row has one
    query token; for backends with `takes_drafts`, rows of a captured step may have several). With a `soft_cap` c,
    scores s become c * tanh(s / c) before the softmax. If it `is_chunked`, `window` is the length of chunks, counted
    from position 0: a query attends to the positions of its chunk up to its own. With sinks, each query head has a
    learned score without a value, which joins the softmax. Keys have `head_size` elements per head, and values
    `value_head_size` (None: as many).

    If it `is_bidirectional`, a row of queries from position 0 is a whole prompt, and its queries attend to all its
    keys; with a window, only to keys less than `window` positions away. Other rows are causal. The engine sets
    `is_bidirectional` in the phase "prefill" only, since decode rows begin after their prompt, and never together with
    `is_chunked`.
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
    soft_cap: float | None = None
    has_sinks: bool = False
    is_chunked: bool = False
    value_head_size: int | None = None
    is_bidirectional: bool = False

    @property
    def out_size(self) -> int:
        """Elements per head of a value, and of the result."""
        return self.value_head_size or self.head_size


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """The largest step for a backend, to size its buffers."""

    max_num_rows: int
    max_num_tokens: int
    max_model_len: int
    max_num_blocks: int  # entries of a row of the block table
    max_drafts: int = 0  # draft tokens of a decode row


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep:
    """One step of a backend. In captured steps, tensors are views of buffers with fixed addresses.

    `seq_lens` counts the tokens in the cache after the step's own are written. `max_*` are host-side upper bounds, in
    captured steps those of the graph. Query token t of row i has the position
    `seq_lens[i] - (query_start[i + 1] - query_start[i]) + (t - query_start[i])` and attends to positions up to its own,
    except in whole prompts of a bidirectional problem.
    A padding row has `seq_lens` 0; its output may be anything but NaN. `num_tokens` may exceed `query_start[num_rows]`
    in a padded graph. `shares_prefix` and `overlaps_prefill` are hints that only captured steps have.
    """

    num_rows: int
    num_tokens: int
    max_num_query: int
    max_seq_len: int
    query_start: torch.Tensor  # int32 [S + 1], the first 0
    seq_lens: torch.Tensor  # int32 [S]
    block_table: torch.Tensor  # int32 [S, max_num_blocks]
    host_query_start: tuple[int, ...] | None  # exact on the host, outside graphs
    # Upper bounds on the host, outside graphs. They are exact without draft tokens.
    host_seq_lens: tuple[int, ...] | None
    # False: fewer than 9 rows share their first 256 tokens, and all rows are short.
    shares_prefix: bool = True
    # True: these are the decodes of a mixed step, which may run concurrently with its prefills.
    overlaps_prefill: bool = False


class AttentionKernel(Protocol):
    """A bound attention backend: `prepare` once per step and group, `forward` once per layer.

    A backend may set the attribute `prepares_on_host = True` if its `prepare` does not touch the device for a
    captured step; replays then do not call it again. It may set `takes_drafts = True` if its phase "decode" serves rows
    with different small numbers of query tokens; otherwise rows with draft tokens run in the phase "prefill".
    """

    def prepare(self, step: AttentionStep) -> None:
        """Do the per-step work. Called outside graphs; fills buffers that `forward` reads."""

    def forward(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend. q [T, H, D], out [T, H, V]; k_cache [B, block_size, K, D] and v_cache [B, block_size, K, V], strided
        on B. V is the problem's `out_size`. Writes `out`.

        The two parts of a mixed step write different rows of `out` and may run concurrently. In a captured graph,
        it must not allocate memory outside the graph's pool. A backend with the feature `sinks` also takes the keyword
        `sinks` (float32 [H], the layer's), passed if and only if the problem has sinks.
        """


class AttentionFactory(Protocol):
    """The factory that a kernel spec of the op `attention` loads."""

    def __call__(
        self, problem: AttentionProblem, limits: AttentionLimits, device: torch.device
    ) -> AttentionKernel:
        """Build a backend and allocate its buffers. Raises ValueError for a problem outside its capability."""
