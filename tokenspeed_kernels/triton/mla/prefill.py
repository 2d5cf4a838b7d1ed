"""The op `mla_prefill`: prompts against a latent cache.

Small steps absorb the key expansion into the queries, as decodes do. In larger ones, queries attend to the expanded
entries of the step's own tokens, which takes a third of the operations per query and key, and to earlier tokens either
way: expanded, a bounded number at a time, if the host knows that this takes fewer operations, and else absorbed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.mla import mla_absorb, mla_project
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.mla.absorbed import (
    LOG2_E,
    AbsorbedAttention,
    Tiling,
    fitting_tiling,
)
from tokenspeed_kernels.triton.mla.expanded_kernel import attend, gather
from tokenspeed_kernels.triton.shared_memory import shared_memory

MAX_SMALL_STEP = 512  # query tokens up to which everything is absorbed
ABSORBED_TOKENS = 1024  # query tokens that are absorbed at a time, which bounds the memory
LN_2 = 0.6931471805599453

WIDE = Tiling(32, 32, 4, 1)  # for float32
# For 16 bits: the first that fits the device.
NARROW = (Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 2), Tiling(128, 32, 8, 2), WIDE)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of a step, and the arguments that all of its launches share."""

    cache: Tensor
    kv_up: Tensor
    query_start: Tensor
    lengths: Tensor
    table: Tensor
    scale: float


class MlaPrefill:
    """The op `mla_prefill` of one problem."""

    def __init__(
        self,
        problem: Problem,
        tiling: Tiling | None = None,
        max_small_step: int = MAX_SMALL_STEP,
        absorbed_tokens: int = ABSORBED_TOKENS,
    ) -> None:
        self._num_heads: int = problem["num_heads"]
        self._latent_size: int = problem["latent_size"]
        self._rope_size: int = problem["rope_size"]
        self._nope_size: int = problem["nope_size"]
        self._value_size: int = problem["value_size"]
        self._block_size: int = problem["block_size"]
        self._is_wide = problem["dtype"] == "float32"
        self._block_d, self._block_r, self._block_v = (
            max(16, triton.next_power_of_2(size))
            for size in (self._nope_size, self._rope_size, self._value_size)
        )
        self._tiling = tiling or self._best_tiling()
        self._max_small_step, self._absorbed_tokens = max_small_step, absorbed_tokens
        self._absorb, self._project = mla_absorb(problem), mla_project(problem)
        self._absorbed = AbsorbedAttention(problem)

    def _best_tiling(self) -> Tiling:
        if self._is_wide:
            return WIDE
        memory = shared_memory()
        if memory is None:
            return NARROW[0]
        key_size = self._block_d + self._block_r
        return fitting_tiling(NARROW, memory, key_size, key_size + self._block_v)

    def __call__(
        self,
        q: Tensor,
        cache: Tensor,
        kv_up: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        host_query_start: tuple[int, ...] | None,
        host_seq_lens: tuple[int, ...] | None,
        max_expanded: int,
        scale: float,
        out: Tensor,
    ) -> None:
        """Attend as in the op's contract."""
        rows = _Rows(cache, kv_up, query_start, seq_lens, block_table, scale)
        if q.shape[0] <= self._max_small_step:
            self._attend_absorbed(rows, q, out)
            return
        num_known = -1 if host_query_start is None else host_query_start[-1]
        shape = (q.shape[0], self._num_heads)
        if num_known < q.shape[0]:
            out.zero_()
            # The log-sum-exps of padding are read, but have no weight.
            lse = q.new_zeros(shape, dtype=torch.float32)
        else:
            lse = q.new_empty(shape, dtype=torch.float32)
        num_context = None
        if host_query_start is not None and host_seq_lens is not None:
            num_context = self._num_expanded(host_query_start, host_seq_lens)
        self._attend_own(rows, q, lse, out)
        if num_context is None:
            self._add_absorbed(rows, q, lse, out)
        elif num_context:
            self._add_expanded(rows, q, num_context, max_expanded, lse, out)

    def launch_all(
        self,
        q: Tensor,
        cache: Tensor,
        kv_up: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        out: Tensor,
    ) -> None:
        """Launch each Triton kernel that a step of these shapes may need, to precompile them.

        Omits torch's GEMMs and arithmetic. For meta tensors they import Python modules, which takes seconds.
        """
        rows = _Rows(cache, kv_up, query_start, seq_lens, block_table, 1.0)
        num_tokens, heads = q.shape[:2]
        is_small = num_tokens <= self._max_small_step
        num_absorbed = num_tokens if is_small else self._absorbed_tokens
        absorbed = q.new_empty((num_absorbed, heads, self._latent_size + self._rope_size))
        self._absorbed.prefill(
            absorbed, cache, query_start, seq_lens, block_table, 1.0, context=not is_small
        )
        for start in () if is_small else (None, query_start):
            entries = self._gather(rows, q, 0, num_tokens, start)
            keys = q.new_empty((num_tokens, heads * kv_up.shape[1]))
            lse = q.new_empty((num_tokens, heads), dtype=torch.float32)
            self._attend_keys(rows, q, keys, entries, (0, 0), start, lse, out)

    def _num_expanded(self, starts: tuple[int, ...], lengths: tuple[int, ...]) -> int | None:
        """Return the number of earlier tokens to expand, or None if absorbing takes fewer operations."""
        counts = [end - start for start, end in pairwise(starts)]
        contexts = [max(0, length - count) for length, count in zip(lengths, counts, strict=True)]
        pairs = sum(count * context for count, context in zip(counts, contexts, strict=True))
        sizes = self._nope_size + self._value_size
        expansion = self._latent_size * sizes
        expanded = pairs * (sizes + self._rope_size) + sum(contexts) * expansion
        absorbed = pairs * (2 * self._latent_size + self._rope_size) + starts[-1] * expansion
        return sum(contexts) if expanded <= absorbed else None

    def _attend_absorbed(self, rows: _Rows, q: Tensor, out: Tensor) -> None:
        """Attend to all entries with absorbed queries."""
        y, _ = self._absorbed.prefill(
            self._absorb(q, rows.kv_up),
            rows.cache,
            rows.query_start,
            rows.lengths,
            rows.table,
            rows.scale,
            context=False,
        )
        self._project(y, rows.kv_up, out)

    def _attend_own(self, rows: _Rows, q: Tensor, lse: Tensor, out: Tensor) -> None:
        """Attend to the step's own tokens."""
        entries = self._gather(rows, q, 0, q.shape[0], None)
        self._attend(rows, q, entries, (0, 0), None, lse, out)

    def _add_expanded(
        self,
        rows: _Rows,
        q: Tensor,
        num_context: int,
        max_expanded: int,
        lse: Tensor,
        out: Tensor,
    ) -> None:
        """Attend to earlier tokens, `max_expanded` at a time, and merge the results."""
        contexts = (rows.lengths - rows.query_start.diff()).clamp_(min=0)
        starts = contexts.new_zeros(contexts.shape[0] + 1)
        torch.cumsum(contexts, 0, dtype=torch.int32, out=starts[1:])
        for first in range(0, num_context, max_expanded):
            window = (first, min(first + max_expanded, num_context))
            entries = self._gather(rows, q, first, window[1] - first, starts)
            self._attend(rows, q, entries, window, starts, lse, out)

    def _add_absorbed(self, rows: _Rows, q: Tensor, lse: Tensor, out: Tensor) -> None:
        """Attend to earlier tokens with absorbed queries, some query tokens at a time, and merge the results."""
        num_tokens = min(self._absorbed_tokens, q.shape[0])
        context_out = out.new_empty((num_tokens, *out.shape[1:]))
        contexts = rows.lengths - rows.query_start.diff()
        for first in range(0, q.shape[0], num_tokens):
            tokens = slice(first, first + num_tokens)
            part, into = q[tokens], out[tokens]
            # The rows of these tokens only. Other rows have no queries.
            starts = (rows.query_start - first).clamp_(0, part.shape[0])
            y, context_lse = self._absorbed.prefill(
                self._absorb(part, rows.kv_up),
                rows.cache,
                starts,
                contexts + starts.diff(),
                rows.table,
                rows.scale,
                context=True,
            )
            assert context_lse is not None
            values = context_out[: part.shape[0]]
            self._project(y, rows.kv_up, values)
            weight = torch.sigmoid_((context_lse - lse[tokens]).mul_(LN_2))
            into.lerp_(values, weight.unsqueeze(-1).to(into.dtype))

    def _gather(
        self, rows: _Rows, q: Tensor, first: int, num: int, context_start: Tensor | None
    ) -> Tensor:
        """Return `num` entries in the dtype of q, from index `first` on, of own or of earlier tokens."""
        width = self._latent_size + self._rope_size
        entries = q.new_empty((num, width))
        gather[(num,)](
            rows.cache,
            entries,
            rows.query_start,
            rows.query_start if context_start is None else context_start,
            rows.lengths,
            rows.table,
            rows.lengths.shape[0],
            first,
            rows.cache.stride(0),
            rows.cache.stride(1),
            rows.table.stride(0),
            WIDTH=width,
            BLOCK_W=triton.next_power_of_2(width),
            BLOCK_SIZE=self._block_size,
            CONTEXT=context_start is not None,
            num_warps=4,
        )
        return entries

    def _attend(
        self,
        rows: _Rows,
        q: Tensor,
        entries: Tensor,
        window: tuple[int, int],
        context_start: Tensor | None,
        lse: Tensor,
        out: Tensor,
    ) -> None:
        """Expand gathered entries and attend to them."""
        keys = entries[:, : self._latent_size] @ rows.kv_up.flatten(0, 1).t()
        self._attend_keys(rows, q, keys, entries, window, context_start, lse, out)

    def _attend_keys(
        self,
        rows: _Rows,
        q: Tensor,
        keys: Tensor,
        entries: Tensor,
        window: tuple[int, int],
        context_start: Tensor | None,
        lse: Tensor,
        out: Tensor,
    ) -> None:
        """Attend to expanded entries [K, H * (N + V)]."""
        tiling = self._tiling
        num_tiles = q.shape[0] // tiling.block_m + rows.lengths.shape[0]
        attend[(num_tiles, self._num_heads)](
            q,
            keys,
            entries,
            out,
            lse,
            rows.query_start,
            rows.query_start if context_start is None else context_start,
            rows.lengths,
            rows.lengths.shape[0],
            *window,
            rows.scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            keys.stride(0),
            H=self._num_heads,
            N=self._nope_size,
            R=self._rope_size,
            V=self._value_size,
            WIDTH=entries.shape[1],
            BLOCK_D=self._block_d,
            BLOCK_R=self._block_r,
            BLOCK_V=self._block_v,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            CONTEXT=context_start is not None,
            HAS_LSE=True,
            PRECISION="ieee" if self._is_wide else "tf32",
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )


def mla_prefill(problem: Problem) -> Callable[..., None]:
    """Return the Triton kernel of the op."""
    kernel = MlaPrefill(problem)
    heads, blank, dtype = problem["num_heads"], precompile.blank, problem["dtype"]
    head_size = problem["nope_size"] + problem["rope_size"]
    width = problem["latent_size"] + problem["rope_size"]
    cache = blank(problem["kv_dtype"], 2, 2, problem["block_size"], width)[:, 0]
    up_size = problem["nope_size"] + problem["value_size"]
    # Small steps with few and many tiles, then a large one.
    for num_tokens, num_rows in ((1, 1), (8, 1), (512, 512), (MAX_SMALL_STEP + ABSORBED_TOKENS, 1)):
        precompile.compile_for(
            kernel.launch_all,
            blank(dtype, num_tokens, 2 * heads, head_size)[:, :heads],
            cache,
            blank(dtype, heads, up_size, problem["latent_size"]),
            blank("int32", num_rows + 1),
            blank("int32", num_rows),
            blank("int32", num_rows, 64),
            blank(dtype, num_tokens, heads, problem["value_size"]),
        )
    return kernel
