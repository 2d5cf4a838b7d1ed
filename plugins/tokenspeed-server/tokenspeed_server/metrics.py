"""The counters of all API workers, in shared memory, so that each worker can report all of them.

A worker counts in plain integers and copies them to the shared memory every second. A value there has one
writer and 8 bytes, so that a reader sees old or new numbers, never halves.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed_core.api.hooks import RequestRecord
from tokenspeed_core.commands.serving import REQUEST_BOUNDS, Histogram, HistogramCounts

# Upper bounds of the buckets, in seconds.
TOKEN_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.01, 0.0125, 0.015, 0.0175, 0.02),
    *(0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
# Upper bounds of the buckets, in tokens.
LENGTH_BOUNDS = tuple(float(2**power) for power in range(21))

FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")
STATUSES = (
    200,
    400,
    401,
    403,
    404,
    405,
    408,
    411,
    413,
    415,
    421,
    422,
    429,
    431,
    499,
    500,
    503,
    504,
)
OTHER_STATUS = 0

HISTOGRAMS = {
    "time_to_first_token": REQUEST_BOUNDS,
    "inter_token_latency": TOKEN_BOUNDS,
    "time_per_output_token": TOKEN_BOUNDS,
    "e2e_request_latency": REQUEST_BOUNDS,
    "decode_time": REQUEST_BOUNDS,
    "prompt_tokens": LENGTH_BOUNDS,
    "generation_tokens": LENGTH_BOUNDS,
}
_COUNTERS = len(FINISH_REASONS) + len(STATUSES) + 1
# The first cell of each histogram, and the cell of its sum, which follows its counts.
_CELLS: dict[str, tuple[int, int]] = {}
for _name, _bounds in HISTOGRAMS.items():
    _start = max((end + 1 for _, end in _CELLS.values()), default=_COUNTERS)
    _CELLS[_name] = (_start, _start + len(_bounds) + 1)
ROW_BYTES = 8 * (max(end for _, end in _CELLS.values()) + 1)


class MetricsMemory:
    """Memory with a row for each API worker."""

    def __init__(self, num_workers: int, fd: int | None = None) -> None:
        """Make the memory, or open that of the parent process by its descriptor."""
        self.num_workers = num_workers
        self.fd = os.memfd_create("tokenspeed-metrics") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, ROW_BYTES * num_workers)
        self._memory = memoryview(mmap.mmap(self.fd, ROW_BYTES * num_workers))

    def row(self, worker: int) -> Row:
        """Return the row of a worker."""
        return Row(self._memory[worker * ROW_BYTES : (worker + 1) * ROW_BYTES])

    def rows(self) -> list[Row]:
        """Return the rows of all workers."""
        return [self.row(worker) for worker in range(self.num_workers)]


class Row:
    """The counters of a worker, in shared memory."""

    def __init__(self, memory: memoryview) -> None:
        """View a part of the memory."""
        self._integers: Any = memory.cast("q")
        self._floats: Any = memory.cast("d")

    def write(self, counters: Sequence[int], histograms: Mapping[str, Histogram]) -> None:
        """Replace the numbers."""
        self._integers[:_COUNTERS] = array("q", counters)
        for name, (start, end) in _CELLS.items():
            values = histograms[name].snapshot()
            self._integers[start:end] = array("q", values.counts)
            self._floats[end] = values.total

    def histogram(self, name: str) -> HistogramCounts:
        """Return a histogram."""
        start, end = _CELLS[name]
        return HistogramCounts(tuple(self._integers[start:end]), self._floats[end])

    def finish_reasons(self) -> dict[str, int]:
        """Return the number of requests by finish reason."""
        return dict(zip(FINISH_REASONS, self._integers, strict=False))

    def statuses(self) -> dict[int, int]:
        """Return the number of HTTP responses by status; `OTHER_STATUS` for those not in `STATUSES`."""
        cells = self._integers[len(FINISH_REASONS) : _COUNTERS]
        return dict(zip((*STATUSES, OTHER_STATUS), cells, strict=True))


class WorkerMetrics:
    """The counters of this API worker. They reach the shared memory with `flush`, once a second."""

    def __init__(self, row: Row) -> None:
        """Start with zeros."""
        self._row = row
        self._counters = [0] * _COUNTERS
        self._histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self.time_to_first_token = self._histograms["time_to_first_token"]
        self.inter_token_latency = self._histograms["inter_token_latency"]

    def flush(self) -> None:
        """Write the numbers to the shared memory."""
        self._row.write(self._counters, self._histograms)

    def observe_request(self, record: RequestRecord) -> None:
        """Count a finished request."""
        if record.finish_reason in FINISH_REASONS:
            self._counters[FINISH_REASONS.index(record.finish_reason)] += 1
        histograms = self._histograms
        histograms["e2e_request_latency"].observe(record.duration)
        histograms["prompt_tokens"].observe(record.num_prompt_tokens)
        histograms["generation_tokens"].observe(record.num_output_tokens)
        if record.time_to_first_token is not None:
            decode = record.duration - record.time_to_first_token
            histograms["decode_time"].observe(decode)
            if record.num_output_tokens > 1:
                per_token = decode / (record.num_output_tokens - 1)
                histograms["time_per_output_token"].observe(per_token)

    def observe_status(self, status: int) -> None:
        """Count an HTTP response. Probes are not counted."""
        position = STATUSES.index(status) if status in STATUSES else len(STATUSES)
        self._counters[len(FINISH_REASONS) + position] += 1


def merged(rows: Sequence[Row], name: str) -> HistogramCounts:
    """Return a histogram of all workers together."""
    parts = [row.histogram(name) for row in rows]
    counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True)))
    return HistogramCounts(counts, sum(part.total for part in parts))
