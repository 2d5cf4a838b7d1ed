"""The op `mla_decode` with the dense decode kernel of FlashMLA (DeepSeek, 2025, github.com/deepseek-ai/FlashMLA).

Steps of few rows run the portable Triton kernel.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton.mla import absorbed

# Imported with this module, so that selection rejects a library that does not load.
LIBRARY = import_module("flash_mla")
if not LIBRARY.has_legacy():
    raise ImportError("flash_mla has no kernels for compute capability 9.0")
MAX_ROWS = 8192  # the library schedules in shared memory, with 20 bytes per row
# Numbers of heads and the fewest rows for which the library was faster on an H200 with contexts of 640 and 4,096
# tokens (`benchmarks/mla.py`). An entry also holds for more heads.
MIN_ROWS = ((128, 1), (32, 2), (1, 16))


class FlashMlaDecode:
    """The op `mla_decode` for all layers of one problem on one device.

    A small kernel of the library divides the rows' blocks among multiprocessors. It runs once per step, in the first
    layer. Lengths are read on the device, so CUDA graphs may replay calls with other lengths.
    """

    def __init__(self, problem: Problem) -> None:
        self._num_heads, self._latent_size = problem["num_heads"], problem["latent_size"]
        self._min_rows = min_rows(self._num_heads)
        self._few_rows = absorbed.mla_decode(problem) if self._min_rows > 1 else None

    def __call__(
        self,
        q: Tensor,
        cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        scale: float,
        schedule: Any = None,
    ) -> Tensor:
        """Attend as in the op's contract, with a schedule from `plan`. Raises ValueError for more than `MAX_ROWS` rows."""
        num_rows = q.shape[0]
        if num_rows > MAX_ROWS:
            raise ValueError(f"mla_decode by flashmla supports {MAX_ROWS} rows, got {num_rows}")
        if num_rows == 0:
            return q.new_empty((0, self._num_heads, self._latent_size))
        if self._few_rows is not None and num_rows < self._min_rows:
            return self._few_rows(q, cache, block_table, seq_lens, max_seq_len, scale, None)
        if schedule is None or isinstance(schedule, Tensor):  # a shared prefix
            schedule = new_schedule()
        # With a computed schedule, the library's kernel does not wait for the end of the previous one on the stream if
        # that one allows it to start early (programmatic dependent launch). Filling a tensor does not allow it.
        seq_lens.new_zeros(1)
        y: Tensor
        y, _ = LIBRARY.flash_mla_with_kvcache(
            q.unsqueeze(1),
            cache.unsqueeze(2),
            block_table,
            seq_lens,
            self._latent_size,
            schedule,
            softmax_scale=scale,
            use_legacy=True,
        )
        return y.squeeze(1)

    def plan(self) -> Any:
        """Return an empty schedule for all layers of a step. The first call with it computes it on the device."""
        return new_schedule()


def min_rows(num_heads: int) -> int:
    """Return the smallest number of rows for which the library runs."""
    return next(rows for heads, rows in MIN_ROWS if num_heads >= heads)


def new_schedule() -> Any:
    """Return an empty schedule of the library."""
    schedule, _ = LIBRARY.get_mla_metadata()
    return schedule
