"""A build that quantises, with the reference kernels of a method's ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_core.api import Quantization
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import load_target
from tokenspeed_models.testing import DenseBuild


class QuantizedBuild(DenseBuild):
    """Gives the references of what a method names, and plain torch for everything else."""

    def __init__(self, method: Quantization, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.quantization = method
        names = {method.quantize, method.quantize_weight, method.linear, *method.fused.values()}
        self._references = {
            name: contract.reference
            for name, contract in installed_ops(Catalog.discover()).items()
            if name in names
        }

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        if op not in self._references:
            return super().op(op, **problem)
        self.problems.append((op, problem))
        kernel: Callable[..., Any] = load_target(self._references[op])(problem)
        return kernel
