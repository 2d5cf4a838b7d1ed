"""Records work on a device as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GraphRecorder:
    """Records CUDA graphs that share a memory pool, so no two of them may run at the same time."""

    def __init__(self) -> None:
        """Create the pool."""
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, *stages: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the kernels that some functions launch on the current stream.

        They may neither synchronize nor allocate memory outside PyTorch's allocator. Kernels are loaded, and compiled
        if they have to be.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        for stage in stages:
            stage()
        graph.capture_end()
        self._graphs.append(graph)
        return graph

    def release(self) -> None:
        """Free all graphs. None may be running. NCCL waits for this before it shuts down a process group."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def synchronize(self) -> None:
        """Wait for the device, before a recording begins."""
        torch.cuda.synchronize()
